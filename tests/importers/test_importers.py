"""Foreign tables as runs: exact units, every row accounted for, one clear line for whatever is
wrong.
"""

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from quantbench.device import lookup
from quantbench.errors import InputError, StoreError, UnsupportedError
from quantbench.importers import aiconfigurator, csv_table
from quantbench.importers.disagreement import disagreements
from quantbench.importers.runs import ImportSummary, Origin, Row, Rows, summary_lines, write_run
from quantbench.latency.gemm.model import GemmModel
from quantbench.store.folder import read_run
from quantbench.store.record import GridPosition, Measured, Skipped
from quantbench.workload import Attention, Collective, Gemm, MoE

A100 = lookup("a100-sxm4-80gb")
ORIGIN = Origin("t", "table of nobody", {"x": "1"}, {"importer": "test", "sha256": "0"})

needs_package = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="the extra quantbench[tables] is not installed"
)


def row(m: int, latency_us: float, kernel: str | None = None) -> Row:
    return Row(Gemm(m, 4096, 4096), latency_us, "lib", GridPosition({"m": m}, "gemm"), kernel)


def written(results: Path, rows: list[Row]) -> ImportSummary:
    return write_run(results, A100, ORIGIN, Rows(rows))


# --- writing a run -----------------------------------------------------------------------------------------------


def test_rows_become_records_that_read_back(tmp_path: Path) -> None:
    found = Rows([row(128, 40.0), row(128, 44.0), row(256, 50.0, kernel="ampere_gemm")])
    found.left_out["a sliding window"] += 3
    summary = write_run(tmp_path, A100, ORIGIN, found)
    assert (summary.rows, summary.records, summary.rejected, summary.no_time) == (6, 2, 0, 0)
    run = read_run(tmp_path / "a100-sxm4-80gb" / "t")
    assert (run.info.origin, run.info.source) == ("imported", "table of nobody")
    assert run.info.axes == {"m": [128, 256]}
    assert run.info.options["left_out"] == {"a sliding window": 3}
    first, second = run.records
    # Repeats of a shape are samples of one record.
    assert first.outcome.measurement.samples_us == (40.0, 44.0)
    assert (first.source, first.outcome.grade.letter) == ("table of nobody", "C")
    assert first.launch is None
    assert second.launch.kernel == "ampere_gemm"


def test_impossible_figures_are_kept_and_marked(tmp_path: Path) -> None:
    # 2·4096³ at 312 TFLOP/s take 440.5 µs; 4096×4096 weights in bf16 at 2039 GB/s take 16.5 µs.
    rows = [row(4096, 440.0), row(4095, 460.0), row(1, 16.0), row(2, float("nan")), row(3, 0.0)]
    summary = written(tmp_path, rows)
    assert (summary.rejected, summary.no_time) == (1, 2)
    outcomes = [record.outcome for record in read_run(summary.folder).records]
    letters = [o.grade.letter for o in outcomes if isinstance(o, Measured)]
    assert letters == ["rejected", "C", "D"]
    assert isinstance(outcomes[0], Measured)
    assert outcomes[0].grade.reasons[0] == "312.4 TFLOP/s is above the peak of 312"
    assert isinstance(outcomes[2], Measured)
    assert outcomes[2].grade.reasons[0].startswith("2098 GB/s is above the memory's 2039")
    assert outcomes[3] == Skipped("the table gives no time: nan µs")
    assert "  1 of them rejected: faster than the device's peak" in summary_lines(summary)
    shapes = ("gemm 2×4096×4096 bf16 nn: nan µs", "gemm 3×4096×4096 bf16 nn: 0 µs")
    assert f"  2 rows without a time above 0: {'; '.join(shapes)}" in summary_lines(summary)


@pytest.mark.parametrize(
    ("factor", "said"), [(1e3, "the median time is "), (1e-3, "the median time is 1/")]
)
def test_times_in_another_unit_are_refused(factor: float, said: str, tmp_path: Path) -> None:
    times = {128: 40.0, 256: 55.0, 4096: 470.0}
    rows = [row(m, us * factor) for m, us in times.items()]
    with pytest.raises(InputError) as caught:
        written(tmp_path, rows)
    assert str(caught.value).startswith(f"import: {said}")
    assert str(caught.value).endswith(
        "expected times in the unit that was stated, or --units-are-right"
    )
    assert list(tmp_path.iterdir()) == []
    written(tmp_path, [row(m, us) for m, us in times.items()])


