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
from quantbench.latency.gemm.model import GemmModel
from quantbench.profile import Models, Profile, Table
from tools.accuracy.tables import read_packaged

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


@pytest.mark.benchmark(group="profile: one shape")
def test_one_modelled_shape(
    benchmark: Any, profile: Profile, random_sizes: tuple[np.ndarray, ...]
) -> None:
    """A new shape each time: answers are remembered."""
    shapes = iter(zip(*(size.tolist() for size in random_sizes), strict=True))
    profile.gemm(*next(shapes))
    assert benchmark.pedantic(lambda: profile.gemm(*next(shapes)), rounds=4000).latency_us > 0


@pytest.mark.benchmark(group="profile: one shape")
@pytest.mark.parametrize("engine", [False, True], ids=["profile", "aiconfigurator's engine"])
def test_beside_aiconfigurators_engine(benchmark: Any, engine: bool) -> None:
    """The same shapes, new ones each time: any m at the n and k of the public A100 table, which the
    engine has read and the profile has as its rows and its model."""
    pytest.importorskip("aiconfigurator_core", reason="needs the extra `tables`")
    from aiconfigurator_core.sdk import common, perf_database
    from aiconfigurator_core.sdk.operations.gemm import GEMM

    table = read_packaged("a100_sxm")
    rng = np.random.default_rng(2)
    rows = rng.integers(0, len(table), 5000)
    sizes = zip(np.floor(2 ** rng.uniform(0, 13, 5000)), table.n[rows], table.k[rows], strict=True)
    shapes = iter([(int(m), int(n), int(k)) for m, n, k in sizes])
    if engine:
        database = perf_database.get_database("a100_sxm", "sglang", "0.5.10", shared_layer=False)
        GEMM.load_data(database)

        def ask() -> float:
            m, n, k = next(shapes)
            product = GEMM("gemm", 1.0, n, k, common.GEMMQuantMode.bfloat16)
            return float(product._engine_query(database, x=m)) * 1e3
    else:
        columns = {name: np.repeat(text, len(table)) for name, text in made.IMPORTED.items()}
        columns |= {"m": table.m, "n": table.n, "k": table.k, "latency_us": table.latency_us}
        columns |= {"low_us": table.latency_us, "high_us": table.latency_us}
        zero = np.zeros(len(table), dtype=int)
        columns |= {"batch": zero + 1, "block_m": zero, "block_n": zero, "split_k": zero}
        model = GemmModel.best(made.A100)
        whole = replace(
            made.profile(), tables={"gemm": Table.of("gemm", columns)}, models=Models((model,))
        )

        def ask() -> float:
            return float(whole.gemm(*next(shapes)).latency_us)

    ask()
    assert benchmark.pedantic(ask, rounds=4000) > 0


@pytest.mark.benchmark(group="profile: a file of 2,500 rows", timer=process_time)
def test_load(benchmark: Any, profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    assert len(benchmark(Profile.load, tmp_path).tables["gemm"]) > 2500
