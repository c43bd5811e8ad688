"""Bisecting to edges: the pure search against functions, and a whole sweep against a simulated
GPU.
"""

from dataclasses import replace
from math import ceil, log2
from pathlib import Path

import numpy as np
import pytest
from simulator import SimulatedGpu, SimulatedWorker, measurement, noisy_us

from quantbench.analysis.check import fit_all
from quantbench.analysis.curves import repeatability
from quantbench.analysis.jumps import find_gaps, jumps_of
from quantbench.analysis.summary import points_of
from quantbench.cli.sweep_print import refine_of
from quantbench.launch import Tile
from quantbench.measurement import Grade
from quantbench.store.folder import read_run
from quantbench.store.record import Measured, Record
from quantbench.sweep.axes import Held
from quantbench.sweep.options import SweepOptions, plan_sweep
from quantbench.sweep.refine import AxisGap, Edge, Gap, Refine, bisect
from quantbench.sweep.session import SweepSession


class Measure:
    """A staircase over sizes that counts what is asked of it."""

    def __init__(
        self, edges: dict[int, float], *, noise: float = 0.0, elasticity: float = 0.0, seed: int = 0
    ) -> None:
        self.edges, self.noise, self.elasticity = edges, noise, elasticity
        self.asked: list[int] = []
        self._rng = np.random.default_rng(seed)

    def time_us(self, size: int) -> float:
        height = np.prod([ratio for last, ratio in self.edges.items() if size > last])
        return float(10.0 * height * size**self.elasticity)

    def __call__(self, size: int) -> tuple[float, ...]:
        self.asked.append(size)
        return noisy_us(self.time_us(size), self.noise, 10, self._rng)

    def gap(self, low: int, high: int, **more: float) -> Gap:
        return Gap(low, high, self.time_us(low), self.time_us(high), self.elasticity, **more)  # type: ignore[arg-type]


def find_edges(gap: Gap, measure: Measure) -> tuple[Edge, ...]:
    told: dict[int, tuple[float, ...]] = {}
    while (size := bisect(gap, told.get)[0]) is not None:
        told[size] = measure(size)
    return bisect(gap, told.get)[1]


@pytest.mark.parametrize("last", [1024, 1025, 1536, 1999, 2046, 2047])
def test_one_edge_is_found_exactly_in_a_logarithmic_number_of_points(last: int) -> None:
    measure = Measure({last: 1.3})
    (edge,) = find_edges(measure.gap(1024, 2048), measure)
    assert (edge.low, edge.high, edge.exact) == (last, last + 1, True)
    assert edge.ratio == pytest.approx(1.3)
    assert len(measure.asked) <= ceil(log2(1024))


def test_two_edges_in_one_gap_are_both_found() -> None:
    measure = Measure({1200: 1.2, 1801: 1.3})
    edges = find_edges(measure.gap(1024, 2048), measure)
    assert [(edge.low, edge.high) for edge in edges] == [(1200, 1201), (1801, 1802)]
    assert len(measure.asked) <= 2 * ceil(log2(1024))


def test_growth_between_the_steps_is_not_taken_for_one() -> None:
    measure = Measure({1700: 1.1}, elasticity=1.0)
    (edge,) = find_edges(measure.gap(1024, 2048), measure)
    assert (edge.low, edge.high) == (1700, 1701)
    assert edge.ratio == pytest.approx(1.1)


def test_only_multiples_of_the_grain_are_asked_for() -> None:
    measure = Measure({3328: 1.4})
    (edge,) = find_edges(measure.gap(3300, 3400, grain=8), measure)
    assert (edge.low, edge.high, edge.exact) == (3328, 3336, True)
    assert all(size % 8 == 0 for size in measure.asked)


def test_one_percent_noise_misplaces_no_edge_of_ten_percent_in_two_hundred_searches() -> None:
    wrong = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        last = int(rng.integers(1024, 2048))
        measure = Measure({last: 1.10}, noise=0.01, seed=seed)
        gap = Gap(
            1024,
            2048,
            float(np.median(measure(1024))),
            float(np.median(measure(2048))),
            noise=0.004,
        )
        edges = find_edges(gap, measure)
        wrong += [(edge.low, edge.high) for edge in edges] != [(last, last + 1)]
    assert wrong == 0


