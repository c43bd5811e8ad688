"""The Vidur export: its PyPI release trains on it, and its own loaders give the figures back."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from known_profile import (
    ATTENTIONS,
    COLLECTIVES,
    gemm_row,
    known_profile,
    known_tables,
    rows_of,
    table,
)

from quantbench.errors import InputError
from quantbench.profile.exporters import export_profile
from quantbench.profile.exporters.options import Exported, ExportOptions
from quantbench.profile.exporters.vidur import VidurModel
from quantbench.profile.profile import Profile

#: Llama 3 8B on one GPU: tokens → µs of its four products
MEASURED = {"attn_pre_proj": (6144, 4096), "attn_post_proj": (4096, 4096), "mlp_up_proj": (28672, 4096),
            "mlp_down_proj": (4096, 14336)}  # fmt: skip
TIMES_US = {256: (88.5, 65.5, 330.25, 190.0), 257: (120.0, 91.0, 410.5, 250.75)}

# The release downloads its data: the test hands it the exported folders instead. Everything else is
# its own.
_LOAD = """
import json, sys
from vidur.config import CacheConfig, RandomForrestExecutionTimePredictorConfig, ReplicaConfig
from vidur.execution_time_predictor import sklearn_execution_time_predictor as predictors
from vidur.execution_time_predictor.random_forrest_execution_time_predictor import (
    RandomForrestExecutionTimePredictor)
root, tp = sys.argv[1], int(sys.argv[2])
def from_folder(repo_id, **_):
    if repo_id not in ("compute", "network"):
        raise FileNotFoundError(repo_id)
    return f"{root}/{repo_id}"
predictors.snapshot_download = from_folder
config = RandomForrestExecutionTimePredictorConfig(
    model_profiling_dataset="compute", network_profiling_dataset="network", no_cache=True, cache_dir=f"{root}/cache",
    num_estimators=[3], max_depth=[16], min_samples_split=[2], num_training_job_threads=1, k_fold_cv_splits=2,
    prediction_max_tokens_per_request=512, prediction_max_batch_size=4)
replica = ReplicaConfig(model_name="meta-llama/Llama-3-8B", num_pipeline_stages=2, tensor_parallel_size=tp,
                        device="a100", network_device="a100_dgx")
found = RandomForrestExecutionTimePredictor(config, replica, CacheConfig())
mlp, attention, all_reduce, send_recv = found._get_input_files()
frames = {"mlp": found._load_compute_df(mlp), "attention": found._load_attention_df(attention),
          "send_recv": found._load_send_recv_df(send_recv)}
if tp > 1:
    frames["all_reduce"] = found._load_all_reduce_df(all_reduce)
print("\\n" + json.dumps({"predicts": sorted(found._predictions)} |
    {name: json.loads(frame.to_json(orient="records", double_precision=15)) for name, frame in frames.items()}))
