"""Causes of steps: each kind on points made for it, with what was recorded and without."""

from dataclasses import replace

import pytest
from made_devices import A100, CPU
from simulator import SimulatedGpu, along, measurement, records_of, run_of

from quantbench.analysis.blocks import Cause, TileInUse, num_blocks, padded, row_alignment_bytes
from quantbench.analysis.check import check_run, fit_all
from quantbench.analysis.curves import LEAST_ERROR
from quantbench.analysis.explain import CurveStep, cause_of
from quantbench.analysis.jumps import Cliff, find_cliffs, jumps_of
from quantbench.analysis.periods import Period, find_periods, tile_finder
from quantbench.analysis.staircase import Recovered, TileCandidate
from quantbench.analysis.summary import Point, points_of
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Launch, Tile
from quantbench.measurement import Grade
from quantbench.report.sections import period_words
from quantbench.store.record import GridPosition, Measured, Record
from quantbench.workload import Attention, Collective, Gemm, Softmax, Workload

TILE = Tile(128, 256)


def point(
    workload: Workload, us: float, launch: Launch | None = None, clock_mhz: float = 1400.0
) -> Point:
    outcome = Measured(measurement([us] * 8, clock_mhz), Grade("A"))
    record = Record(
        "run",
        f"{int(us):016x}",
        workload,
        "torch.mm",
        outcome,
        launch,
        (GridPosition({"x": int(us)}, "gemm"),),
    )
    (found,) = points_of([record], A100)
    return found


def launched(kernel: str, tile: Tile | None, per_sm: int = 1) -> Launch:
    return Launch(kernel, (1, 1, 1), (256, 1, 1), blocks_per_sm=per_sm, tile=tile)


def explained(
    before: Point, after: Point, jump: float, spec: DeviceSpec = A100, *more: Point
) -> Cause:
    return cause_of(CurveStep((before, after, *more), 0, jump), spec, tile_finder(spec, ()))


KERNEL, FLASH = launched("k", TILE), launched("flash", Tile(128, 64))
UNKNOWN, SAME = (None, None), (KERNEL, KERNEL)
VARIANTS = (
    replace(launched("k", TILE, 2), registers=112),
    replace(launched("k", TILE), registers=250),
)
WAVE_EDGE = (Gemm(2304, 3072, 4096), Gemm(2305, 3072, 4096))
LATE_EDGE = (Gemm(128 * 108, 5120, 4096), Gemm(128 * 108 + 1, 5120, 4096))
CHANGE = (Gemm(1024, 1024, 64), Gemm(1025, 1024, 64))
ATTENTION = {d: Attention(1, 16, 1024, 1024, d) for d in (128, 136)}