def test_times_of_a_processor_are_not_those_of_a_gpu(tmp_path: Path) -> None:
    rows = [replace(row(m, m * 20.0), provider="torch.mm") for m in range(512, 1024, 32)]
    with pytest.raises(
        InputError, match=r"large products take 83 times what they should on a100-sxm4-80gb"
    ):
        written(tmp_path, rows)


def test_a_table_without_a_usable_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"all 2 figures are above the peak of a100-sxm4-80gb"):
        written(tmp_path, [row(4096, 400.0), row(8192, 800.0)])
    with pytest.raises(InputError, match=r"all 1 figures are above the peak"):
        write_run(tmp_path, A100, ORIGIN, Rows([row(4096, 4e-3)]), units_are_right=True)
    with pytest.raises(
        InputError, match=r"no row has a time above 0, such as gemm 4096×4096×4096 .*: -1 µs"
    ):
        written(tmp_path, [row(4096, -1.0), row(8192, float("nan"))])
    assert list(tmp_path.iterdir()) == []


def test_shapes_with_different_times_are_named(tmp_path: Path) -> None:
    work = Gemm(128, 4096, 4096)
    rows = [
        Row(work, us, "lib", GridPosition({"m": 128}, "gemm"), kernel, f"line {line}")
        for line, (us, kernel) in enumerate(
            [(40.0, None), (44.0, None), (41.0, "k"), (60.0, None)], start=2
        )
    ]
    same = [row(256, 50.0), row(256, 50.0), row(512, 70.0)]
    summary = written(tmp_path, [*rows, *same])
    assert summary.repeated == 1
    assert (
        "  1 shape more than once with different times, kept as samples; most apart: gemm 128×4096×4096 bf16 nn: "
        "40.0 µs (line 2), 60.0 µs (line 5)" in summary_lines(summary)
    )


def test_kernel_names_tell_tiles(tmp_path: Path) -> None:
    names = [
        "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn",
        "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_0x0_32x3_tn_align8",  # no tile has such sizes
        "my_kernel",
    ]
    rows = [row(128 * n, 40.0 * n, kernel=name) for n, name in enumerate(names, start=1)]
    summary = written(tmp_path, rows)
    launches = [record.launch for record in read_run(summary.folder).records]
    assert [launch and launch.kernel for launch in launches] == names
    assert [launch and launch.tile and str(launch.tile) for launch in launches] == [
        "256x128x64",
        None,
        None,
    ]
    assert summary.no_tile == 2
    assert "  2 records with a kernel name that has no tile" in summary_lines(summary)


def test_the_same_table_twice_is_left_alone_and_another_refused(tmp_path: Path) -> None:
    first = written(tmp_path, [row(1, 20.0)])
    before = (first.folder / "records.jsonl").read_bytes()
    again = written(tmp_path, [row(1, 20.0)])
    assert again.existed
    assert (first.folder / "records.jsonl").read_bytes() == before
    other = Origin("t", "table of nobody", {}, {"importer": "test", "sha256": "1"})
    with pytest.raises(
        StoreError, match=r"holds another table; expected another --run-id, or that folder removed"
    ):
        write_run(tmp_path, A100, other, Rows([row(1, 20.0)]))
    with pytest.raises(InputError, match=r"no row can be kept: a sliding window \(2 rows\)"):
        write_run(tmp_path, A100, ORIGIN, Rows([], Counter({"a sliding window": 2})))


def test_a_seeded_sample_keeps_as_many_rows_of_each_dtype() -> None:
    def rows() -> Rows:
        found = [row(m, 40.0) for m in range(1, 101)]
        found += [replace(one, workload=replace(one.workload, dtype="fp8")) for one in found[:5]]
        return Rows(found)

    first, again, other = rows(), rows(), rows()
    for sampled, seed in ((first, 0), (again, 0), (other, 1)):
        sampled.sample(20, seed)
    assert Counter(one.workload.dtype for one in first.rows) == {"bf16": 20, "fp8": 5}
    assert first.rows == again.rows != other.rows
    assert first.total == 105


