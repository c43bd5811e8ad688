"""Finds cliffs, sizes after which the time jumps, and determines their causes.

Entry points: `find_cliffs` (single curves), `common_cliffs` (medians over many curves), their results `Cliff` and
`CommonCliff` with their `Cause`; `useful_work`. Used by `check` and `rule_pairs`; `report` and `profile.build` use the
results. (The latency models have cliffs of their own in `latency.gemm.cliffs`.)

`cause_of` checks, in this order: lower clock, changed kernel, lost alignment, more waves or tiles, padding, working set
beyond the cache. The first that applies is the cause; clock, waves, tiles and padding must explain half of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from quantbench.analysis.blocks import TileInUse, compute_bound, num_blocks, padded, parts_to_fill, row_alignment_bytes
from quantbench.analysis.curves import Curve, Family, FittedCurve
from quantbench.analysis.periods import Period, TileOf, tile_finder
from quantbench.analysis.staircase import Explanation
from quantbench.analysis.step_detection import Break
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.errors import require_choice
from quantbench.launch import Launch
from quantbench.providers.catalog import UNPADDED
from quantbench.quantization import alignment_words, cdiv, kernel_change_words, padding_words
from quantbench.stats import median_interval
from quantbench.units import percent, size
from quantbench.workload import Softmax, Workload

KINDS = ("throttling", "kernel change", "alignment", "wave edge", "tile edge", "memory boundary", "unexplained")
EVIDENCE = ("identity", "arithmetic", "clock")

# An effect must explain this share of the log jump to be its cause.
_ENOUGH = 0.5
# The slowdown begins a little before the working set exceeds the cache and ends a little after.
_CACHE_EDGE = 1.15
# Number of later points checked for a return of the time once the alignment is restored, and the most work they may
# do relative to the point before the step.
_LOOK_AHEAD, _LITTLE_MORE_WORK = 8, 1.1


@dataclass(frozen=True)
class Cause:
    """Cause of a step in the time.

    kind: one of KINDS.
    evidence: `identity` (recorded kernels), `arithmetic` (computed from sizes and a tile) or `clock` (recorded SM
        clock).
    """

    kind: str
    words: str
    evidence: str

    def __post_init__(self) -> None:
        require_choice("Cause", "kind", self.kind, KINDS)
        require_choice("Cause", "evidence", self.evidence, EVIDENCE)


@dataclass(frozen=True)
class CurveStep:
    """A step between `index` and `index + 1` of a curve's points. log_jump: rise of the log time beyond the trend."""

    points: Sequence[Point]
    index: int
    log_jump: float

    @property
    def before(self) -> Point:
        return self.points[self.index]

    @property
    def after(self) -> Point:
        return self.points[self.index + 1]


def cause_of(step: CurveStep, spec: DeviceSpec, tile_of: TileOf) -> Cause:
    """Determines the cause of one step up or down. tile_of: maps a point to its tile (see `periods.tile_finder`)."""
    old, new = _tiles(step, tile_of)
    evidence = "identity" if old and new and old.identified and new.identified else "arithmetic"
    found = (
        _throttling(step)
        or _kernel_change(step)
        or _alignment(step, tile_of)
        or (_more_blocks(step, old, new, evidence) if old and new else None)
        or _padding(step)
        or _memory(step, spec)
    )
    if found is not None:
        return found
    if step.after.provider in UNPADDED:
        words = "products of the experts one after the other, whose waves are not shared"
    elif isinstance(step.after.workload, Softmax) and not (new and new.identified):
        words = "no tile of the softmax kernel is known"
    elif old is None or new is None:
        words = "no kernel name was recorded, and no single tile explains the steps of this run"
    elif evidence == "identity":
        words = "same kernel on both sides; no edge of its tile is large enough to explain it"
    else:
        words = f"no edge of a {new.words} is large enough to explain it"
    return Cause("unexplained", words, evidence)


def _tiles(step: CurveStep, tile_of: TileOf) -> tuple[TileInUse | None, TileInUse | None]:
    """Returns the tiles before and after the step, None if unknown.

    If one side has no recorded kernel, it is assumed to run the other side's, provided that the next recorded kernel
    beyond it is that one. Blocks of two different tiles must not be compared: their numbers differ anywhere.
    """
    old, new = tile_of(step.before), tile_of(step.after)
    if old is None or new is None or old.identified == new.identified:
        return old, new
    beyond = step.points[step.index + 2 :] if old.identified else step.points[: step.index][::-1]
    named = step.before if old.identified else step.after
    other = next((point.launch for point in beyond if point.launch is not None), None)
    if named.launch is None or other is None or (named.launch.kernel, _work_of(named.launch)) != (
        other.kernel, _work_of(other)
    ):  # fmt: skip
        return None, None
    return (old, replace(old, source="assumed")) if old.identified else (replace(new, source="assumed"), new)


