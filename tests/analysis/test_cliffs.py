"""Blind step detection, and the tile and SMs behind a staircase: simulated devices, none tuned on.

Seeds from 0 on belong to these tests; the constants of the detection were chosen on others (10 000
and up).
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from simulator import Case, SimulatedGpu, along, random_case, records_of

from quantbench.analysis.check import fit_all
from quantbench.analysis.curves import LEAST_ERROR, curves_of, fit_curves
from quantbench.analysis.jumps import Cliff, common_cliffs, find_cliffs, jumps_of
from quantbench.analysis.periods import Period, find_periods, tile_finder
from quantbench.analysis.staircase import TileCandidate, candidates
from quantbench.analysis.step_detection import describe, find_pieces
from quantbench.analysis.summary import points_of
from quantbench.launch import Tile
from quantbench.store.record import Record
from quantbench.workload import Gemm

pytestmark = pytest.mark.slow  # most of its tests share simulated sweeps of many devices

CASES = 40
# At 3 % noise.
NOISY_CASES = 25


@dataclass(frozen=True)
class Outcome:
    case: Case
    cliffs: tuple[Cliff, ...]
    period: Period


def look(case: Case, records: list[Record]) -> Outcome:
    spec = case.gpu.spec()
    fitted = fit_curves(curves_of(points_of(records, spec), case.axis), LEAST_ERROR)
    (period,) = find_periods(fitted, spec)
    return Outcome(case, find_cliffs(jumps_of(fitted), spec, tile_finder(spec, (period,))), period)


@cache
def outcomes(noise: float, samples: int, count: int = CASES) -> tuple[Outcome, ...]:
    cases = [random_case(seed) for seed in range(count)]
    return tuple(
        look(case, records_of(case.gpu, case.points, noise=noise, samples=samples, seed=seed))
        for seed, case in enumerate(cases)
    )


def recall_and_false_share(found: tuple[Outcome, ...]) -> tuple[float, float]:
    """Over all cases: share of true steps above 5 % that were found at their place, and share of
    found steps where there is none (none: the waves add less than 0.5 %)."""
    true = hit = false = claimed = 0
    for one in found:
        steps = one.case.log_steps
        sizes = [axes[one.case.axis] for axes, _ in one.case.points]
        at = {sizes.index(cliff.at) for cliff in one.cliffs if cliff.ratio > 1}
        large = set(np.flatnonzero(steps > np.log(1.05)).tolist())
        true, hit = true + len(large), hit + len(large & at)
        false += sum(steps[i] < np.log(1.005) for i in at) + sum(
            cliff.ratio < 1 for cliff in one.cliffs
        )
        claimed += len(one.cliffs)
    assert true > 100
    return hit / true, false / claimed


def recovered(one: Outcome) -> bool:
    """Whether the true tile and resident blocks are among the explanations that are arithmetically
    the same.
    """
    tile = one.case.gpu.tile
    return (
        TileCandidate(tile.block_m, tile.block_n, one.case.gpu.resident)
        in one.period.recovered.best
    )


def test_steps_are_found_at_one_percent_noise() -> None:
    recall, false_share = recall_and_false_share(outcomes(0.01, 10))
    assert recall >= 0.95
    assert false_share < 0.05


def test_three_percent_noise_costs_steps_and_makes_few_up() -> None:
    recall, false_share = recall_and_false_share(outcomes(0.03, 10, NOISY_CASES))
    assert recall >= 0.80
    assert false_share < 0.10


def test_sizes_of_steps_lie_in_their_intervals() -> None:
    inside = Counter[bool]()
    for one in outcomes(0.01, 10):
        steps = one.case.log_steps
        sizes = [axes[one.case.axis] for axes, _ in one.case.points]
        # The trend that is taken out is that of the plateaus; only on hard waves are these flat.
        if (
            one.case.gpu.fluid_share == 0
            and one.case.gpu.us_per_byte == 0
            and one.case.axis != "hidden"
        ):
            for cliff in one.cliffs:
                true = np.exp(steps[sizes.index(cliff.at)])
                inside[bool(cliff.low <= true <= cliff.high)] += 1
                assert cliff.low <= cliff.ratio <= cliff.high
                assert cliff.first <= cliff.at <= cliff.last
    assert inside.total() > 60
    assert inside[True] / inside.total() >= 0.90


def test_tile_and_resident_blocks_are_recovered_at_one_percent_noise() -> None:
    found = outcomes(0.01, 10)
    right = sum(one.period.clear and recovered(one) for one in found)
    assert right >= 0.95 * CASES
    assert not [one for one in found if one.period.clear and not recovered(one)]


def test_at_three_percent_noise_it_is_unclear_rather_than_wrong() -> None:
    found = outcomes(0.03, 10, NOISY_CASES)
    assert sum(one.period.clear and not recovered(one) for one in found) <= 0.02 * len(found)


def test_single_figures_with_three_percent_noise_are_unclear_rather_than_wrong() -> None:
    found = outcomes(0.03, 1, NOISY_CASES)
    wrong = [one for one in found if one.period.clear and not recovered(one)]
    assert len(wrong) <= 0.02 * len(found)
    assert {one.period.recovered.verdict for one in found if not one.period.clear} <= {
        "INCONCLUSIVE"
    }


def test_no_steps_no_cliffs() -> None:
    false = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        size = np.arange(16, 116) * 64.0
        form = (10 + size / 100, 5 + (size / 2000) ** 2 * 20, np.full_like(size, 20.0))[seed % 3]
        log_time = np.log(form) + rng.normal(0, 0.004, size.size)
        (fit,) = describe(find_pieces(np.log(size), log_time[None], np.full((1, size.size), 0.004)))
        false += sum(abs(b.log_jump) > max(np.log(1.03), 4 * b.standard_error) for b in fit.breaks)
    assert false < 0.05 * 60


def test_a_point_beside_another_is_enough_when_the_jump_is_large() -> None:
    gpu = SimulatedGpu(108, Tile(128, 256))
    records = records_of(
        gpu, along("m", (256, 257), Gemm(m=1, n=10240, k=4096)), noise=0.01, seed=0
    )
    points = points_of(records, gpu.spec())
    (cliff,) = find_cliffs(
        jumps_of(fit_all(points, LEAST_ERROR)), gpu.spec(), tile_finder(gpu.spec(), ())
    )
    assert (cliff.at, cliff.next, cliff.cause.kind) == (256, 257, "wave edge")
    assert (
        cliff.low
        < gpu.time_us(Gemm(257, 10240, 4096)) / gpu.time_us(Gemm(256, 10240, 4096))
        < cliff.high
    )


def test_the_same_staircase_is_listed() -> None:
    gpu = SimulatedGpu(108, Tile(128, 256))
    case = Case(gpu, "n", along("n", range(1024, 8193, 256), Gemm(m=4096, n=1, k=4096)))
    period = look(case, records_of(gpu, case.points, noise=0.005, seed=3)).period
    assert period.tile_words == "128x256 tile on 108 SMs"
    assert TileCandidate(128, 128, 216) in period.recovered.best
    assert TileCandidate(64, 256, 216) in period.recovered.best
    assert period.spacing == pytest.approx(256 * 108 / 32, rel=0.02)


def test_a_library_that_changes_its_tile_is_not_explained_by_one() -> None:
    tiles = [
        Tile(m, n)
        for m, n in ((64, 64), (128, 64), (64, 256), (256, 128), (96, 128), (128, 192), (192, 128))
    ]

    def choose(gemm: Gemm) -> Tile:
        return tiles[(gemm.n // 192 * 7 + gemm.n // 448) % len(tiles)]

    gpu = SimulatedGpu(132, Tile(128, 128), choose=choose)
    case = Case(gpu, "n", along("n", range(1024, 6145, 64), Gemm(m=2048, n=1, k=4096)))
    period = look(case, records_of(gpu, case.points, noise=0.01, seed=3)).period
    assert period.recovered.reason == "no single tile" or period.recovered.verdict == "INCONCLUSIVE"
    assert period.tile_words == ""


def test_many_curves_of_single_figures_tell_what_one_cannot() -> None:
    gpu = SimulatedGpu(108, Tile(128, 256))
    held = [Gemm(m=1, n=n, k=k) for n in range(8192, 13313, 512) for k in (4096, 8192)]
    records = [
        record
        for i, gemm in enumerate(held)
        for record in records_of(
            gpu,
            [({"m": m, "n": gemm.n, "k": gemm.k}, replace(gemm, m=m)) for m in (255, 256, 257, 511, 512, 513, 1024)],
            noise=0.03, samples=1, seed=i,
        )
    ]  # fmt: skip
    spec = gpu.spec()
    fitted = fit_all(points_of(records, spec), LEAST_ERROR)
    cliffs = find_cliffs(jumps_of(fitted), spec, tile_finder(spec, ()))
    family = fitted[0].curve.family
    found = common_cliffs(jumps_of(fitted), cliffs, spec, {family: TileCandidate(128, 256, 108)})
    at = {common.at: common for common in found}
    rising = [g for g in held if gpu.waves(replace(g, m=257)) > gpu.waves(replace(g, m=256))]
    assert at[256].num_curves == len(held)
    assert at[256].stepping[1] == len(rising)
    assert at[256].stepping[0] > 1.3
    assert at[256].level[0] == pytest.approx(1.0, abs=0.03)
    assert 255 not in at


def test_explanations_with_the_same_waves_are_one_class() -> None:
    found = candidates([[Gemm(m=m, n=1024, k=64) for m in (128, 256, 384, 512)]], (128, 256), (4,))
    assert all(len({(w - w.min()).tobytes() for w in [row]}) == 1 for row in found.waves)
    members = [set(of_class) for of_class in found.members]
    assert {
        TileCandidate(128, 128, 4),
        TileCandidate(128, 256, 4),
    } in members  # 8 and 4 tiles a row: both 1 wave of 4 more
    assert (
        sum(len(of_class) for of_class in members) == 3
    )  # 256×256 is larger than any kernel's tile
