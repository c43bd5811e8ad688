"""Recorded kernels: measured fp32 products whose names are known, and a made-up library that chooses at random."""

import csv
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.latency.gemm.cost_model import INDEX, Machine, Menu, Shapes, Values, hand_prior, log_latency
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.training import Effort, menu_for
from quantbench.latency.gemm.trees import Growth
from quantbench.launch import Launch, Tile
from quantbench.providers.identity import split_k_of
from quantbench.providers.kernel_names import parse
from quantbench.workload import Gemm
from quantbench.workload.ops import LAYOUTS
from tools.accuracy.scoring import coverage

A100 = "a100-pcie-40gb"
DATA = Path(__file__).parents[1] / "data" / "named_gemms.csv"
EFFORT = Effort(members=1, rows_first=120, rows_other=60, growth=Growth(trees=40))
# Below it the table has the launch from Python, not the kernel.
SHORTEST_US = 100.0

Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[Launch]]


@cache
def measured() -> Rows:
    with DATA.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if float(row["latency_ms"]) * 1e3 > SHORTEST_US]
    launches = []
    for row in rows:
        name = parse(row["kernel"])
        assert name.tile is not None
        grid = (int(row["grid_x"]), int(row["grid_y"]), int(row["grid_z"]))
        tile = Tile(name.tile.block_m, name.tile.block_n, split_k=grid[2])
        launches.append(Launch(row["kernel"], grid=grid, tile=tile))
    m, n, k = (np.array([int(row[name]) for row in rows]) for name in "mnk")
    return m, n, k, np.array([float(row["latency_ms"]) for row in rows]) * 1e3, launches


def test_fp32_that_nobody_measured_is_predicted_from_other_cuda_cores() -> None:
    m, n, k, latency_us, _ = measured()
    model = GemmModel.prior(A100, dtype="fp32", family_out=True)
    assert f"nobody measured fp32 with torch on {A100}" in model.note
    assert "pooled over p100-pcie-16gb, t4-16gb, v100-pcie-32gb, v100-sxm2-16gb" in model.note
    found = model.predict(m, n, k)
    assert 0.7 < np.median(found.latency_us / latency_us) < 1.43
    assert coverage(latency_us, found.low_us, found.high_us) > 0.85
    # No GPU measured tf32, which runs on tensor cores: fp32's tables say nothing of it.
    tf32 = GemmModel.best(A100, dtype="tf32")
    assert f"nobody measured tf32 on {A100}" in tf32.note
    assert "tensor cores" in tf32.note
    assert tf32.predict(4096, 4096, 4096).latency_us < 0.5 * model.predict(4096, 4096, 4096).latency_us


