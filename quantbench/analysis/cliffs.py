"""Cliffs: sizes after which the time jumps, on one curve (`find_cliffs`) or on many (`common_cliffs`), with causes.

A single figure per shape is too noisy for all but the largest steps of one curve; the median over a hundred curves is
not. `common_cliffs` therefore counts every compute-bound curve that has both sizes, whether or not it shows a cliff of
its own there. `cause_of` asks in this order: did the clock fall? did the library change kernel? did rows lose their
alignment? does the number of waves, or of tiles, rise? does the working set outgrow the cache? The first effect that is
large enough to make up the step is its cause. Recorded kernels are used where there are any, arithmetic otherwise.
Called by `check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from quantbench.analysis.blocks import (
    TileInUse,
    compute_bound,
    num_blocks,
    padded,
    parts_to_fill,
    row_alignment_bytes,
)
from quantbench.analysis.curves import Curve, Family, FittedCurve
from quantbench.analysis.periods import Period, TileOf, tile_finder
from quantbench.analysis.staircase import Explanation
from quantbench.analysis.step_detection import Break
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.errors import require_choice
from quantbench.launch import Launch
from quantbench.quantization import alignment_words, cdiv, kernel_change_words, padding_words
from quantbench.stats import median_interval
from quantbench.units import percent, size
from quantbench.workload import Workload

KINDS = ("throttling", "kernel change", "alignment", "wave edge", "tile edge", "memory boundary", "unexplained")
EVIDENCE = ("identity", "arithmetic", "clock")

# An effect must be able to make up this share of a step's height to be called its cause.
_ENOUGH = 0.5
# The clock must account for more: products draw the clock down a little wherever they do more work at a time.
_ENOUGH_CLOCK = 0.5
# Where the working set passes the cache, the loss begins a little before and ends a little after.
_CACHE_EDGE = 1.15
# How many points further on are asked whether the time came back with the alignment, and how much more work they may
# be.
_LOOK_AHEAD, _LITTLE_MORE_WORK = 8, 1.1


@dataclass(frozen=True)
class Cause:
    """Why the time steps.

    kind: one of KINDS.
    words: for people.
    evidence: `identity` (the recorded kernels show it), `arithmetic` (computed from sizes and a tile) or `clock` (the
        recorded SM clock shows it).
    """

    kind: str
    words: str
    evidence: str

    def __post_init__(self) -> None:
        require_choice("Cause", "kind", self.kind, KINDS)
        require_choice("Cause", "evidence", self.evidence, EVIDENCE)


@dataclass(frozen=True)
class CurveStep:
    """A step between points `index` and `index + 1` of a curve.

    points: the curve's points, ascending.
    log_jump: rise of the log time there, beyond the trend.
    """

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
    """The cause of one step up or down. tile_of: the tile that computes a point (`periods.tile_finder`)."""
    old, new = tile_of(step.before), tile_of(step.after)
    evidence = "identity" if old and new and old.identified and new.identified else "arithmetic"
    found = (
        _throttling(step)
        or _kernel_change(step)
        or _alignment(step, tile_of)
        or (_more_blocks(step, old, new, evidence) if old and new else None)
        or _padding(step)
        or _memory(step, spec)
    )
    return found or Cause("unexplained", _nothing_fits(old, new), evidence)


def _throttling(step: CurveStep) -> Cause | None:
    old, new = step.before.clock_mhz, step.after.clock_mhz
    if not old or not new or log(old / new) / step.log_jump < _ENOUGH_CLOCK:
        return None
    return Cause("throttling", f"the SM clock went from {old:.0f} to {new:.0f} MHz", "clock")


def _kernel_change(step: CurveStep) -> Cause | None:
    old, new = step.before.launch, step.after.launch
    if old is None or new is None or (old.kernel, _work_of(old)) == (new.kernel, _work_of(new)):
        return None
    words = kernel_change_words(old, new)
    misaligned = _misaligned(step, (16,))  # what forces a library's hand; whole cache lines do not
    return Cause("kernel change", f"{words}, as {misaligned.words}" if misaligned else words, "identity")


def _work_of(launch: Launch) -> tuple[int, int, int] | None:
    tile = launch.tile
    return None if tile is None else (tile.block_m, tile.block_n, tile.split_k)


@dataclass(frozen=True)
class _Misaligned:
    """Rows lose their alignment to needed_bytes across a step. words: for people."""

    needed_bytes: int
    words: str


def _misaligned(step: CurveStep, limits: Sequence[int] = (16, 128)) -> _Misaligned | None:
    """How rows fall below one of `limits` bytes across a step up (or regain it across a step down)."""
    aligned, other = (step.before, step.after) if step.log_jump > 0 else (step.after, step.before)
    whole, broken = row_alignment_bytes(aligned.workload), row_alignment_bytes(other.workload)
    if whole is None or broken is None or broken >= whole:
        return None
    for needed in limits:
        if broken < needed <= whole:
            verb = "are" if step.log_jump > 0 else "were"
            return _Misaligned(needed, alignment_words(broken, needed, verb=verb))
    return None


def _alignment(step: CurveStep, tile_of: TileOf) -> Cause | None:
    misaligned = _misaligned(step)
    if misaligned is None:
        return None
    back = _came_back(step, tile_of)
    if back is None:  # nothing further on tells: rows below 16 bytes cannot be loaded whole, 128 are a nicety
        back = misaligned.needed_bytes == 16
    return Cause("alignment", misaligned.words, "arithmetic") if back else None


def _came_back(step: CurveStep, tile_of: TileOf) -> bool | None:
    """Whether the time returns to its level before the step once the alignment is restored, at no more waves than after
    it.

    None where no such point is near.
    """
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
    # More tiles in as many whole waves cost nothing. Below one wave they do: all of them share the memory.
    if (not new.waves or waves[0] == waves[1] == 1) and log(after / before) / step.log_jump >= _ENOUGH:
        where = " within one wave" if new.waves else ""
        return Cause("tile edge", f"{new.words}: {before} to {after} tiles{where}", evidence)
    return None


def _cut_to_fill(step: CurveStep, before: int, after: int, used: TileInUse) -> Cause | None:
    """A wave edge of the parts that a library cuts tiles into when there are fewer than fill the SMs.

    Below one wave the recovered tile is not what ran: the parts begin a second wave where whole tiles would not.
    docs/choosing-shapes.md has the measured steps with and without.
    """
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


def _nothing_fits(old: TileInUse | None, new: TileInUse | None) -> str:
    if old is None or new is None:
        return "no kernel name was recorded, and no single tile explains the steps of this run"
    if old.identified and new.identified:
        return "same kernel on both sides; no edge of its tile is large enough to explain it"
    return f"no edge of a {new.words} is large enough to explain it"


# A jump of the time below this is not called a cliff, however quiet the measurement.
SMALLEST_CLIFF = log(1.03)
# Standard errors that a jump must have, for the largest of about a hundred places was looked for: noise alone then
# shows one false step in about seven curves of a hundred points (measured on simulated curves without steps).
_SURE = 4.0
_95_PERCENT = 1.96


@dataclass(frozen=True)
class Cliff:
    """Between `before` and `after`, neighbours on a curve, the time jumps beyond the trend around it.

    axis, op, provider, variant, held: the curve (see `curves.Curve`).
    ratio, low, high: time after over time before, with its 95 % interval; below 1 the time falls.
    first, last: axis values; the jump may lie after any size from `first` to `last`.
    rate_ratio: useful work per second after over before, trend included.
    cause: why the time jumps.
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
    """Every significant jump, the largest first: rises after which the device does less work per second, and falls.

    periods: what explains the steps of each family, for points whose kernel was not recorded.
    """
    tile_of_family = tile_finder(spec, periods)
    found = []
    for one in fitted:
        tile_of = tile_of_family(one.curve.family)
        found += [_cliff(one, b, spec, tile_of) for b in one.fit.breaks if _counts(one, b)]
    return tuple(sorted(found, key=lambda cliff: -abs(log(cliff.ratio))))


