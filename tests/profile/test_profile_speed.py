"""How fast a profile answers, in CPU time of one core: run with --benchmark-only.

What is asked: a million measured and 80,000 modelled shapes a second, a file read in under 0.3 s. A
single shape is answered as a batch of one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import made_profiles as made
import numpy as np
import pytest

from quantbench.latency.attention import AttentionModel
from quantbench.profile import Models, Profile

SHAPES = 200_000


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Two thousand m at one n and k, and the sweeps."""
    return Profile.from_runs([made.run(made.rows_beyond(2500) + made.gemm_records())], fit=False)


@pytest.fixture(scope="module")
def random_sizes() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    m = np.floor(2 ** rng.uniform(0, 14, SHAPES)).astype(int)
    n, k = (8 * np.floor(2 ** rng.uniform(3, 11, SHAPES)).astype(int) for _ in range(2))
    return m, n, k


@pytest.mark.benchmark(group="profile: 200,000 shapes at once", timer=process_time)
def test_measured_shapes(benchmark: Any, profile: Profile) -> None:
    rows = np.random.default_rng(1).integers(0, len(profile.tables["gemm"]), SHAPES)
    m, n, k = (profile.tables["gemm"][name][rows] for name in "mnk")
    found = benchmark(profile.gemm, m, n, k)
    assert set(found.source) == {"measured"}


@pytest.mark.benchmark(group="profile: 200,000 shapes at once", timer=process_time)
def test_modelled_shapes(
    benchmark: Any, profile: Profile, random_sizes: tuple[np.ndarray, ...]
) -> None:
    found = benchmark(profile.gemm, *random_sizes)
    assert (found.source == "modelled").mean() > 0.9


@pytest.mark.benchmark(group="profile: 200,000 shapes at once", timer=process_time)
def test_modelled_attention(benchmark: Any) -> None:
    """By the model of the public A100 table, in which a learner has the last word."""
    models = Models(attention=AttentionModel.best(made.A100))
    bare = replace(made.profile(), tables={}, models=models)
    rng = np.random.default_rng(3)
    batch, heads = (2 ** rng.integers(0, 6, SHAPES) for _ in range(2))
    seq, head_dim = rng.integers(1, 8192, SHAPES), rng.choice([64, 128, 256], SHAPES)
    found = benchmark(bare.attention, batch, heads, seq, seq, head_dim)
    assert set(found.source) == {"modelled"}


@pytest.mark.benchmark(group="profile: one shape")
def test_one_measured_shape(benchmark: Any, profile: Profile) -> None:
    assert benchmark(profile.gemm, 2048, 6144, 2048).source == "measured"


@pytest.mark.benchmark(group="profile: a file of 2,500 rows", timer=process_time)
def test_load(benchmark: Any, profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    assert len(benchmark(Profile.load, tmp_path).tables["gemm"]) > 2500
