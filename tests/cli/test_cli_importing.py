"""The import commands as they are typed: what they print, what they leave, how they refuse."""

import json
from pathlib import Path

import pytest
from commands import refused, run

from quantbench.store.folder import read_run


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(
        "M,N,K,time\n4096,4096,4096,0.6\n4096,4096,4096,0.7\n4096,4096,8192,0.5\n64,4096,4096,\n"
    )
    return path


def test_csv(table: Path, tmp_path: Path) -> None:
    words = (
        f"import csv {table} --map m=M,n=N,k=K,latency=time:ms --gpu a100-sxm4-80gb --dtype bf16"
    )
    said = run(f"{words} --results {tmp_path / 'results'}")
    assert "4 rows read, 3 records written" in said
    assert "layout nn assumed; linear layers: --layout nt" in said
    folder = next((tmp_path / "results" / "a100-sxm4-80gb").iterdir())
    assert f"Next: quantbench check {folder}, or profile export {folder} --format" in said
    run_read = read_run(folder)
    assert run_read.info.options["map"] == "m=M,n=N,k=K,latency=time:ms"
    assert len(run_read.records) == 3
    again = run(f"{words} --results {tmp_path / 'results'} --json")
    assert json.loads(again)[0]["existed"] is True
    for changed in ("--dtype fp16", "--provider cublas", "--layout nt"):
        error = refused(f"{words} {changed} --results {tmp_path / 'results'}")
        assert "was imported from the same table with other options" in error.value
    said = run(f"{words} --layout nt --run-id linear --results {tmp_path / 'results'}")
    assert "assumed" not in said
    linear = read_run(folder.with_name("linear"))
    assert {record.workload.layout for record in linear.records} == {"nt"}
    other = words.replace("m=M,n=N,k=K", "op=M,message_bytes=N,num_gpus=K")
    assert refused(f"{other} --layout nt").expected == "products only"
    assert refused(f"{words} --dtype nvfp4").value == "nvfp4 on a100-sxm4-80gb"


def test_a_wrong_unit_is_refused_and_can_be_insisted_on(table: Path, tmp_path: Path) -> None:
    results = f"--results {tmp_path / 'results'}"
    words = f"import csv {table} --map m=M,n=N,k=K,latency=time:s --gpu a100-sxm4-80gb --dtype bf16"
    assert "the median time is" in refused(f"{words} {results}").value
    assert not (tmp_path / "results").exists()
    assert "3 records written" in run(f"{words} {results} --units-are-right")


def test_aiconfigurator_from_a_folder(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("yaml")
    (tmp_path / "l4.yaml").write_text("data_dir: tables\n")
    path = tmp_path / "tables" / "gemm" / "vllm" / "2" / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    row = {
        "gemm_dtype": "bfloat16",
        "m": 512,
        "n": 512,
        "k": 512,
        "latency": 0.02,
        "kernel_source": "x",
    }
    pq.write_table(pa.Table.from_pylist([row]), path)
    words = f"import aiconfigurator --system l4 --root {tmp_path} --results {tmp_path / 'results'}"
    said = run(f"{words}")
    assert "1 row read, 1 record written" in said
    assert "l4 has no nccl table" in said
    assert (tmp_path / "results" / "l4-24gb").is_dir()
    pq.write_table(pa.table({"m": [1]}), path)
    assert refused(f"{words} --run-id mine").value.endswith("has no column 'gemm_dtype' (it has m)")
