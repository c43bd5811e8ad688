"""Determines why one size takes longer than another, or why a size runs below peak.

`cause_of` explains a step of a curve. It checks the possible causes in a fixed order, and returns
the first that applies: lower clock, changed kernel, lost alignment, more waves or tiles, padding,
working set larger than the cache. Clock, waves, tiles and padding apply only if they explain at
least half of the step. `cause_of_loss` explains a low rate where the curve has no step, and
`idle_at` explains why a single point runs below peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from operator import attrgetter

from quantbench.analysis.blocks import (
    Cause,
    TileInUse,
    idle_reasons,
    largest_split_k,
    num_blocks,
    num_waves,
    padded,
    row_alignment_bytes,
)
from quantbench.analysis.periods import TileOf
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Launch
from quantbench.providers.catalog import UNPADDED
from quantbench.quantization import (
    alignment_words,
    cdiv,
    kernel_change_words,
    padding_words,
    variant_words,
)
from quantbench.units import percent, size
from quantbench.workload import Softmax

# Minimum fraction of a step's log height that an effect must explain to be its cause.
_SMALLEST_SHARE = 0.5
# The fields in which two tiles must agree to divide the work in the same way.
_SIDES_AND_SPLIT = attrgetter("block_m", "block_n", "split_k")
# The time rises gradually while the working set grows past the cache size. For a memory boundary,
# the faster side's working set must be below this factor times the cache size, and the slower
# side's above the cache size divided by this factor.
_CACHE_MARGIN = 1.15
# If lost alignment causes a step up, the time drops again at a later point with restored alignment.
# Up to _LOOK_AHEAD points after the step are searched for such a drop. The search ends at the first
# point with more than _LITTLE_MORE_WORK times the work of the point before the step.
_LOOK_AHEAD = 8
_LITTLE_MORE_WORK = 1.1


@dataclass(frozen=True)
class CurveStep:
    """A step of a curve between the points `index` and `index + 1`.

    log_jump: rise of the log time at the step, beyond the trend; negative if the time falls.
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

    def follows(self, before: float, after: float) -> bool:
        """Returns whether the growth of a quantity explains at least half of the step.

        before, after: the quantity on each side of the step. The time is taken to be proportional
            to this quantity.
        """
        return log(after / before) / self.log_jump >= _SMALLEST_SHARE


def cause_of(step: CurveStep, spec: DeviceSpec, tile_of: TileOf) -> Cause:
    """Determines the cause of one step up or down; `unexplained` if no cause applies.

    tile_of: function that maps a point to its tile (see `periods.tile_finder`).
    """
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
    """Returns the tiles before and after the step; None for a tile that is unknown.

    If the kernel was recorded on one side only, its tile is assumed on the other side too, provided
    that the next recorded kernel beyond the other side is the same. Otherwise both tiles are
    unknown, because the block counts of two different tiles must not be compared.
    """
    old = tile_of(step.before)
    new = tile_of(step.after)
    if old is None or new is None or old.identified == new.identified:
        return old, new
    if old.identified:
        beyond = step.points[step.index + 2 :]
        named = step.before
    else:
        beyond = step.points[: step.index][::-1]
        named = step.after
    other = next((point.launch for point in beyond if point.launch is not None), None)
    if named.launch is None or other is None or not _same_kernel(named.launch, other):
        return None, None
    if old.identified:
        return old, replace(old, source="assumed")
    return replace(new, source="assumed"), new


def _throttling(step: CurveStep) -> Cause | None:
    """Returns the cause `throttling` if a change in the SM clock explains the step."""
    old = step.before.clock_mhz
    new = step.after.clock_mhz
    if not old or not new or not step.follows(new, old):
        return None
    return Cause("throttling", f"the SM clock went from {old:.0f} to {new:.0f} MHz", "clock")


def _kernel_change(step: CurveStep) -> Cause | None:
    """Returns the cause `kernel change` if different kernels were recorded on the two sides."""
    old = step.before.launch
    new = step.after.launch
    if old is None or new is None or _same_kernel(old, new):
        return None
    words = kernel_change_words(old, new)
    # Libraries must change the kernel if the alignment falls below 16 bytes, but not below 128.
    misaligned = _misaligned(step, (16,))
    if misaligned is not None:
        words += f", as {misaligned[1]}"
    elif variant_words(old, new):
        words += _specialised_words(step)
    return Cause("kernel change", words, "identity")