@pytest.mark.parametrize(
    ("before", "after", "launches", "jump", "cause", "words"),
    [
        (*WAVE_EDGE, SAME, 0.26, ("wave edge", "identity"),
         "128x256 tile on 108 SMs: 2 to 3 waves, the last 11 % full"),
        (*WAVE_EDGE, UNKNOWN, 0.26, ("wave edge", "arithmetic"),
         "128x256 tile (assumed) on 108 SMs: 2 to 3 waves, the last 11 % full"),
        # 20 to 21 waves are 5 %; a step of 40 % has another cause.
        (*LATE_EDGE, UNKNOWN, 0.045,
         ("wave edge", "arithmetic"), "20 to 21 waves"),
        (*LATE_EDGE, UNKNOWN, 0.4,
         ("unexplained", "arithmetic"), ""),
        (Gemm(512, 512, 4096), Gemm(512, 512, 4100), UNKNOWN, 0.26, ("alignment", "arithmetic"),
         "rows are aligned to 8 bytes, not 16"),
        (Gemm(256, 4096, 8192), Gemm(257, 4096, 8192), UNKNOWN, 0.26, ("tile edge", "arithmetic"),
         "128x256 tile (assumed) on 108 SMs: 32 to 48 tiles within one wave"),
        # b alone takes 32.5 MiB; with a and c the working set passes the 40 MiB of L2. Tiles and
        # alignment stay.
        (Gemm(400, 4096, 4160), Gemm(512, 4096, 4160), UNKNOWN, 0.11, ("memory boundary", "arithmetic"),
         "the working set grows to 40.6 MiB, the last-level cache holds 40.0 MiB"),
        (Gemm(1024, 4096, 256), Gemm(1024, 4096, 320), SAME, 0.3, ("unexplained", "identity"),
         "same kernel"),
        (ATTENTION[128], ATTENTION[136], UNKNOWN, 0.2, ("tile edge", "arithmetic"),
         "head_dim = 136 pads to 160, 128 to 128"),
        (Softmax(16, 1024, 1024), Softmax(16, 1152, 1152), UNKNOWN, 0.5, ("tile edge", "arithmetic"),
         "columns = 1152 pads to 2048, 1024 to 1024"),
        (Attention(1, 54, 256, 256, 128), Attention(1, 54, 264, 264, 128), (FLASH, FLASH), 0.4,
         ("wave edge", "identity"), ""),
        (*CHANGE, (launched("a", TILE), launched("b", Tile(64, 64))), 0.18,
         ("kernel change", "identity"), "the library changed from 128x256 to 64x64"),
        (*CHANGE, (KERNEL, launched("k", Tile(128, 256, split_k=2))), 0.18,
         ("kernel change", "identity"), "the library changed from 128x256 to 128x256 split-k 2"),
        (Gemm(1024, 1024, 4096), Gemm(1024, 1024, 4097), (KERNEL, launched("align1", Tile(64, 64))), 0.69,
         ("kernel change", "identity"), "as rows are aligned to 2 bytes, not 16"),
        (Gemm(4096, 3072, 4096), Gemm(4096, 3080, 4096), VARIANTS, 1.3, ("kernel change", "identity"),
         "variant of the kernel was compiled: 112 to 250 registers, 2 to 1 blocks_per_sm (Triton: n = 3080 is no multiple of 16"),
    ],
)  # fmt: skip
def test_each_kind_of_cause(
    before: Workload, after: Workload, launches: tuple[Launch | None, Launch | None], jump: float,
    cause: tuple[str, str], words: str,
) -> None:  # fmt: skip
    found = explained(point(before, 100, launches[0]), point(after, 130, launches[1]), jump)
    assert (found.kind, found.evidence) == cause
    assert words in found.words


@pytest.mark.parametrize("unnamed", [1, 2], ids=["before", "after"])
@pytest.mark.parametrize(
    ("beyond", "kind"), [("k", "wave edge"), ("other", "unexplained"), (None, "unexplained")]
)
def test_a_side_without_a_kernel_takes_that_of_both_its_neighbours_or_none(
    beyond: str | None, kind: str, unnamed: int
) -> None:
    kernels = ["k"] * 4  # 432 blocks of 64x64 fill the device, and the step is after them
    kernels[unnamed], kernels[0 if unnamed == 1 else 3] = None, beyond  # type: ignore[call-overload]
    points = [
        point(Gemm(m, 1024, 4096), us, launched(kernel, Tile(64, 64), per_sm=4) if kernel else None)
        for m, us, kernel in zip(
            (1720, 1728, 1736, 1744), (99, 100, 140, 141), kernels, strict=True
        )
    ]
    found = cause_of(CurveStep(points, 1, 0.3), A100, tile_finder(A100, ()))
    assert (found.kind, found.evidence) == (kind, "arithmetic")


def test_alignment_and_a_wave_edge_at_one_place_are_told_apart_by_what_follows() -> None:
    # 8 × 13 tiles are one wave, 8 × 14 are two. n = 3332 has lost the 16 bytes as well, n = 3392
    # has them back.
    sizes = [Gemm(1024, n, 1024) for n in (3328, 3332, 3392)]
    back = explained(point(sizes[0], 100), point(sizes[1], 140), 0.33, A100, point(sizes[2], 101))
    stays = explained(point(sizes[0], 100), point(sizes[1], 140), 0.33, A100, point(sizes[2], 139))
    assert back.kind == "alignment"
    assert stays.kind == "wave edge"