def test_a_region_that_is_slower_as_a_whole_is_named() -> None:
    model = GemmModel.best("b200-sxm-180gb", dtype="fp8_block")
    works = [
        Gemm(m, 4096, k, dtype="fp8_block", layout="nt")
        for m in (8, 512)
        for k in range(1024, 4096, 64)
    ]
    times = [one.latency_us for one in model.predict_gemms(works)]
    slow = [us * (18 if work.m == 8 else 1.2) for work, us in zip(works, times, strict=True)]
    rows = [
        Row(work, us, "vllm", GridPosition({}, "gemm"))
        for work, us in zip(works, slow, strict=True)
    ]
    (line,) = disagreements(model.device, rows)
    assert "fp8_block products with m <= 64: their median is 18 times" in line


# --- csv ---------------------------------------------------------------------------------------------------------


def csv_rows(folder: Path, text: str, mapped: str, dtype: str = "") -> list[Row]:
    """The rows of a table t.csv that holds `text`."""
    (folder / "t.csv").write_text(text)
    return csv_table.read_rows(folder / "t.csv", csv_table.parse_map(mapped), dtype=dtype).rows


def test_csv_map_with_units(tmp_path: Path) -> None:
    text = "M,N,K,time,fmt,name\n128,256,512,0.25,bfloat16,k1\n129,256,512,0.5,half,\n\n"
    rows = csv_rows(tmp_path, text, "m=M, n=N,k=K,latency=time:ms,dtype=fmt,kernel=name")
    assert [(r.workload, r.latency_us, r.kernel) for r in rows] == [
        (Gemm(128, 256, 512, dtype="bf16"), 250.0, "k1"),
        (Gemm(129, 256, 512, dtype="fp16"), 500.0, None),
    ]
    assert rows[0].place.axes == {"m": 128, "n": 256, "k": 512, "batch": 1}
    for unit, us in (("ns", 0.25e-3), ("us", 0.25), ("s", 0.25e6)):
        first, _ = csv_rows(tmp_path, text, f"m=M,n=N,k=K,latency=time:{unit}", "bf16")
        assert first.latency_us == pytest.approx(us)


def test_csv_of_other_workloads(tmp_path: Path) -> None:
    mapped = "batch=b,heads=h,seq_q=s,seq_k=s,head_dim=d,causal=causal,latency=t:us"
    (one,) = csv_rows(tmp_path, "b,h,s,d,causal,t\n2,8,1024,64,True,90\n", mapped, "bf16")
    assert one.workload == Attention(2, 8, 1024, 1024, 64)
    mapped = "op=op,message_bytes=bytes,num_gpus=gpus,latency=t:us"
    (one,) = csv_rows(tmp_path, "op,bytes,gpus,t\nall_reduce,1024,8,9\n", mapped, "fp16")
    assert one.workload == Collective("all_reduce", 1024, 8, dtype="fp16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "m=M,n=N,k=K",
            "without latency; expected latency=column:unit, as in m=M,n=N,k=K,latency=time:ms",
        ),
        (
            "m=M,n=N,k=K,latency=time",
            "'latency=time'; expected latency=column:unit with unit one of ns, us, ms, s",
        ),
        (
            "m=M,n=N,k=K,latency=time:min",
            "'latency=time:min'; expected latency=column:unit with unit one of",
        ),
        (
            "m=M,n=N,latency=t:ms",
            "--map with m, n, latency; expected dtype, kernel, provider, latency and the sizes",
        ),
        ("m=M,n=N,k=K,heads=H,latency=t:ms", "--map with m, n, k, heads, latency"),
        (
            "message_bytes=s,num_gpus=g,latency=t:us",
            "collective: op, message_bytes, num_gpus, num_nodes",
        ),
        ("m,n=N", "--map 'm'; expected field=column"),
        ("m=M,m=N", "--map names m twice; expected each field once"),
    ],
)
def test_csv_map_errors(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        csv_table.parse_map(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("M,N,K\n1,2,3\n", "t.csv has no column 'time'; expected one of M, N, K"),
        ("M,N,K,time\n1,2,x,3\n", "t.csv, line 2, column K = 'x'; expected a number"),
        ("M,N,K,time\n1,2,2.5,3\n", "t.csv, line 2, column K = '2.5'; expected a whole number"),
        ("M,N,K,time\n1,2,,3\n", "t.csv, line 2, column K = ''; expected a whole number"),
        ("M,N,K,time\n1,2,3,fast\n", "t.csv, line 2, column time = 'fast'; expected a number"),
        ("M,N,K,time\n1,2,-3,4\n", "t.csv, line 2: Gemm: k = -3; expected an integer from 1"),
        (
            "M,N,K,time\n1,2,3\n",
            "t.csv: line 2 has 3 cells for 4 columns; expected a header line and one cell",
        ),
        ("M,M,K,time\n", "t.csv: column 'M' appears twice"),
    ],
)
def test_csv_file_errors(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        csv_rows(tmp_path, content, "m=M,n=N,k=K,latency=time:ms", "bf16")
    assert message in str(error.value)


# --- aiconfigurator ----------------------------------------------------------------------------------------------


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aiconfigurator, "systems_folder", lambda: None)
    with pytest.raises(
        UnsupportedError, match=r"pip install -e '\.\[tables\]' in quantbench's checkout, or --root"
    ):
        aiconfigurator.find_tables("a100_sxm")


