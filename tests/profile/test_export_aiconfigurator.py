"""The aiconfigurator export, loaded by aiconfigurator's own package and asked by its own engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run
from known_profile import (
    ATTENTIONS,
    COLLECTIVES,
    GEMMS,
    gemm_row,
    known_profile,
    known_tables,
    table,
)
from sweep_doubles import Clock, QuietWorker, measured

from quantbench.device import lookup
from quantbench.errors import InputError, UnsupportedError
from quantbench.importers import aiconfigurator as importer
from quantbench.profile import Profile
from quantbench.profile.exporters import export_profile
from quantbench.profile.exporters.aiconfigurator_modelled import AT_CLIFF
from quantbench.profile.exporters.options import Exported, ExportOptions, of_provider
from quantbench.store.folder import read_run

pytest.importorskip("yaml", reason="needs PyYAML, which comes with quantbench[tables]")
pq = pytest.importorskip(
    "pyarrow.parquet", reason="needs pyarrow, which comes with quantbench[tables]"
)

# In a process of its own: the engine is native code, and what it leaves behind stays there.
_LOAD = """
import json, os, sys
from aiconfigurator_core.sdk import common, perf_database
from aiconfigurator_core.sdk.operations.attention import ContextAttention, GenerationAttention
from aiconfigurator_core.sdk.operations.communication import NCCL
from aiconfigurator_core.sdk.operations.gemm import GEMM
root, system, queries = json.load(sys.stdin)
db = perf_database.get_database(system, "vllm", "quantbench", systems_paths=root, shared_layer=False,
                                strict_provenance=True)
Q, C = common.GEMMQuantMode, common.CommQuantMode
F, KV = common.FMHAQuantMode.bfloat16, common.KVCacheQuantMode.bfloat16
for op in (GEMM, ContextAttention, GenerationAttention, NCCL):
    op.load_data(db)
products = [[m, n, k, at["latency"]] for m, ns in db._gemm_data[Q.bfloat16].items()
            for n, ks in ns.items() for k, at in ks.items()]
def walk(node, keys=()):
    if "latency" in node:
        return [[*keys, node["latency"]]]
    return [row for key, below in node.items() for row in walk(below, (*keys, key))]
answer = {
    "products": products,
    "engine": [float(GEMM("g", 1.0, n, k, Q.bfloat16)._engine_query(db, x=m)) for m, n, k in queries],
    "context": walk(db._context_attention_data[F][KV]),
    "generation": walk(db._generation_attention_data[KV]),
    "nccl": walk(db._nccl_data[C.half]) if db._nccl_data.loaded else [],
    "nccl_engine": [float(NCCL("n", 1.0, "all_reduce", 1, 2, C.half)._engine_query(db, x=x)) for x in (1024, 2048)]
                   if db._nccl_data.loaded else [],
}
print("\\n" + json.dumps(answer), flush=True)
os._exit(0)
"""


def answer(script: str, *given: Any) -> Any:
    """What the script prints in a process of its own."""
    pytest.importorskip("aiconfigurator_core", reason="needs quantbench[tables]")
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(given, default=str),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


#: what the package reads in a folder of systems, and what its engine answers, in milliseconds
load = partial(answer, _LOAD)


def gemm_table(root: Path, system: str = "a100_sxm") -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = pq.read_table(
        root / "data" / system / "gemm" / "vllm" / "quantbench" / "gemm_perf.parquet"
    ).to_pydict()
    return columns


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of the known profile."""
    folder = tmp_path_factory.mktemp("known")
    export_profile(known_profile(), "aiconfigurator", folder)
    return folder


@pytest.fixture(scope="module")
def read_back(known: Path) -> Any:
    """What the package reads in it."""
    return load(known, "a100_sxm", list(GEMMS))


def test_the_package_gives_every_measured_figure_back(read_back: Any) -> None:
    read = {tuple(row[:3]): row[3] for row in read_back["products"]}
    expected = [us / 1e3 for us in GEMMS.values()]
    assert [read[shape] for shape in GEMMS] == expected
    # Its engine floors times at the roofline; none of these is below it.
    assert read_back["engine"] == pytest.approx(expected, rel=1e-12)


def test_attention_is_read_back_by_its_sizes(read_back: Any) -> None:
    # Its keys: kv heads (0 for as many as heads), head_dim, window, heads, then isl, batch or
    # batch, cached + 1.
    context = {tuple(row[:-1]): row[-1] for row in read_back["context"]}
    generation = {tuple(row[:-1]): row[-1] for row in read_back["generation"]}
    for (batch, heads, kv_heads, seq_q, seq_k, head_dim, causal), us in ATTENTIONS.items():
        kv = 0 if kv_heads == heads else kv_heads
        if causal:
            assert context.pop((kv, head_dim, 0, heads, seq_q, batch)) == us / 1e3
        else:
            assert seq_q == 1
            assert generation.pop((kv, head_dim, 0, heads, batch, seq_k)) == us / 1e3
    assert context == generation == {}