def test_neighbours_need_no_measurement() -> None:
    wanted, edges = bisect(Gap(256, 257, 10.0, 13.0), {}.get)
    assert wanted is None
    assert [(edge.low, edge.high, edge.exact) for edge in edges] == [(256, 257, True)]


def test_where_nothing_can_be_measured_the_edge_stays_between_its_sides() -> None:
    gap = Gap(256, 512, 10.0, 13.0)
    assert bisect(gap, {}.get)[0] == 384
    wanted, edges = bisect(gap, {384: ()}.get)
    assert wanted is None
    assert [(edge.low, edge.high, edge.exact) for edge in edges] == [(256, 512, False)]


def test_a_size_that_is_impossible_does_not_end_the_search() -> None:
    """Two heads divide no odd hidden size: of the two halves, the middle of the first cannot be
    measured.
    """
    held = Held(heads=2, ops=("qkv",), seq=128)
    options = SweepOptions(
        ("hidden=1000:1013:13",), held=held, providers=("torch.mm",), refine=True
    )
    gap = Gap(1000, 1013, 10.0, 14.0)
    spec = GPU.spec()
    axes, _ = plan_sweep(replace(options), spec)
    refine = Refine(
        options, axes, spec, lambda records: [AxisGap(gap, "hidden", {}, "qkv", "torch.mm")]
    )
    asked: list[int] = []
    records: list[Record] = []
    while (found := refine(records)) and len(asked) < 9:
        (point,) = found
        asked.append(point.places[0].axes["hidden"])
        us = 10.0 + (asked[-1] >= 1006) * 2.0 + (asked[-1] >= 1010) * 2.0
        outcome = Measured(measurement([us] * 8), Grade("A"))
        records.append(
            Record("run", point.key, point.workload, point.provider, outcome, places=point.places)
        )
    assert asked == [1006, 1010, 1008]


# A whole sweep: 4096 × n × 4096 with 128×128 tiles on 108 SMs ends waves at n = 128 · ⌊108 w / 32⌋.
GPU = SimulatedGpu(108, Tile(128, 128))
OPTIONS = SweepOptions(
    ("n=512:2048:64",), Held(m=4096, k=4096), providers=("torch.mm",), refine=True
)
EDGES = {384: 1, 768: 2, 1280: 3, 1664: 4}  # last n of each wave


def sweep(results: Path, worker: SimulatedWorker) -> Path:
    with SweepSession.new(lambda spec: OPTIONS, results, lambda: worker) as session:
        session.run(lambda progress: None, more=refine_of(session.options, session.hello.device))
        return session.folder


def test_a_refined_sweep_ends_with_the_exact_sizes_and_few_more_points(tmp_path: Path) -> None:
    worker = SimulatedWorker(GPU, noise=0.01, seed=5)
    folder = sweep(tmp_path, worker)
    run = read_run(folder)
    found = refine_of(OPTIONS, run.info.device).edges(run.records)
    inside = sorted(last for last in EDGES if 512 <= last < 2048)
    assert sorted((edge.low, edge.high) for _, edge in found) == [
        (last, last + 16) for last in inside
    ]
    assert all(edge.exact for _, edge in found)
    coarse = len(range(512, 2049, 64))
    extra = len({gemm.n for gemm in worker.asked}) - coarse
    assert extra == len(inside) * log2(64 / 16)


def test_a_refined_sweep_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    whole = SimulatedWorker(GPU, noise=0.01, seed=5)
    run = read_run(sweep(tmp_path, whole))
    refine = refine_of(OPTIONS, run.info.device)
    coarse = [
        r
        for r in run.records
        if all(p.axes["n"] % 64 == 0 and p.axes["n"] >= 512 for p in r.places)
    ]
    first = refine(coarse)
    assert {point.places[0].axes["n"] for point in first} == {800, 1312, 1696}
    assert not refine_of(OPTIONS, run.info.device)(run.records)  # nothing is left to ask for


def test_gaps_of_a_coarse_pass_come_largest_first(tmp_path: Path) -> None:
    run = read_run(sweep(tmp_path, SimulatedWorker(GPU, noise=0.001, seed=1)))
    coarse = [r for r in run.records if all(p.axes["n"] % 64 == 0 for p in r.places)]
    gaps = find_gaps(jumps_of(fit_all(points_of(coarse, run.info.device), repeatability(coarse))))
    assert [placed.gap.low for placed in gaps] == [768, 1280, 1664]
    assert {placed.gap.grain for placed in gaps} == {16}