# Triton compiles one variant of a kernel for integer arguments that are multiples of 16, and
# another for the rest. Source: Triton 3.7, backends/compiler.py, get_int_specialization.
def _specialised_words(step: CurveStep) -> str:
    """Names the first size that is a multiple of 16 on one side of a step only; "" if none is."""
    sizes = vars(step.before.workload)
    for name, after in vars(step.after.workload).items():
        before = sizes[name]
        if isinstance(after, int) and bool(before % 16) != bool(after % 16):
            odd = after if after % 16 else before
            return f" (Triton: {name} = {odd} is no multiple of 16)"
    return ""


def _same_kernel(old: Launch, new: Launch) -> bool:
    """Returns whether two launches run the same compiled kernel with the same tile and split_k."""
    if variant_words(old, new):
        return False
    if old.kernel != new.kernel or old.tile is None or new.tile is None:
        return old.kernel == new.kernel and old.tile is new.tile
    return _SIDES_AND_SPLIT(old.tile) == _SIDES_AND_SPLIT(new.tile)


def _misaligned(step: CurveStep, limits: Sequence[int] = (16, 128)) -> tuple[int, str] | None:
    """Returns the alignment that only the faster side of a step has, and a description of the loss.

    At a step up, the faster side is the one before the step. Returns None if the slower side has
    all alignments in `limits` that the faster side has.

    limits: row alignments to check, in bytes; the first one that is lost is returned.
    """
    verb = "are"
    whole = row_alignment_bytes(step.before.workload) or 0
    broken = row_alignment_bytes(step.after.workload) or 0
    if step.log_jump <= 0:
        verb = "were"
        whole, broken = broken, whole
    for needed in limits:
        if broken and broken < needed <= whole:
            return needed, alignment_words(broken, needed, verb=verb)
    return None


def _alignment(step: CurveStep, tile_of: TileOf) -> Cause | None:
    """Returns the cause `alignment` if the slower side lost an alignment that its kernel needs."""
    misaligned = _misaligned(step)
    if misaligned is None:
        return None
    needed, words = misaligned
    drops = _drops_back(step, tile_of)
    if drops is None:  # no later point shows it: every kernel needs 16 bytes, but few need 128
        drops = needed == 16
    return Cause("alignment", words, "arithmetic") if drops else None


def _drops_back(step: CurveStep, tile_of: TileOf) -> bool | None:
    """Returns whether the time drops back at the next point with restored alignment.

    The point must need as many waves as the point after the step. The time drops back if less than
    half of the step remains at this point. Returns None if there is no such point nearby, or if the
    step goes down.
    """
    if step.log_jump < 0:
        return None
    whole = row_alignment_bytes(step.before.workload)
    waves = _waves(step.after, tile_of)
    most_flops = step.before.workload.flops * _LITTLE_MORE_WORK
    for point in step.points[step.index + 2 : step.index + 2 + _LOOK_AHEAD]:
        if point.workload.flops > most_flops:
            break
        if row_alignment_bytes(point.workload) == whole and _waves(point, tile_of) == waves:
            return log(point.latency_us / step.before.latency_us) < step.log_jump / 2
    return None


def _waves(point: Point, tile_of: TileOf) -> int | None:
    """Returns the number of waves that a point runs in; None if it is unknown."""
    used = tile_of(point)
    return None if used is None else num_waves(point.workload, used.tile, used.resident_blocks)