def _counts(one: FittedCurve, found: Break) -> bool:
    """Whether a break is a cliff: high enough, significant, between close neighbours, and steeper than the work grows.

    A rise that is less steep than the work cannot be told from growth.
    """
    i, jump = found.index, found.log_jump
    if abs(jump) < SMALLEST_CLIFF or abs(jump) < _SURE * found.standard_error:
        return False
    if i not in one.curve.close_gaps:
        return False
    return jump < 0 or bool(one.fit.levels[i + 1] - one.fit.levels[i] > log(_growth(one.curve, i)))


def _growth(curve: Curve, i: int) -> float:
    return useful_work(curve.points[i + 1].workload) / useful_work(curve.points[i].workload)


def useful_work(workload: Workload) -> int:
    """Arithmetic operations, or bytes where there is none to count (collectives)."""
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


# Fewer curves are looked at one by one.
_FEWEST_CURVES = 8


# Kinds of cause that are told of one size.
_CAUSES_SAID = 2

#: axis, op, provider, variant, and the sizes on both sides
_Key = tuple[str, str, str, str, int, int]


@dataclass(frozen=True)
class CommonCliff:
    """After size `at` of `axis` the time jumps by `ratio`, the median over num_curves curves of one family.

    next: the next size.
    ratio, low, high: median jump with its 95 % interval.
    num_cliffs: curves with a significant jump of their own there.
    causes: kinds of cause of those curves with their number, the kind that costs most first.
    stepping, level: median ratio and number of the curves that begin a new wave there, and of those that do not; None
        where no tile explains the family's steps.
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
        """The kind of cause that costs most."""
        return self.causes[0][0] if self.causes else "unexplained"

    @property
    def cause_words(self) -> str:
        """`wave edge 71, tile edge 64`: what explains the most costly cliffs, with the number of curves."""
        return ", ".join(f"{kind} {number}" for kind, number in self.causes[:_CAUSES_SAID]) or "unexplained"


def common_cliffs(
    fitted: Iterable[FittedCurve],
    cliffs: Sequence[Cliff],
    spec: DeviceSpec,
    explained_by: dict[Family, Explanation],
) -> tuple[CommonCliff, ...]:
    """Sizes that many curves share and after which the median jump is 3 % or more, the largest first.

    explained_by: the tile that explains the steps of each family, where one does.
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
    """Whether the explanation needs more waves for point i + 1 than for point i."""
    blocks = [num_blocks(point.workload, explanation.tile) for point in one.curve.points[i : i + 2]]
    if None in blocks:
        return None
    before, after = (cdiv(count or 0, explanation.resident_blocks) for count in blocks)
    return after > before


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
