"""Experts in profiles: a stored table, measured and modelled answers, and the export that
aiconfigurator loads.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError, UnsupportedError
from quantbench.latency.moe import MoEModel
from quantbench.profile import Profile
from quantbench.profile.exporters import aiconfigurator
from quantbench.profile.exporters.options import Exported, ExportOptions
from quantbench.profile.schema import Provenance
from quantbench.profile.table import LAYOUTS, Table
from quantbench.workload import MoE

H100 = lookup("h100-sxm5-80gb")
_LAYERS = [
    MoE(tokens, 4096, 14336, 8, 2, ep=ep, distribution=distribution)
    for tokens in (16, 128, 1024)
    for ep in (1, 2)
    for distribution in ("balanced", "power_law_1.2")
]


def profile(provider: str = "vllm.triton") -> Profile:
    """A profile of twelve layers, each at 1.1 times the shipped model's time."""
    times = 1.1 * MoEModel.best(H100, library="vllm").predict(_LAYERS).latency_us
    rows = [
        vars(work) | {"provider": provider, "grade": "A", "origin": "imported"} for work in _LAYERS
    ]
    names = [name for name in LAYOUTS["moe"].names if not name.endswith("_us")]
    columns = {name: [row[name] for row in rows] for name in names}
    columns |= dict.fromkeys(("latency_us", "low_us", "high_us"), times.tolist())
    return Profile(H100, {}, Provenance("0", (), 0), {"moe": Table.of("moe", columns)})


def test_rows_are_kept_and_answered(tmp_path: Path) -> None:
    made = profile()
    made.save(tmp_path / "profile.json")
    read = Profile.load(tmp_path / "profile.json")
    assert len(read.tables["moe"]) == len(_LAYERS)
    assert [one.source for one in read.moe(_LAYERS)] == ["measured"] * len(_LAYERS)
    between = replace(_LAYERS[0], tokens=300)
    found = read.moe([between, _LAYERS[0]])
    assert [one.source for one in found] == ["modelled", "measured"]
    # Twelve rows are too few for a fit: the model of the library that the provider names.
    assert (
        found[0].latency_us == MoEModel.best(H100, library="vllm").predict([between]).latency_us[0]
    )
    with pytest.raises(UnsupportedError, match="sglang"):
        read.moe([between], provider="sglang")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("top_k", 9, "num_experts"), ("tp", 3, "divisible by tp"), ("distribution", "zipf", "zipf")],
)
def test_impossible_rows_are_refused(name: str, value: object, said: str) -> None:
    columns = dict(profile().tables["moe"].columns)
    columns[name] = np.array([*columns[name][:-1].tolist(), value])
    with pytest.raises(InputError, match=said):
        Profile(H100, {}, Provenance("0", (), 0), {"moe": Table.of("moe", columns)})


@pytest.mark.parametrize(
    ("provider", "kernel"),
    [
        ("vllm.triton", "vllm.triton"),
        # The planner looks these rows up by the kernel's own name.
        ("trtllm.moe_torch_flow_min_latency", "moe_torch_flow_min_latency"),
    ],
)
def test_export_has_the_columns_of_the_importer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str, kernel: str
) -> None:
    for name in ("_gemm_rows", "_attention_rows"):  # would be modelled, which takes seconds
        monkeypatch.setattr(aiconfigurator, name, lambda *of, **how: [])
    out = Exported(tmp_path)
    aiconfigurator.export(profile(provider), ExportOptions(), out)
    (file,) = tmp_path.glob("data/*/moe/*/*/moe_perf.parquet")
    rows = pq.read_table(file).to_pylist()
    assert len(rows) == len(_LAYERS)
    assert {(row["moe_dtype"], row["kernel_source"]) for row in rows} == {("bfloat16", kernel)}
    assert rows[0]["latency"] == pytest.approx(profile().moe(_LAYERS[:1])[0].latency_us / 1e3)