def test_a_point_of_twice_the_work_says_nothing_of_whether_the_time_came_back() -> None:
    sizes = [Gemm(512, 512, k) for k in (256, 257, 512)]
    found = explained(point(sizes[0], 100), point(sizes[1], 122), 0.2, A100, point(sizes[2], 200))
    assert (found.kind, found.words) == ("alignment", "rows are aligned to 2 bytes, not 16")


def test_whole_cache_lines_are_named_where_nothing_else_explains_the_step() -> None:
    found = explained(
        point(Gemm(512, 512, 4096), 100),
        point(Gemm(512, 512, 4104), 110),
        0.09,
        A100,
        point(Gemm(512, 512, 4160), 101),
    )
    assert (found.kind, found.words) == ("alignment", "rows are aligned to 16 bytes, not 128")


@pytest.mark.parametrize(
    ("n", "kind", "words"),
    [
        # 24 to 36 tiles: in four parts each they are 96 and 144, and 144 are more than run at once.
        (3072, "wave edge", "128x256 tile on 108 SMs, each split into 4 to use all SMs (narrower tiles or split-k): "
         "96 to 144 blocks, 1 to 2 waves"),
        # 16 to 24: in four parts 64 and 96, which still fit.
        (2048, "tile edge", "128x256 tile on 108 SMs: 16 to 24 tiles within one wave"),
        (10240, "wave edge", "128x256 tile on 108 SMs: 1 to 2 waves, the last 11 % full"),
    ],
)  # fmt: skip
def test_below_one_wave_a_recovered_tile_is_cut_until_the_sms_are_busy(
    n: int, kind: str, words: str
) -> None:
    step = CurveStep((point(Gemm(256, n, 4096), 100), point(Gemm(257, n, 4096), 130)), 0, 0.26)
    used = TileInUse(TILE, 108, "steps", "128x256 tile on 108 SMs")
    found = cause_of(step, A100, lambda _: used)
    assert (found.kind, found.words) == (kind, words)
    assert cause_of(CurveStep(step.points[::-1], 0, -0.26), A100, lambda _: used).kind == kind


def test_an_assumed_tile_is_dropped_where_the_steps_speak_against_it() -> None:
    # Steps of a 64x64 tile, too noisy to tell it from its likes, but not from a 128x256 one.
    gpu = SimulatedGpu(108, Tile(64, 64))
    records = records_of(
        gpu, along("n", range(1024, 4097, 64), Gemm(2048, 1, 4096)), noise=0.01, seed=4
    )
    fitted = fit_all(points_of(records, gpu.spec()), LEAST_ERROR)
    (period,) = find_periods(fitted, gpu.spec())
    (first, *_) = points_of(records, gpu.spec())

    def believed(plausible: frozenset[TileCandidate]) -> TileInUse | None:
        recovered = replace(period.recovered, verdict="INCONCLUSIVE", plausible=plausible)
        return tile_finder(gpu.spec(), [replace(period, recovered=recovered, chosen=None)])(first)

    assert TileCandidate(64, 64, 108) in period.recovered.plausible
    assert believed(period.recovered.plausible) is None
    kept = believed(frozenset({TileCandidate(128, 256, 108)}))
    assert kept.source == "assumed"


def test_a_processor_has_tiles_and_no_waves() -> None:
    found = explained(
        point(Gemm(64, 64, 64, dtype="fp32"), 100),
        point(Gemm(64, 72, 64, dtype="fp32"), 150),
        0.4,
        CPU,
    )
    assert found.kind == "tile edge"
    assert "SM" not in found.words


def test_throttling_is_seen_by_the_clock_and_comes_first() -> None:
    before = point(Gemm(2304, 3072, 4096), 100, clock_mhz=1410)
    after = point(Gemm(2305, 3072, 4096), 130, clock_mhz=1100)
    found = explained(before, after, 0.26)
    assert (found.kind, found.evidence) == ("throttling", "clock")
    assert found.words == "the SM clock went from 1410 to 1100 MHz"