def test_nccl_is_read_back_in_elements(read_back: Any, tmp_path: Path) -> None:
    made = export_profile(known_profile(), "aiconfigurator", tmp_path)
    read = {tuple(row[:-1]): row[-1] for row in read_back["nccl"]}
    expected = {
        ({"all_to_all": "alltoall"}.get(op, op), num_gpus, size // 2): us / 1e3
        for (op, size, num_gpus, _, num_nodes), us in COLLECTIVES.items()
        if num_nodes == 1 and op != "send_recv"
    }
    assert read == expected
    assert read_back["nccl_engine"] == [0.0095, 0.0105]
    assert made.left_out["a collective between nodes: no place for it there"] == 1


def test_both_sides_of_every_known_cliff_are_rows(known: Path) -> None:
    columns = gemm_table(known)
    shapes = list(zip(*map(columns.get, "mnk"), strict=True))
    rows = dict(zip(shapes, columns["latency"], strict=True))
    sources = dict(zip(shapes, columns["kernel_source"], strict=True))
    assert rows[128, 4096, 4096] == 36.9375 / 1e3
    assert rows[129, 4096, 4096] == 63.3 / 1e3
    # The cliff of many curves stands at each (n, k) whose rows reach past it, between what was
    # measured.
    assert sources[1024, 4096, 4096] == sources[1025, 4096, 4096] == AT_CLIFF
    for m in (1024, 1025):
        assert rows[256, 4096, 4096] < rows[m, 4096, 4096] < rows[2048, 4096, 4096]
    assert not any(m in (1024, 1025) for m, n, k in rows if (n, k) != (4096, 4096))


@pytest.fixture
def few_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine (n, k) in the place of hundreds."""
    sites = list(product((512, 4096, 10240), repeat=2))
    monkeypatch.setattr("quantbench.profile.exporters.aiconfigurator.MODEL_SITES", sites)


@pytest.mark.slow
@pytest.mark.usefixtures("few_sites")
def test_without_measured_products_the_model_fills_the_table(tmp_path: Path) -> None:
    made = export_profile(known_profile({}), "aiconfigurator", tmp_path)
    columns = gemm_table(tmp_path)
    # No model of vLLM's, the backend's, ships for an A100: the table says whose it is.
    assert set(columns["kernel_source"]) == {"quantbench_model_of_sglang"}
    assert set(columns["origin"]) == {"modelled"}
    (said,) = [note for note in made.notes if note.startswith("bf16 products")]
    assert "shapes of sglang, as no model of vllm's is shipped" in said
    assert re.search(r"; 2\.9 % off \(median\), [\d.]+ % \(95th percentile\) on others", said)
    (said,) = [note for note in made.notes if note.startswith("generation attention")]
    assert "5.0 % off (median)" in said
    # At one site: the grid, and rows so near the model's edges that straight lines stay within the
    # bound.
    from quantbench.latency.gemm.model import GemmModel

    n = k = 4096
    own = sorted(
        (m, ms) for m, nn, kk, ms in zip(*map(columns.get, ("m", "n", "k", "latency")), strict=True)
        if (nn, kk) == (n, k)
    )  # fmt: skip
    rows_m, rows_ms = (np.array(values) for values in zip(*own, strict=True))
    model = GemmModel.best("a100-sxm4-80gb")
    assert model.predict(rows_m, n, k).latency_us / 1e3 == pytest.approx(rows_ms, rel=1e-9)
    edges = np.arange(128, 4096, 128)
    between = np.unique(np.concatenate([edges, edges + 1]))
    lines = np.interp(between, rows_m, rows_ms)
    error = np.abs(lines / (model.predict(between, n, k).latency_us / 1e3) - 1.0)
    assert error.max() < 0.05 + 1e-6
    assert len(rows_m) < 60


@pytest.mark.slow
@pytest.mark.usefixtures("few_sites")
def test_the_model_s_table_is_loaded_too(tmp_path: Path) -> None:
    export_profile(
        known_profile({}, "v100-sxm2-32gb"), "aiconfigurator", tmp_path, ExportOptions(dtype="fp16")
    )
    columns = gemm_table(tmp_path, "v100_sxm2_32gb")
    found = load(tmp_path, "v100_sxm2_32gb", [])
    assert len(found["products"]) == len(columns["m"])
    assert len(found["context"]) > 1000
    assert len(found["generation"]) > 1000
    assert found["nccl"] == []


# What the package's own planner needs for a serving step, with nothing but the exported tables.
_SERVE = """
import json, logging, os, sys
logging.disable(logging.CRITICAL)
from aiconfigurator_core.sdk import config, perf_database
from aiconfigurator_core.sdk.backends.factory import get_backend
from aiconfigurator_core.sdk.config_builders import build_model_config
from aiconfigurator_core.sdk.models import get_model
root, system, backend, asked = json.load(sys.stdin)
db = perf_database.get_database(system, backend, "quantbench", systems_paths=root, shared_layer=False)
found = []
for name, tp, modes in asked:
    experts = {"moe_tp_size": 1, "moe_ep_size": tp}
    model = get_model(name, build_model_config(tp, 1, 1, **experts, **modes), backend)
    step = config.RuntimeConfig(batch_size=16, isl=1024, osl=128)
    summary = get_backend(backend).run_agg(model, db, step, ctx_tokens=1024)
    sources = {s for ops in summary.get_per_ops_source().values() for s in ops.values()}
    found.append([summary.get_result_dict()["tpot"], sorted(sources)])
print("\\n" + json.dumps(found), flush=True)
os._exit(0)
"""


#: the planner's time per token of each (model, tp, modes), and where it is from
served = partial(answer, _SERVE)


@pytest.mark.slow
def test_the_planner_serves_a_named_model_at_every_degree(tmp_path: Path) -> None:
    options = ExportOptions(model="llama-3-8b,llama-3-70b")
    profile = known_profile({"gemm": known_tables()["gemm"]})
    made = export_profile(profile, "aiconfigurator", tmp_path, options)
    asked = [("meta-llama/Meta-Llama-3.1-8B", tp, {}) for tp in (1, 2, 4, 8, 16)]
    asked.append(("meta-llama/Meta-Llama-3.1-70B", 8, {}))
    found = served(tmp_path, "a100_sxm", "vllm", asked)
    ms = [one[0] for one in found]
    assert sorted(ms[:4], reverse=True) == ms[:4]  # more GPUs are faster, as long as heads are left
    assert ms[5] > ms[3]
    assert all("silicon" in one[1] for one in found)
    columns = gemm_table(tmp_path)
    rows = zip(*(columns[c] for c in ("m", "n", "k", "latency", "origin")), strict=True)
    measured = {(m, n, k): (us, origin) for m, n, k, us, origin in rows}
    assert all(measured[shape] == (us / 1e3, "measured") for shape, us in GEMMS.items())
    assert made.rows["custom_allreduce"] > 0


@pytest.mark.slow
def test_experts_and_latent_attention_are_served_from_shipped_models(tmp_path: Path) -> None:
    profile = Profile.shipped(lookup("b200"))
    options = ExportOptions(
        model="deepseek-v3,qwen3-235b-a22b", tensor_parallel=(8,), backend="trtllm"
    )
    export_profile(profile, "aiconfigurator", tmp_path, options)
    fp8 = {"gemm_quant_mode": "fp8_block", "moe_quant_mode": "fp8_block"}
    asked = [("deepseek-ai/DeepSeek-V3", 8, fp8), ("Qwen/Qwen3-235B-A22B", 8, {})]
    found = served(tmp_path, "b200_sxm", "trtllm", asked)
    assert all(1.0 < one[0] < 200.0 for one in found)


def test_a_sweep_for_the_planner_ends_with_the_export_that_its_loader_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = QuietWorker(lambda asked: measured(float(asked.workload.min_bytes)), Clock())
    monkeypatch.setattr("quantbench.cli.sweep_run.WorkerProcess", lambda _: worker)
    monkeypatch.chdir(tmp_path)
    said = run("sweep --for aiconfigurator --model llama-3.2-1b --tp 8 --points 14")
    export = said.split("next: quantbench ")[1].splitlines()[0]
    run(f"{export} -o own")
    found = load(tmp_path / "own", "a100_test", [])
    records = read_run(Path(export.split()[2])).records
    # The time of a point in µs is its bytes, which tell the shapes apart.
    points = {record.workload.min_bytes for record in records if record.role == "point"}
    rows = [*found["products"], *found["context"], *found["generation"]]
    assert len(points) == 14
    assert points <= {round(1e3 * row[-1]) for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sglang", "vllm", "trtllm"])
def test_linear_attention_beside_full_attention_is_served(tmp_path: Path, backend: str) -> None:
    found = pytest.importorskip("aiconfigurator_core", reason="needs quantbench[tables]")
    config = Path(found.__file__).parent / "model_configs" / "Qwen--Qwen3.5-27B_config.json"
    options = ExportOptions(configs=(config,), tensor_parallel=(4,), backend=backend)
    export_profile(known_profile(), "aiconfigurator", tmp_path, options)
    ((ms, _),) = served(tmp_path, "a100_sxm", backend, [("Qwen/Qwen3.5-27B", 4, {})])
    assert 1.0 < ms < 200.0
    table = tmp_path / "data" / "a100_sxm" / "linear_attention" / backend / "quantbench"
    rows = pq.read_table(table / "gdn_perf.parquet").to_pylist()
    ms_of = {(row["kernel_source"], row["batch_size"]): row["latency"] for row in rows}
    # 48 / 4 heads hold 128 x 128 values each, in 4 bytes that are read and written once.
    bytes_moved = 1024 * 12 * 128 * 128 * 8
    ms = ms_of["fused_sigmoid_gating_delta_rule_update", 1024]
    assert ms == pytest.approx(1.2 * bytes_moved / 2039e6 + 0.004)


def test_our_importer_reads_the_export_back(known: Path) -> None:
    tables, missing = importer.find_tables(
        "a100_sxm",
        backend="vllm",
        version="quantbench",
        kinds=("gemm", "generation_attention", "nccl"),
        root=known,
    )
    assert missing == []
    gemm, decode, nccl = (
        [(row.workload, row.latency_us) for row in importer.read_rows(table).rows]
        for table in tables
    )
    gemms = {(work.m, work.n, work.k): us for work, us in gemm}
    assert {shape: gemms[shape] for shape in GEMMS} == pytest.approx(GEMMS, rel=1e-15)
    assert sorted((work.seq_q, work.seq_k) for work, _ in decode) == [
        (1, 2048),
        (1, 2048),
        (1, 4096),
    ]
    assert {work.message_bytes for work, _ in nccl} == {2048, 4096, 2**28, 65536}


def test_one_provider_and_layout_is_taken_and_the_rest_counted(tmp_path: Path) -> None:
    rows = [gemm_row(*shape, us) for shape, us in GEMMS.items()]
    rows += [
        gemm_row(64, 64, 64, 5.0, provider="triton.matmul"),
        gemm_row(64, 64, 64, 6.0, layout="tn"),
    ]
    rows += [gemm_row(64, 64, 64, 7.0, batch=8), gemm_row(64, 64, 64, 8.0, dtype="fp32")]
    profile = known_profile({**known_tables(), "gemm": table("gemm", rows)})
    made = export_profile(profile, "aiconfigurator", tmp_path / "a")
    for reason in (
        "of another provider than torch.matmul",
        "a product of another layout than nt",
        "a batched product: no place for it there",
        "fp32: no such matrix product there",
    ):
        assert made.left_out[reason] == 1
    other = export_profile(
        profile, "aiconfigurator", tmp_path / "b", ExportOptions(provider="torch.matmul")
    )
    assert other.rows == made.rows


def test_attention_is_that_of_the_provider_that_is_fastest_most_often() -> None:
    runs = Path(__file__).parents[2] / "results" / "h200-sxm-141gb"
    profile = Profile.from_runs([read_run(runs / "2026-11-27T011207-heads-tp")], fit=False)
    table = profile.tables["attention"]
    assert table.most_frequent("provider") == "torch.efficient"  # it takes every head_dim
    out = Exported()
    chosen = of_provider(table, "", out)
    assert set(chosen["provider"].tolist()) == {"torch.cudnn"}
    assert out.notes[0].startswith("attention: the figures are torch.cudnn's; there are others by")


def test_the_same_profile_gives_the_same_bytes(known: Path, tmp_path: Path) -> None:
    made = export_profile(known_profile(), "aiconfigurator", tmp_path)
    for path in made.paths:
        assert path.read_bytes() == (known / path.relative_to(tmp_path)).read_bytes()


def test_wrong_names_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"--backend = 'tensorrt'; expected one of vllm, sglang, trtllm"
    ):
        export_profile(
            known_profile(), "aiconfigurator", tmp_path, ExportOptions(backend="tensorrt")
        )
    with pytest.raises(
        InputError, match=r"name '\.\./x'; expected a name without spaces and slashes"
    ):
        ExportOptions(version="../x")


def test_fp16_asks_for_its_name(tmp_path: Path) -> None:
    rows = [gemm_row(64, 64, 64, 5.0, dtype="fp16")]
    profile = known_profile({"gemm": table("gemm", rows)}, "v100-sxm2-32gb")
    with pytest.raises(
        InputError, match=r"no such matrix product there \(--dtype fp16 writes it as its bfloat16\)"
    ):
        export_profile(profile, "aiconfigurator", tmp_path)
    assert not list(tmp_path.rglob("*.yaml"))
    export_profile(profile, "aiconfigurator", tmp_path, ExportOptions(dtype="fp16"))
    assert gemm_table(tmp_path, "v100_sxm2_32gb")["gemm_dtype"] == ["bfloat16"]


def test_a_processor_is_refused(tmp_path: Path) -> None:
    known = known_profile({})
    profile = replace(known, device=replace(known.device, kind="cpu"))
    with pytest.raises(UnsupportedError, match="is a cpu; expected a GPU, for aiconfigurator"):
        export_profile(profile, "aiconfigurator", tmp_path)