def _throttling(step: CurveStep) -> Cause | None:
    old, new = step.before.clock_mhz, step.after.clock_mhz
    if not old or not new or log(old / new) / step.log_jump < _ENOUGH:
        return None
    return Cause("throttling", f"the SM clock went from {old:.0f} to {new:.0f} MHz", "clock")


def _kernel_change(step: CurveStep) -> Cause | None:
    old, new = step.before.launch, step.after.launch
    if old is None or new is None or (old.kernel, _work_of(old)) == (new.kernel, _work_of(new)):
        return None
    words = kernel_change_words(old, new)
    misaligned = _misaligned(step, (16,))  # below 16 bytes libraries must change kernel; below 128 they need not
    return Cause("kernel change", f"{words}, as {misaligned[1]}" if misaligned else words, "identity")


def _work_of(launch: Launch) -> tuple[int, int, int] | None:
    tile = launch.tile
    return None if tile is None else (tile.block_m, tile.block_n, tile.split_k)


def _misaligned(step: CurveStep, limits: Sequence[int] = (16, 128)) -> tuple[int, str] | None:
    """Returns the first of `limits` (bytes) that row alignment falls below at a step up, or rises to at a step down,
    with a description."""
    aligned, other = (step.before, step.after) if step.log_jump > 0 else (step.after, step.before)
    whole, broken = row_alignment_bytes(aligned.workload), row_alignment_bytes(other.workload)
    if whole is None or broken is None or broken >= whole:
        return None
    for needed in limits:
        if broken < needed <= whole:
            verb = "are" if step.log_jump > 0 else "were"
            return needed, alignment_words(broken, needed, verb=verb)
    return None


def _alignment(step: CurveStep, tile_of: TileOf) -> Cause | None:
    misaligned = _misaligned(step)
    if misaligned is None:
        return None
    back = _came_back(step, tile_of)
    if back is None:  # no later point to compare: 16 bytes matter to every kernel, 128 to few
        back = misaligned[0] == 16
    return Cause("alignment", misaligned[1], "arithmetic") if back else None


def _came_back(step: CurveStep, tile_of: TileOf) -> bool | None:
    """Returns whether the time drops back at a near point with restored alignment and as many waves; None without."""
    if step.log_jump < 0:
        return None
    whole, waves = row_alignment_bytes(step.before.workload), _waves(step.after, tile_of)
    most_flops = step.before.workload.flops * _LITTLE_MORE_WORK
    for point in step.points[step.index + 2 : step.index + 2 + _LOOK_AHEAD]:
        if point.workload.flops > most_flops:
            break
        if row_alignment_bytes(point.workload) == whole and _waves(point, tile_of) == waves:
            return log(point.latency_us / step.before.latency_us) < step.log_jump / 2
    return None


def _waves(point: Point, tile_of: TileOf) -> int | None:
    used = tile_of(point)
    blocks = None if used is None else num_blocks(point.workload, used.tile)
    return None if used is None or blocks is None else cdiv(blocks, used.resident_blocks)


def _more_blocks(step: CurveStep, old: TileInUse, new: TileInUse, evidence: str) -> Cause | None:
    before, after = num_blocks(step.before.workload, old.tile), num_blocks(step.after.workload, new.tile)
    if before is None or after is None or (before < after) != (step.log_jump > 0):
        return None
    waves = cdiv(before, old.resident_blocks), cdiv(after, new.resident_blocks)
    if new.waves and waves[0] != waves[1] and log(waves[1] / waves[0]) / step.log_jump >= _ENOUGH:
        last = after - (waves[1] - 1) * new.resident_blocks
        words = f"{new.words}: {waves[0]} to {waves[1]} waves, the last {percent(last / new.resident_blocks)} full"
        return Cause("wave edge", words, evidence)
    found = _cut_to_fill(step, before, after, new) if waves == (1, 1) else None
    if found is not None:
        return found
    # More tiles in the same number of waves cost nothing, except within one wave, where they share the memory.
    if (not new.waves or waves[0] == waves[1] == 1) and log(after / before) / step.log_jump >= _ENOUGH:
        where = " within one wave" if new.waves else ""
        return Cause("tile edge", f"{new.words}: {before} to {after} tiles{where}", evidence)
    return None


def _cut_to_fill(step: CurveStep, before: int, after: int, used: TileInUse) -> Cause | None:
    """Returns the wave edge of split tiles: below half a wave libraries split tiles to use more SMs. The parts may need
    a second wave where whole tiles would not. docs/choosing-shapes.md shows measured steps."""
    parts = parts_to_fill(min(before, after), used.resident_blocks)
    if used.source != "steps" or not used.waves or parts == 1:
        return None
    waves = [cdiv(blocks * parts, used.resident_blocks) for blocks in (before, after)]
    if waves[0] == waves[1] or log(waves[1] / waves[0]) / step.log_jump < _ENOUGH:
        return None
    cut = f"{used.words}, each split into {parts} to use all SMs (narrower tiles or split-k)"
    words = f"{cut}: {before * parts} to {after * parts} blocks, {waves[0]} to {waves[1]} waves"
    return Cause("wave edge", words, "arithmetic")