def test_blocks_padding_and_alignment_by_hand() -> None:
    assert num_blocks(Gemm(257, 512, 64, batch=2), Tile(128, 256, split_k=3)) == 3 * 2 * 2 * 3
    assert num_blocks(Attention(2, 8, 300, 300, 64), Tile(128, 64)) == 2 * 8 * 3
    assert num_blocks(Softmax(8, 64, 64), TILE) is None
    assert padded(Gemm(1, 1, 1)) is None
    assert row_alignment_bytes(Softmax(8, 100, 100)) == 8
    assert row_alignment_bytes(Collective("all_reduce", 1024, 2)) is None
    assert TileInUse(TILE, 108, "launch", "").identified
    assert not TileInUse(TILE, 108, "assumed", "").identified


def cliffs(gpu: SimulatedGpu, records: list[Record]) -> tuple[Cliff, ...]:
    spec = gpu.spec()
    fitted = fit_all(points_of(records, spec), LEAST_ERROR)
    return find_cliffs(jumps_of(fitted), spec, tile_finder(spec, ()))


def test_misaligned_sizes_of_a_simulated_run_are_called_so() -> None:
    gpu = SimulatedGpu(108, Tile(128, 256), misaligned=1.4)
    points = along("k", (4032, 4064, 4096, 4097, 4098, 4100, 4104, 4128, 4160), Gemm(4096, 4096, 1))
    found = cliffs(gpu, records_of(gpu, points, noise=0.01, seed=4))
    fall, rise = sorted(found, key=lambda cliff: cliff.ratio)
    assert (rise.at, rise.cause.kind) == (4096, "alignment")
    assert rise.cause.words == "rows are aligned to 2 bytes, not 16"
    assert fall.ratio < 1 < rise.ratio
    assert (fall.next, fall.cause.words) == (4104, "rows were aligned to 8 bytes, not 16")


def test_a_library_that_changes_kernel_at_a_size_is_caught_by_its_launches() -> None:
    gpu = SimulatedGpu(108, Tile(128, 128), choose=lambda g: Tile(128, 128 if g.n <= 2048 else 256))
    points = along("n", range(1920, 2177, 32), Gemm(4096, 1, 512))
    records = records_of(gpu, points, noise=0.005, seed=1, launches=True)
    (change,) = [cliff for cliff in cliffs(gpu, records) if cliff.at == 2048]
    assert change.cause.kind == "kernel change"
    assert change.cause.words == "the library changed from 128x128 to 128x256"


def test_another_compiled_variant_is_no_wave_edge_and_not_part_of_the_fit() -> None:
    fast = SimulatedGpu(108, TILE)
    slow = replace(fast, tile_ns_per_k=4 * fast.tile_ns_per_k)
    held = Gemm(m=4096, n=1, k=4096)
    records = []
    for gpu, registers, sizes in (
        (fast, 112, range(1024, 8193, 256)),
        (slow, 250, range(2056, 8193, 1024)),
    ):
        made = records_of(gpu, along("n", sizes, held), noise=0.003, seed=3, launches=True)
        for one in made:
            assert one.launch is not None
            records.append(replace(one, launch=replace(one.launch, registers=registers)))
    found = check_run(run_of(fast, records))
    assert {cliff.cause.kind for cliff in found.cliffs if cliff.next % 16} == {"kernel change"}
    assert [period.tile_words for period in found.periods] == ["128x256 tile on 108 SMs"]


@pytest.mark.parametrize(
    ("confidence", "explained", "words"),
    [
        (0.9, 0.4, "no single tile"),
        (0.26, 0.64, "no single tile"),
        (0.83, 0.99, "most likely is 128x128 tile"),
    ],
)
def test_no_tile_is_named_that_is_unlikely(confidence: float, explained: float, words: str) -> None:
    best = (TileCandidate(64, 128, 264), TileCandidate(128, 128, 132))  # the declared one is named
    found = Recovered("INCONCLUSIVE", "", best, confidence, explained, (), frozenset(best))
    period = Period("n", "gemm", "p:P", "", found, 132, 1, declared=Tile(128, 128))
    assert words in period_words(period)
