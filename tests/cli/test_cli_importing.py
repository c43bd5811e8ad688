"""The import commands as they are typed: what they print, what they leave, how they refuse."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from quantbench.cli.import_ import import_aiconfigurator, import_csv
from quantbench.errors import InputError, StoreError
from quantbench.store.folder import read_run

app = typer.Typer()
app.command("csv")(import_csv)
app.command("aiconfigurator")(import_aiconfigurator)


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(
        "M,N,K,time\n4096,4096,4096,0.6\n4096,4096,4096,0.7\n4096,4096,8192,0.5\n64,4096,4096,\n"
    )
    return path


def test_csv(table: Path, tmp_path: Path) -> None:
    words = [
        "csv",
        str(table),
        "--map",
        "m=M,n=N,k=K,latency=time:ms",
        "--gpu",
        "a100-sxm4-80gb",
        "--dtype",
        "bf16",
    ]
    said = run(*words, "--results", str(tmp_path / "results"))
    assert "4 rows read, 3 records written" in said
    assert "1 of them rejected: faster than the device's peak" in said
    assert "1 row without a time above 0: gemm 64×4096×4096 bf16 nn: nan µs (line 5)" in said
    assert "1 shape more than once with different times" in said
    assert "600 µs (line 2), 700 µs (line 3)" in said
    folder = next((tmp_path / "results" / "a100-sxm4-80gb").iterdir())
    assert f"Next: quantbench check {folder}" in said
    run_read = read_run(folder)
    assert run_read.info.options["map"] == "m=M,n=N,k=K,latency=time:ms"
    assert len(run_read.records) == 3
    again = run(*words, "--results", str(tmp_path / "results"), "--json")
    assert json.loads(again)[0]["existed"] is True
    for changed in (["--dtype", "fp16"], ["--provider", "cublas"]):
        with pytest.raises(StoreError, match="holds another table"):
            run(*words, *changed, "--results", str(tmp_path / "results"))
    with pytest.raises(InputError, match="import: nvfp4 on a100-sxm4-80gb; expected one of bf16, "):
        run(*words, "--dtype", "nvfp4", "--results", str(tmp_path / "results"))


def test_a_wrong_unit_is_refused_and_can_be_insisted_on(table: Path, tmp_path: Path) -> None:
    results = ("--results", str(tmp_path / "results"))
    words = [
        "csv",
        str(table),
        "--map",
        "m=M,n=N,k=K,latency=time:s",
        "--gpu",
        "a100-sxm4-80gb",
        "--dtype",
        "bf16",
    ]
    with pytest.raises(
        InputError, match=r"the median time is [0-9,]+ times what a100-sxm4-80gb should take"
    ):
        run(*words, *results)
    assert not (tmp_path / "results").exists()
    assert "3 records written" in run(*words, *results, "--units-are-right")


def test_an_unknown_gpu_is_named(table: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a1000"):
        run(
            "csv",
            str(table),
            "--map",
            "m=M,n=N,k=K,latency=time:ms",
            "--gpu",
            "a1000",
            "--dtype",
            "bf16",
        )
    assert not (tmp_path / "results").exists()


def test_a_system_without_a_slug_needs_a_gpu() -> None:
    with pytest.raises(
        InputError, match=r"--system b60 without --gpu; expected a slug of `quantbench devices`"
    ):
        run("aiconfigurator", "--system", "b60")


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
    words = [
        "aiconfigurator",
        "--system",
        "l4",
        "--root",
        str(tmp_path),
        "--results",
        str(tmp_path / "results"),
    ]
    said = run(*words)
    assert "1 row read, 1 record written" in said
    assert "l4 has no nccl table" in said
    assert (tmp_path / "results" / "l4-24gb").is_dir()
    missing_column = pa.table({"m": [1]})
    pq.write_table(missing_column, path)
    with pytest.raises(
        InputError, match=r"gemm_perf.parquet has no column 'gemm_dtype' \(it has m\)"
    ):
        run(*words, "--run-id", "mine")