def write_parquet(root: Path, tables: dict[str, list[dict[str, object]]]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, rows in tables.items():
        path = root / "data" / "a100_sxm" / f"{name}.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), path)


def write_tables(root: Path) -> Path:
    """A systems folder with one system of three small tables."""
    pytest.importorskip("yaml")
    (root / "a100_sxm.yaml").write_text(
        "data_dir: data/a100_sxm\nmisc:\n  nccl_version: '2.27.3'\n"
    )
    common = {"framework": "VLLM", "version": "1", "device": "NVIDIA A100-SXM4-80GB"}
    gemm = {
        **common,
        "op_name": "gemm",
        "kernel_source": "torch.nn.functional.linear",
        "gemm_dtype": "bfloat16",
    }
    sizes = {"m": 128, "n": 256, "k": 512, "latency": 0.25}
    attention = {
        **common, "op_name": "context_attention", "kernel_source": "vllm_flash_attn_fa3", "batch_size": 2, "isl": 64,
        "num_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "beam_width": 1, "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16", "step": 0, "window_size": 0, "latency": 0.5,
    }  # fmt: skip
    nccl = {"nccl_dtype": "half", "num_gpus": 8, "message_size": 512, "kernel_source": "NCCL", "op_name": "alltoall",
            "latency": 0.01}  # fmt: skip
    tables = {
        "gemm/vllm/1/gemm_perf": [
            {**gemm, **sizes},
            {**gemm, **sizes, "gemm_dtype": "fp8", "kernel_source": "CutlassFP8"},
            {**gemm, **sizes, "gemm_dtype": "sq"},
        ],
        "attention/vllm/1/context_attention_perf": [
            attention,
            {**attention, "window_size": 128},
            {**attention, "kv_cache_dtype": "fp8"},
            {**attention, "attn_dtype": "fp8", "kv_cache_dtype": "fp8"},
        ],
        "comm/nccl/2.27.3/nccl_perf": [nccl],
    }
    write_parquet(root, tables)
    return root


def test_aiconfigurator_tables_from_a_folder(tmp_path: Path) -> None:
    root = write_tables(tmp_path)
    tables, missing = aiconfigurator.find_tables("a100_sxm", backend="vllm", root=root)
    assert missing == []
    gemm, attention, nccl = (aiconfigurator.read_rows(t) for t in tables)
    assert [(r.workload, r.latency_us, r.provider, r.kernel) for r in gemm.rows] == [
        (Gemm(128, 256, 512, layout="nt"), 250.0, "vllm", None),
        (Gemm(128, 256, 512, layout="nt", dtype="fp8"), 250.0, "vllm.cutlassfp8", "CutlassFP8"),
    ]
    assert gemm.left_out == {"gemm_dtype sq: no such matrix product here": 1}
    assert [(r.workload, r.provider, r.kernel) for r in attention.rows] == [
        (Attention(2, 8, 64, 64, 128, kv_heads=2), "vllm.flash_attn_fa3", "vllm_flash_attn_fa3")
    ]
    assert attention.left_out == {
        "a sliding window": 1,
        "keys and values in fp8 beside queries in bfloat16": 1,
        "attn_dtype fp8: no such attention here": 1,
    }
    assert nccl.rows[0].workload == Collective(
        "all_to_all", 1024, 8, dtype="fp16"
    )  # 512 elements of 2 bytes
    assert nccl.rows[0].latency_us == pytest.approx(10.0)
    only = aiconfigurator.read_rows(tables[0], dtypes=["bf16"])
    assert len(only.rows) == 1
    assert only.left_out["dtype fp8 was not asked for"] == 1
    origin = aiconfigurator.origin_of(tables[0])
    assert origin.run_id.endswith("-gemm-vllm-1")
    assert origin.source.endswith("a100_sxm/gemm/vllm/1/gemm_perf.parquet (vllm 1)")


def test_aiconfigurator_experts(tmp_path: Path) -> None:
    root = write_tables(tmp_path)
    moe = {
        "kernel_source": "sglang_fused_moe_triton", "moe_dtype": "bfloat16", "num_tokens": 64, "hidden_size": 2688,
        "inter_size": 1856, "topk": 6, "num_experts": 128, "moe_tp_size": 2, "moe_ep_size": 4,
        "distribution": "power_law_1.2", "latency": 0.5,
    }  # fmt: skip
    narrow = {**moe, "inter_size": 768}
    rows = [moe, {**narrow, "moe_dtype": "int4_wo"}, narrow]
    write_parquet(root, {"moe/sglang/1/moe_perf": rows})
    (file,), _ = aiconfigurator.find_tables(
        "a100_sxm", backend="sglang", version="1", root=root, kinds=("moe",)
    )
    experts = aiconfigurator.read_rows(file)
    layer = MoE(64, 2688, 1856, 128, 6, tp=2, ep=4, gated=False, distribution="power_law_1.2")
    assert [row.workload for row in experts.rows] == [
        layer,
        replace(layer, expert_ffn=768, gated=True),
    ]
    assert experts.left_out == {"moe_dtype int4_wo: no such matrix product here": 1}
    assert experts.rows[0].provider == "sglang.fused_moe_triton"


def test_aiconfigurator_errors(tmp_path: Path) -> None:
    root = write_tables(tmp_path)
    for typed, said in (
        (
            {"system": "h100_sxm"},
            r"--system h100_sxm: no .*h100_sxm.yaml; expected one of a100_sxm",
        ),
        ({"backend": "trtllm"}, r"--backend trtllm --version \(not given\) for a100_sxm; .* vllm"),
        ({"kinds": ["mla"]}, r"--table 'mla'; expected one of gemm, context_attention, nccl"),
    ):
        asked: Any = {"system": "a100_sxm", "root": root} | typed
        with pytest.raises(InputError, match=said):
            aiconfigurator.find_tables(**asked)
    broken = root / "data/a100_sxm/gemm/vllm/1/gemm_perf.parquet"
    broken.write_bytes(b"nonsense")
    table = aiconfigurator.find_tables("a100_sxm", backend="vllm", root=root, kinds=["gemm"])[0][0]
    with pytest.raises(StoreError, match=r"expected a Parquet file"):
        aiconfigurator.read_rows(table)


@needs_package
def test_packaged_h200_attention_has_its_head_dims() -> None:
    (table,), _ = aiconfigurator.find_tables("h200_sxm", kinds=["context_attention"])
    works = [r.workload for r in aiconfigurator.read_rows(table).rows]
    assert {w.head_dim for w in works if isinstance(w, Attention)} == {64, 128, 192, 256, 512}