def _padding(step: CurveStep) -> Cause | None:
    old, new = padded(step.before.workload), padded(step.after.workload)
    if old is None or new is None or old[2] == new[2] or log(new[2] / old[2]) / step.log_jump < _ENOUGH:
        return None
    name, needed, padded_to = new
    return Cause("tile edge", f"{padding_words(name, needed, padded_to)}, {old[1]} to {old[2]}", "arithmetic")


def _memory(step: CurveStep, spec: DeviceSpec) -> Cause | None:
    small, large = sorted((step.before.workload.min_bytes, step.after.workload.min_bytes))
    grows = step.after.workload.min_bytes >= step.before.workload.min_bytes
    if small >= spec.l2_bytes * _CACHE_EDGE or large <= spec.l2_bytes / _CACHE_EDGE or small == large:
        return None
    if grows != (step.log_jump > 0):
        return None
    words = f"the working set passes {size(large)}, the last-level cache holds {size(spec.l2_bytes)}"
    return Cause("memory boundary", words, "arithmetic")


# Smallest jump (log time) that is called a cliff, at any noise.
SMALLEST_CLIFF = log(1.03)
# Standard errors that a jump must exceed. High, because each curve has many gaps: on simulated curves of a hundred
# points without steps, about one curve in seven then shows a false step.
_SURE = 4.0
_95_PERCENT = 1.96


@dataclass(frozen=True)
class Cliff:
    """A jump of the time between two neighbours of a curve, beyond the trend.

    axis, op, provider, variant, held: the curve (see `curves.Curve`).
    before, after: points on both sides of the jump.
    ratio, low, high: time after / before without the trend, with 95 % interval; below 1 the time falls.
    first, last: range of axis values after which the jump may lie, with 95 % confidence.
    rate_ratio: useful work per second, after / before, trend included.
    """

    axis: str
    op: str
    provider: str
    variant: str
    held: Mapping[str, int]
    before: Point
    after: Point
    ratio: float
    low: float
    high: float
    first: int
    last: int
    rate_ratio: float
    cause: Cause

    @property
    def at(self) -> int:
        """The last size before the jump."""
        return self.before.axes[self.axis]

    @property
    def next(self) -> int:
        """The first size measured after the jump."""
        return self.after.axes[self.axis]

    @property
    def family(self) -> Family:
        return (self.op, self.provider, self.variant)


def find_cliffs(fitted: Iterable[FittedCurve], spec: DeviceSpec, periods: Sequence[Period]) -> tuple[Cliff, ...]:
    """Finds the significant jumps, largest first: rises that lower the rate of useful work, and falls.

    periods: tile and waves recovered per curve family, for points without a recorded kernel.
    """
    tile_of = tile_finder(spec, periods)
    found = [_cliff(one, b, spec, tile_of) for one in fitted for b in one.fit.breaks if _counts(one, b)]
    return tuple(sorted(found, key=lambda cliff: -abs(log(cliff.ratio))))


def _counts(one: FittedCurve, found: Break) -> bool:
    """Returns whether a break is a cliff: large, significant, between close sizes, and steeper than the work grows."""
    i, jump = found.index, found.log_jump
    if abs(jump) < max(SMALLEST_CLIFF, _SURE * found.standard_error) or i not in one.curve.close_gaps:
        return False
    return jump < 0 or bool(one.fit.levels[i + 1] - one.fit.levels[i] > log(_growth(one.curve, i)))


def _growth(curve: Curve, i: int) -> float:
    return useful_work(curve.points[i + 1].workload) / useful_work(curve.points[i].workload)


def useful_work(workload: Workload) -> int:
    """Returns the floating-point operations of a workload, or its bytes if it has none (collectives)."""
    return workload.flops or workload.min_bytes


def _cliff(one: FittedCurve, found: Break, spec: DeviceSpec, tile_of: TileOf) -> Cliff:
    curve, i = one.curve, found.index
    before, after = curve.points[i], curve.points[i + 1]
    reach = _95_PERCENT * found.standard_error
    return Cliff(
        axis=curve.axis, op=curve.op, provider=curve.provider, variant=curve.variant, held=dict(curve.held),
        before=before, after=after, ratio=exp(found.log_jump), low=exp(found.log_jump - reach),
        high=exp(found.log_jump + reach), first=curve.sizes[found.first], last=curve.sizes[found.last],
        rate_ratio=_growth(curve, i) * before.latency_us / after.latency_us,
        cause=cause_of(CurveStep(curve.points, i, found.log_jump), spec, tile_of),
    )  # fmt: skip