"""


def llama_profile() -> Profile:
    rows = [
        gemm_row(m, *MEASURED[op], us)
        for m, times in TIMES_US.items()
        for op, us in zip(MEASURED, times, strict=True)
    ]
    return known_profile({**known_tables(), "gemm": table("gemm", rows)})


def exported(folder: Path, *tp: int) -> Exported:
    options = ExportOptions(model="llama-3-8b", tensor_parallel=tp or (1,))
    return export_profile(llama_profile(), "vidur", folder, options)


def load(root: Path, tp: int) -> dict[str, Any]:
    """What the release reads of an export, after it has trained on it."""
    if find_spec("vidur") is None:
        pytest.skip("needs the package vidur 0.0.26")
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(root), str(tp)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def assert_measured(rows: list[dict[str, Any]]) -> None:
    by_tokens = {int(row["num_tokens"]): row for row in rows}
    for tokens, times in TIMES_US.items():
        found = [float(by_tokens[tokens][f"time_stats.{op}.median"]) for op in MEASURED]
        assert found == pytest.approx([us / 1e3 for us in times], rel=1e-12)


def test_the_release_trains_on_it_and_reads_the_measured_figures(tmp_path: Path) -> None:
    exported(tmp_path)
    found = load(tmp_path, tp=1)
    assert {*MEASURED, "attn_prefill", "attn_decode", "send_recv", "mlp_act", "attn_rope"} <= set(
        found["predicts"]
    )
    assert_measured(found["mlp"])
    prompts = {
        r["prefill_chunk_size"]: r["time_stats.attn_prefill.median"]
        for r in found["attention"]
        if r["is_prefill"]
    }
    decodes = {
        (r["batch_size"], r["kv_cache_size"]): r["time_stats.attn_decode.median"]
        for r in found["attention"] if not r["is_prefill"]
    }  # fmt: skip
    for (batch, heads, kv_heads, seq_q, seq_k, _, causal), us in ATTENTIONS.items():
        if (heads, kv_heads) == (32, 8):
            # Decoding is one query; the cache holds the tokens before it.
            got = prompts.pop(seq_q) if causal else decodes.pop((batch, seq_k - 1))
            assert got == pytest.approx(us / 1e3, rel=1e-12)
    assert prompts == decodes == {}
    sent = {row["size"]: row["time_stats.send_recv.median"] for row in found["send_recv"]}
    assert sent == pytest.approx(
        {size: us / 1e3 for (op, size, *_), us in COLLECTIVES.items() if op == "send_recv"}
    )


def test_all_reduce_is_read_for_its_number_of_workers(tmp_path: Path) -> None:
    exported(tmp_path, 1, 2)
    found = load(tmp_path, tp=2)
    got = {row["size"]: row["time_stats.all_reduce.median"] for row in found["all_reduce"]}
    assert got == {2048: 0.0095, 4096: 0.0105}
    assert {row["num_tensor_parallel_workers"] for row in found["mlp"]} == {2}


def test_both_sides_of_every_known_edge_are_rows(tmp_path: Path) -> None:
    exported(tmp_path)
    rows = rows_of(tmp_path / "compute" / "mlp.csv.xz")
    tokens = [int(row["num_tokens"]) for row in rows]
    assert tokens == sorted(set(tokens))
    assert {256, 257, 4096} <= set(tokens)
    # The model's own edges, which a straight line from 257 to 512 and from 1024 to 2048 would miss.
    assert any(b == a + 1 for a, b in pairwise(tokens) if a > 257)
    assert all(float(v) >= 0 for row in rows for v in row.values() if v != "True")


def test_the_folders_name_model_and_devices(tmp_path: Path) -> None:
    exported(tmp_path)
    assert json.loads((tmp_path / "compute" / "config.json").read_text()) == {
        "model": "meta-llama/Llama-3-8B", "device_sku": "a100",
    }  # fmt: skip
    assert json.loads((tmp_path / "network" / "config.json").read_text()) == {"sku": "a100_dgx"}


def test_its_files_hold_the_measured_times(tmp_path: Path) -> None:
    exported(tmp_path)
    assert_measured(rows_of(tmp_path / "compute" / "mlp.csv.xz"))
    reduced = rows_of(tmp_path / "network" / "all_reduce.csv.xz")
    found = {
        (int(row["size"]), int(row["num_workers"])): float(row["time_stats.all_reduce.median"])
        for row in reduced
    }
    expected = {
        (size, gpus): us / 1e3
        for (op, size, gpus, *_), us in COLLECTIVES.items()
        if op == "all_reduce"
    }
    assert found == pytest.approx(expected)


def test_shares_of_a_tensor_parallel_rank() -> None:
    model = VidurModel.of("llama-3-8b")
    works = model.products(4)
    assert works == {
        "attn_pre_proj": ((8 + 2 * 2) * 128, 4096), "attn_post_proj": (4096, 1024),
        "mlp_up_proj": (2 * 3584, 4096), "mlp_down_proj": (4096, 3584),
    }  # fmt: skip
    assert model.heads(16) == (
        2,
        1,
    )  # key and value heads are replicated where there are fewer of them
    assert model.passes_bytes(np.array([10]), 1)["mlp_act"] == 10 * 3 * 14336 * 2


def test_what_is_modelled_is_said(tmp_path: Path) -> None:
    made = exported(tmp_path, 1, 2)
    assert any("of the products' times 8 were measured" in note for note in made.notes)
    assert "attention of prompts at TP 2 is modelled" in made.notes
    assert (
        "emb, layernorm, attn_rope, mlp_act and add are a pass over memory each, modelled"
        in made.notes
    )


def test_a_model_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no --model .*; expected one of llama-2-7b, llama-2-70b, llama-3-8b"
    ):
        export_profile(llama_profile(), "vidur", tmp_path)
    with pytest.raises(InputError, match=r"--model gemma-7b; expected one of llama-2-7b"):
        export_profile(llama_profile(), "vidur", tmp_path, ExportOptions(model="gemma-7b"))
    with pytest.raises(InputError, match="heads = 32 with tp = 3; expected heads divisible by tp"):
        export_profile(
            llama_profile(),
            "vidur",
            tmp_path,
            ExportOptions(model="llama-3-8b", tensor_parallel=(3,)),
        )
