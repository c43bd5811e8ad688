"""Finds the cause of a step in the time between two neighbouring sizes: `cause_of`, called by `cliffs`.

It asks in this order: did the clock fall? did the library change kernel? did rows lose their alignment? does the number
of waves, or of tiles, rise? does the working set outgrow the cache? The first effect that is large enough to make up
the step is its cause. Recorded kernels are used where there are any, arithmetic otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from quantbench.analysis.blocks import TileInUse, num_blocks, padded, parts_to_fill, row_alignment_bytes
from quantbench.analysis.periods import TileOf
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.errors import require_choice
from quantbench.launch import Launch
from quantbench.quantization import alignment_words, cdiv, kernel_change_words, padding_words
from quantbench.units import percent, size

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