# Fewest curves that have a common cliff.
_FEWEST_CURVES = 8
# Most kinds of cause listed for one size.
_CAUSES_SAID = 2

#: axis, op, provider, variant, and the sizes on both sides
_Key = tuple[str, str, str, str, int, int]


@dataclass(frozen=True)
class CommonCliff:
    """A jump of the median time over many curves of one family, between sizes `at` and `next` of `axis`.

    ratio, low, high: median jump (time ratio) with 95 % interval.
    num_cliffs: number of curves with a significant jump of their own there.
    causes: (kind, number of curves) of these cliffs, by decreasing total cost.
    stepping, level: (median ratio, number) of the curves that begin a new wave there, and of those that do not; None
        if there are none, or no tile explains the family's steps.
    """

    axis: str
    op: str
    provider: str
    variant: str
    at: int
    next: int
    num_curves: int
    ratio: float
    low: float
    high: float
    num_cliffs: int
    causes: tuple[tuple[str, int], ...]
    stepping: tuple[float, int] | None = None
    level: tuple[float, int] | None = None

    @property
    def cause(self) -> str:
        """The most costly kind of cause, or `unexplained`."""
        return self.causes[0][0] if self.causes else "unexplained"

    @property
    def cause_words(self) -> str:
        """The two most costly kinds of cause with their number of curves: `wave edge 71, tile edge 64`."""
        return ", ".join(f"{kind} {number}" for kind, number in self.causes[:_CAUSES_SAID]) or "unexplained"


def common_cliffs(
    fitted: Iterable[FittedCurve], cliffs: Sequence[Cliff], spec: DeviceSpec, explained_by: dict[Family, Explanation]
) -> tuple[CommonCliff, ...]:
    """Finds sizes after which the median jump over eight or more curves is significant and at least 3 %, largest first.

    cliffs: result of `find_cliffs` on the same curves.
    explained_by: the tile that explains the steps of a family, for families that have one.
    """
    jumps: dict[_Key, list[tuple[float, bool | None]]] = {}
    counted: set[tuple[_Key, str]] = set()
    for one in fitted:
        curve, sizes = one.curve, one.curve.sizes
        rise = np.diff(curve.log_time) - one.fit.trend * np.diff(curve.log_size)
        explanation = explained_by.get(curve.family)
        for i in curve.close_gaps:
            if compute_bound(curve.points[i + 1].workload, spec):
                key: _Key = (curve.axis, *curve.family, sizes[i], sizes[i + 1])
                steps = None if explanation is None else _steps(one, i, explanation)
                jumps.setdefault(key, []).append((float(rise[i]), steps))
                counted.add((key, curve.points[i].key))
    heights: dict[_Key, dict[str, list[float]]] = {}
    for cliff in cliffs:
        at = (cliff.axis, *cliff.family, cliff.at, cliff.next)
        if cliff.ratio > 1 and (at, cliff.before.key) in counted:
            heights.setdefault(at, {}).setdefault(cliff.cause.kind, []).append(log(cliff.ratio))
    found = [_common(key, of_key, heights.get(key, {})) for key, of_key in jumps.items()]
    return tuple(sorted((c for c in found if c is not None), key=lambda c: -c.ratio))


def _steps(one: FittedCurve, i: int, explanation: Explanation) -> bool | None:
    """Returns whether point i + 1 needs more waves than point i."""
    before, after = (num_blocks(point.workload, explanation.tile) for point in one.curve.points[i : i + 2])
    if before is None or after is None:
        return None
    return cdiv(after, explanation.resident_blocks) > cdiv(before, explanation.resident_blocks)


def _common(
    key: _Key, jumps: Sequence[tuple[float, bool | None]], heights: dict[str, list[float]]
) -> CommonCliff | None:
    if len(jumps) < _FEWEST_CURVES:
        return None
    rises = [rise for rise, _ in jumps]
    middle = float(np.median(rises))
    interval = median_interval(rises)
    if middle < SMALLEST_CLIFF or interval.low <= 0:
        return None
    axis, op, provider, variant, at, following = key
    causes = tuple((kind, len(heights[kind])) for kind in sorted(heights, key=lambda kind: -sum(heights[kind])))
    return CommonCliff(
        axis, op, provider, variant, at, following, len(jumps), exp(middle), exp(interval.low), exp(interval.high),
        sum(number for _, number in causes), causes,
        _median_ratio([rise for rise, steps in jumps if steps]),
        _median_ratio([rise for rise, steps in jumps if steps is False]),
    )  # fmt: skip


def _median_ratio(rises: Sequence[float]) -> tuple[float, int] | None:
    return (exp(float(np.median(rises))), len(rises)) if rises else None