def _more_blocks(step: CurveStep, old: TileInUse, new: TileInUse, evidence: str) -> Cause | None:
    """Returns the wave edge or tile edge that explains the step; None if neither does.

    old, new: tiles before and after the step.
    evidence: evidence of the cause (see `Cause`).
    """
    before = num_blocks(step.before.workload, old.tile)
    after = num_blocks(step.after.workload, new.tile)
    if before is None or after is None or (before < after) != (step.log_jump > 0):
        return None
    waves_before = cdiv(before, old.resident_blocks)
    waves = cdiv(after, new.resident_blocks)
    if new.waves and step.follows(waves_before, waves):
        last = (after - (waves - 1) * new.resident_blocks) / new.resident_blocks
        words = f"{new.words}: {waves_before} to {waves} waves, the last {percent(last)} full"
        return Cause("wave edge", words, evidence)
    one_wave = waves_before == waves == 1
    found = _split_blocks(step, before, after, new) if one_wave else None
    if found is not None:
        return found
    # More tiles in the same number of waves cost no time. There is one exception: the tiles of a
    # single wave compete for memory bandwidth.
    if (one_wave or not new.waves) and step.follows(before, after):
        where = " within one wave" if new.waves else ""
        return Cause("tile edge", f"{new.words}: {before} to {after} tiles{where}", evidence)
    return None


def _split_blocks(step: CurveStep, before: int, after: int, used: TileInUse) -> Cause | None:
    """Returns a wave edge of split tiles if it explains the step, else None.

    If the tiles fill at most half a wave, libraries split each tile to use more SMs. The slices may
    need a second wave at a size where whole tiles would not. docs/choosing-shapes.md shows measured
    steps.

    before, after: number of tiles on each side of the step.
    used: tile after the step. Only a tile that was inferred from the steps is taken to be split.
    """
    parts = largest_split_k(min(before, after), used.resident_blocks)
    if used.source != "steps" or not used.waves or parts == 1:
        return None
    before *= parts
    after *= parts
    waves_before = cdiv(before, used.resident_blocks)
    waves = cdiv(after, used.resident_blocks)
    if not step.follows(waves_before, waves):
        return None
    split = f"{used.words}, each split into {parts} to use all SMs (narrower tiles or split-k)"
    words = f"{split}: {before} to {after} blocks, {waves_before} to {waves} waves"
    return Cause("wave edge", words, "arithmetic")


def _padding(step: CurveStep) -> Cause | None:
    """Returns the tile edge from a dimension's padding if it explains the step, else None.

    Only softmax and attention kernels pad here; `_more_blocks` covers the tiles of GEMMs.
    """
    old = padded(step.before.workload)
    new = padded(step.after.workload)
    if old is None or new is None:
        return None
    _, size_before, padded_before = old
    name, size_after, padded_after = new
    if not step.follows(padded_before, padded_after):
        return None
    words = padding_words(name, size_after, padded_after)
    return Cause("tile edge", f"{words}, {size_before} to {padded_before}", "arithmetic")


def _memory(step: CurveStep, spec: DeviceSpec) -> Cause | None:
    """Returns the cause `memory boundary` if the working set outgrows the last-level cache."""
    small = step.before.workload.min_bytes
    large = step.after.workload.min_bytes
    if step.log_jump < 0:
        small, large = large, small
    fits = small < spec.l2_bytes * _CACHE_MARGIN
    if small >= large or not fits or large <= spec.l2_bytes / _CACHE_MARGIN:
        return None
    words = (
        f"the working set grows to {size(large)}, the last-level cache holds {size(spec.l2_bytes)}"
    )
    return Cause("memory boundary", words, "arithmetic")


def idle_at(point: Point, spec: DeviceSpec, tile_of: TileOf) -> tuple[Cause, ...]:
    """Returns the reasons why a point runs below peak (see `blocks.idle_reasons`)."""
    return idle_reasons(point.workload, spec, tile_of(point), point.peak_share)


def cause_of_loss(slow: Point, better: Point, spec: DeviceSpec, tile_of: TileOf) -> Cause:
    """Determines why an op has a lower rate at one size than at a better size.

    The caller has found no cliff that explains the loss. The cause is a changed kernel, or else the
    first reason for idle SMs or misaligned rows that only the slow size has. Assumed tiles are not
    used.
    """
    changed = _kernel_change(CurveStep((better, slow), 0, 1.0))
    if changed is not None:
        return changed
    if known(tile_of(slow)) and known(tile_of(better)):
        there = idle_at(better, spec, tile_of)
        for cause in idle_at(slow, spec, tile_of):
            if cause not in there:
                return cause
    return Cause("unexplained", "unexplained", "arithmetic")


def known(used: TileInUse | None) -> bool:
    """Returns whether a tile was recorded, declared or inferred from the steps.

    An assumed tile is not known.
    """
    return used is not None and used.source != "assumed"