def errors_pct(rows: Rows, seed: int, *, named: bool, dtype: str) -> np.ndarray:
    """Of products that were not learned from, the model told their kernels or not."""
    m, n, k, latency_us, launches = rows
    order = np.random.default_rng(seed).permutation(len(m))
    train, test = order[: 2 * len(m) // 3], order[2 * len(m) // 3 :]

    def kernels(part: np.ndarray) -> list[Launch] | None:
        return [launches[i] for i in part] if named else None

    model = GemmModel.fit(
        A100, m[train], n[train], k[train], latency_us[train], dtype=dtype, prior="none", launches=kernels(train),
        seed=seed, effort=EFFORT,
    )  # fmt: skip
    found = model.predict(m[test], n[test], k[test], launches=kernels(test))
    return 100 * np.abs(found.latency_us / latency_us[test] - 1)


def test_the_measured_grids_are_what_names_and_shapes_say() -> None:
    m, n, k, _, launches = measured()
    assert len(m) > 140
    for a, b, c, launch in zip(m, n, k, launches, strict=True):
        assert launch.grid is not None
        assert launch.tile is not None
        tiles = (-(-int(b) // launch.tile.block_n), -(-int(a) // launch.tile.block_m))
        assert launch.grid[:2] == tiles, launch.kernel
        gemm = Gemm(m=int(a), n=int(b), k=int(c), dtype="fp32")
        assert split_k_of(launch.grid, parse(launch.kernel), gemm, splitting=False) == launch.tile.split_k


@pytest.mark.slow
def test_names_help_on_measured_products() -> None:
    errors = {
        named: np.concatenate([errors_pct(measured(), seed, named=named, dtype="fp32") for seed in range(2)])
        for named in (False, True)
    }
    assert np.median(errors[True]) < 0.95 * np.median(errors[False])
    assert np.mean(errors[True]) < 0.9 * np.mean(errors[False])
    assert np.quantile(errors[True], 0.95) < np.quantile(errors[False], 0.95)


@pytest.mark.slow
def test_parts_that_take_turns_are_waited_for() -> None:
    """sgemm with 162 parts of k on four tiles runs ten times as long as its arithmetic and traffic take."""
    m, n, k, latency_us, launches = measured()
    few_tiles = np.array([launch.tile is not None and launch.tile.split_k > 90 for launch in launches])
    assert few_tiles.sum() >= 3
    train = np.flatnonzero(~few_tiles)
    model = GemmModel.fit(
        A100, m[train], n[train], k[train], latency_us[train], dtype="fp32", prior="none",
        launches=[launches[i] for i in train], effort=EFFORT,
    )  # fmt: skip
    rows = np.flatnonzero(few_tiles)
    found = model.predict(m[rows], n[rows], k[rows], launches=[launches[i] for i in rows]).latency_us
    # More parts than any that it was fitted to: the wait grows with each of them.
    assert np.all(np.abs(np.log(found / latency_us[rows])) < np.log(4.0))


@pytest.mark.slow
def test_names_tell_what_no_shape_does() -> None:
    """A library that takes one of three kernels at random: simulated, to know what there is to gain."""
    rng = np.random.default_rng(0)
    m = np.floor(2 ** rng.uniform(5, 12, 240))
    n, k = (64 * np.floor(2 ** rng.uniform(1, 7, 240)) for _ in range(2))
    menu = Menu.of()
    tiles = [Tile(64, 64), Tile(128, 128), Tile(128, 256)]
    taken = rng.integers(0, 3, 240)
    parts = log_latency(
        Values(hand_prior()[0]), Shapes(Machine.of(lookup(A100), "bf16"), menu, m, n, k)
    )[1]  # fmt: skip
    column = np.array([menu.nearest(tile.block_m, tile.block_n, 1) for tile in tiles])[taken]
    latency_us = np.exp(parts.log_time[column, np.arange(240)])
    rows = (m, n, k, latency_us, [Launch("k", tile=tiles[i]) for i in taken])
    without = np.median(errors_pct(rows, 0, named=False, dtype="bf16"))
    assert without > 5.0
    assert np.median(errors_pct(rows, 0, named=True, dtype="bf16")) < 0.5 * without


def test_a_kernel_outside_the_menu_joins_it_with_its_split() -> None:
    menu = menu_for([Launch("k", tile=Tile(32, 32, split_k=18)), None, Launch("k", tile=Tile(96, 48))])
    assert (96, 48) in menu.tiles
    index = menu.nearest(32, 32, 18)
    assert (menu.each.block_m[index, 0], menu.each.block_n[index, 0], menu.each.split_k[index, 0]) == (32, 32, 18)
    assert len(menu_for(None)) == len(Menu.of())
    wide = menu_for([Launch("k", tile=Tile(256, 64)), None], "CUDA cores")
    sides = [wide.tiles[i] for i, _ in wide.kernels]
    assert {pair for pair in sides if max(pair) > 128 or min(pair) < 32} == {(256, 64)}


def test_two_kernels_of_one_tile_are_told_apart() -> None:
    often, sliced = Launch("volta_sgemm_128x32_tn", tile=Tile(32, 128)), "volta_sgemm_128x32_sliced1x4"
    menu = menu_for([often] * 4 + [Launch(f"{sliced}_nn", tile=Tile(32, 128, split_k=5))] * 3)
    assert menu.variants == (sliced,)
    assert menu.tiles[-1] == (32, 128)
    tiles = [menu.kernels[menu.nearest(32, 128, 5, name)][0] for name in (f"{sliced}_tn", often.kernel, "")]
    assert tiles == [len(menu.tiles) - 1, menu.tiles.index((32, 128)), menu.tiles.index((32, 128))]


def test_long_rows_slow_only_the_operands_whose_rows_run_along_k() -> None:
    """V100 (DeepBench), fp16, 8 × 512 × 500000: 658 µs in nn, where the long rows are the 8 of a, 1,483 µs in nt."""
    mean, _ = hand_prior()
    mean[INDEX["far_growth"]] = 0.5
    m, n, k = np.full(3, 8.0), np.full(3, 512.0), np.full(3, 5e5)
    machine = Machine.of(lookup("v100-sxm2-16gb"), "fp16")
    layout = np.array([LAYOUTS.index(name) for name in ("nn", "nt", "tn")], dtype=float)
    nn, nt, tn = log_latency(Values(mean), Shapes(machine, Menu.of(), m, n, k, layout=layout))[0]
    assert nt > nn + 0.3
    assert tn < nn


def test_a_model_with_names_is_stored_whole(tmp_path: Path) -> None:
    m, n, k, latency_us, launches = measured()
    model = GemmModel.fit(
        A100, m, n, k, latency_us, dtype="fp32", prior="none", launches=launches, effort=EFFORT
    )  # fmt: skip
    model.save(tmp_path / "named.gemm")
    again = GemmModel.load(tmp_path / "named.gemm")
    assert again.ensemble.menu.variants == model.ensemble.menu.variants
    both = [one.predict(m, n, k, launches=launches).latency_us for one in (model, again)]
    assert both[0] == pytest.approx(both[1], rel=1e-3)
    # The split is the recorded one, not the nearest in the menu.
    far = [
        Launch(one.kernel, tile=Tile(one.tile.block_m, one.tile.block_n, split_k=4000)) for one in launches if one.tile
    ]
    assert (again.predict(m, n, k, launches=far).latency_us > both[0]).mean() > 0.9


def test_a_power_limit_bounds_the_expected_rate() -> None:
    """T4: 8.1 TFLOP/s of fp32 would need more than its 70 W; measured, it reaches some 5."""
    rates = {}
    for gpu in ("t4-16gb", "p100-pcie-16gb"):
        us = float(GemmModel.prior(gpu, dtype="fp32", family_out=True).predict(4096, 4096, 4096).latency_us)
        rates[gpu] = 2 * 4096**3 / us / 1e6 / (lookup(gpu).peak("fp32") or 1.0)
    assert 0.4 < rates["t4-16gb"] < 0.68
    assert rates["p100-pcie-16gb"] > 1.2 * rates["t4-16gb"]
