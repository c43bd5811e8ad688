"""Finds pairs of measurements that test a rule of thumb, for the verdicts of `rules`.

One measurement of a pair keeps the rule and the other breaks it, while everything else is similar.
The effect of the rule is cost(rule broken) / cost(rule kept), where cost is the time per unit of
useful work. An effect above 1 means that the rule helps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import hypot, log, sqrt
from operator import attrgetter
from statistics import fmean

import numpy as np

from quantbench.analysis.blocks import (
    TileInUse,
    compute_bound,
    num_blocks,
    num_waves,
    padded,
    row_alignment_bytes,
)
from quantbench.analysis.curves import COARSE, LEAST_ERROR, MEDIAN_FACTOR, FittedCurve
from quantbench.analysis.periods import TileOf
from quantbench.analysis.summary import Point, counted, held_of, useful_work
from quantbench.device.spec import DeviceSpec
from quantbench.megatron import megatron_fused_available
from quantbench.quantization import quantize
from quantbench.sweep.sizes import LINEAR_OPS
from quantbench.units import dashed
from quantbench.workload import Gemm, Softmax

# A size at the end of a range has neighbours on one side only, so the trend does not cancel. Such a
# size is used only if its neighbour is within this distance in log size, where the trend is small.
_VERY_NEAR = 0.02
# A last wave counts as full if it fills at least this fraction of the resident blocks.
_WHOLE = 0.9

#: provider of the unfused softmax; Megatron-LM runs this fallback if its fused kernel does not
#: support the shape
FALLBACK = "torch.eager"


@dataclass(frozen=True)
class RulePair:
    """A measurement that keeps a rule, compared with measurements that break it.

    keys: keys of all records that were compared.
    log_effect: log of the effect: log cost with the rule broken − log cost with the rule kept. Cost
        is the time per unit of useful work.
    standard_error: standard error of log_effect.
    predicted: log_effect computed from tiles and waves alone; None if a tile is unknown.
    """

    keys: tuple[str, ...]
    log_effect: float
    standard_error: float
    predicted: float | None = None


@dataclass(frozen=True)
class RunData:
    """The points and fitted curves of a run, in which the pair finders search.

    tile_of: function that maps a point to its tile (see `periods.tile_finder`).
    """

    points: Sequence[Point]
    fitted: Sequence[FittedCurve]
    spec: DeviceSpec
    tile_of: TileOf

    def along(self, axis: str) -> list[FittedCurve]:
        """Returns the fitted curves along one axis."""
        return [one for one in self.fitted if one.curve.axis == axis]

    @cached_property
    def _sigma(self) -> dict[int, float]:
        """Standard error of each point's log time, by Python id, for points on curves."""
        found: dict[int, float] = {}
        for one in self.fitted:
            found.update(zip(map(id, one.curve.points), one.sigma.tolist(), strict=True))
        return found

    def sigma(self, point: Point) -> float:
        """Returns the standard error of a point's log time.

        If the point is on no curve, the standard error is computed from the point's samples alone.
        """
        own = MEDIAN_FACTOR * point.noise / float(np.sqrt(point.num_samples))
        return self._sigma.get(id(point), max(own, LEAST_ERROR))


#: the pairs that test a rule, or the reason why there are none
PairsOrReason = list[RulePair] | str
PairFinder = Callable[[RunData], PairsOrReason]


def log_cost(point: Point) -> float:
    """Returns the logarithm of the time per unit of useful work."""
    return log(point.latency_us / useful_work(point.workload))


def multiples(
    material: RunData,
    axis: str,
    divisor: int | Callable[[DeviceSpec], int],
    *,
    alike: Sequence[int] = (),
    same_padding: bool = False,
    ops: Sequence[str] = (),
    size_of: Callable[[Point], int] | None = None,
) -> PairsOrReason:
    """Compares each multiple of `divisor` with the nearest smaller and larger non-multiples.

    The mean over both sides cancels the trend along the axis.

    divisor: number, or function that returns the number for a device.
    alike: further divisors. Each must divide all compared sizes or none, so that related rules do
        not interfere.
    same_padding: whether the kernel must pad head_dim or columns of all compared points to the same
        size.
    ops: names of the forward ops to use, together with their gradients; default all ops.
    size_of: function that maps a point to the size that the rule is about, or to 0 if the point has
        no such size, so that its curve is skipped; default the point's value on the axis.
    """
    by = divisor if isinstance(divisor, int) else divisor(material.spec)
    reason = f"no curve along {dashed(axis)}"
    if ops:
        reason += f" of {', '.join(ops)}"
    pairs = []
    for one in material.along(axis):
        points = one.curve.points
        if ops and one.curve.op.partition(".")[0] not in ops:
            continue
        sizes = one.curve.sizes if size_of is None else list(map(size_of, points))
        reason = f"no neighbouring values of {dashed(axis)} with one a multiple of {by}"
        reason += " and the other not"
        sized = [_Sized(*pair) for pair in zip(sizes, points, strict=True)]
        if not all(sizes):
            continue
        for i, kept in enumerate(sized):
            if kept.size % by:
                continue
            below = _nearest(kept, sized[:i][::-1], by, alike, same_padding)
            above = _nearest(kept, sized[i + 1 :], by, alike, same_padding)
            sides = [side for side in (below, above) if side is not None]
            if len(sides) == 2 or (sides and kept.away(sides[0]) <= _VERY_NEAR):
                pairs.append(_pair(kept.point, [side.point for side in sides], material))
    return pairs or reason


@dataclass(frozen=True)
class _Sized:
    """A point, and the size of this point that a rule on multiples is about."""

    size: int
    point: Point

    def away(self, other: _Sized) -> float:
        """Returns the distance between two sizes, in log size."""
        return abs(log(other.size / self.size))


def _nearest(
    kept: _Sized, others: Sequence[_Sized], by: int, alike: Sequence[int], same_padding: bool
) -> _Sized | None:
    """Returns the first of `others` that breaks the rule and is otherwise like `kept`.

    Returns None if there is none within COARSE, in log size.

    others: points on one side of `kept`, nearest first.
    by: divisor of the rule.
    alike, same_padding: see `multiples`.
    """
    pads = padded(kept.point.workload) if same_padding else None
    for other in takewhile(lambda one: kept.away(one) <= COARSE, others):
        if other.size % by == 0:
            continue
        if any((other.size % one == 0) != (kept.size % one == 0) for one in alike):
            continue
        if pads is None or pads[2] == (padded(other.point.workload) or pads)[2]:
            return other
    return None


def _pair(kept: Point, broken: Sequence[Point], material: RunData) -> RulePair:
    """Compares the point that keeps the rule with the geometric mean of those that break it."""
    effect = float(np.mean(list(map(log_cost, broken))) - log_cost(kept))
    error = sqrt(sum(material.sigma(point) ** 2 for point in broken)) / len(broken)
    predicted = None
    kept_slots = _log_padded_work(kept, material.tile_of(kept))
    slots = [_log_padded_work(point, material.tile_of(point)) for point in broken]
    known = [one for one in slots if one is not None]
    if kept_slots is not None and len(known) == len(broken):
        predicted = float(np.mean(known) - kept_slots)
    keys = (kept.key, *(point.key for point in broken))
    return RulePair(keys, effect, hypot(material.sigma(kept), error), predicted)


def _log_padded_work(point: Point, used: TileInUse | None) -> float | None:
    """Returns the log of a GEMM's slowdown by padding and idle SMs, from arithmetic.

    The slowdown is (output elements that fit into all waves) / (output elements). Returns None for
    other workloads, and if the tile is unknown or only assumed.
    """
    if used is None or used.source == "assumed" or not isinstance(point.workload, Gemm):
        return None
    # Without waves, only the padding to whole tiles counts.
    resident = max(1, used.resident_blocks) if used.waves else 1
    return -log(quantize(point.workload, used.tile, resident).efficiency)


def halves(material: RunData, axis: str) -> PairsOrReason:
    """Compares GEMMs at each size along `axis` with compute-bound GEMMs at half that size."""
    pairs = []
    for one in material.along(axis):
        at = dict(zip(one.curve.sizes, one.curve.points, strict=True))
        for size, whole in at.items():
            half = at.get(size // 2)
            if half is None or size % 2 or not isinstance(whole.workload, Gemm):
                continue
            if compute_bound(half.workload, material.spec):
                pairs.append(_pair(whole, [half], material))
    return pairs or f"no product measured at both a value of {axis} and half of it"


def whole_waves(material: RunData) -> PairsOrReason:
    """Compares neighbouring sizes of a curve that run the same tile and differ in their waves.

    The smaller size keeps the rule: it fills its last wave to at least 90 %. The larger size breaks
    the rule: it begins another wave.
    """
    pairs = []
    reason = "the tile is not known: no kernel was recorded, and the steps do not identify one"
    for one in material.fitted:
        points = one.curve.points
        uses = list(map(material.tile_of, points))
        if any(used is not None and used.source != "assumed" and used.waves for used in uses):
            reason = "no neighbouring sizes with a full last wave before and a new wave after"
        for i in one.curve.close_gaps:
            if _ends_a_wave(points[i], uses[i], points[i + 1], uses[i + 1]):
                pairs.append(_pair(points[i], [points[i + 1]], material))
    return pairs or reason


def _ends_a_wave(
    before: Point, used: TileInUse | None, after: Point, used_after: TileInUse | None
) -> bool:
    """Returns whether `before` fills its last wave and `after` needs another wave.

    used, used_after: tiles of the two points. They must be equal, and not only assumed.
    """
    if used is None or used_after is None or used.source == "assumed" or not used.waves:
        return False
    if (used.tile, used.resident_blocks) != (used_after.tile, used_after.resident_blocks):
        return False
    blocks = num_blocks(before.workload, used.tile)
    waves_after = num_waves(after.workload, used.tile, used.resident_blocks)
    if blocks is None or waves_after is None:
        return False
    # Number of waves before the last one, and the index of the last block within the last wave.
    waves, last = divmod(blocks - 1, used.resident_blocks)
    full = last + 1 >= _WHOLE * used.resident_blocks
    aligned = row_alignment_bytes(before.workload) == row_alignment_bytes(after.workload)
    return full and waves_after > waves + 1 and aligned


def fallbacks(
    material: RunData, breaks: Callable[[Softmax], bool], *, same: Sequence[str], what: str
) -> PairsOrReason:
    """Compares each fallback softmax that breaks a rule with the nearest fused softmax.

    The fallback is the unfused softmax that Megatron-LM runs where its fused kernel does not
    support the shape. The nearest softmax is the one with the most similar number of elements.

    breaks: function that returns whether a softmax breaks the rule.
    same: names of the fields that must be equal in a pair.
    what: description, for messages, of the sizes that break the rule.
    """
    # Softmaxes of the fused kernel, by the properties in which the two points of a pair must agree.
    kept: dict[tuple[object, ...], list[tuple[Point, Softmax]]] = defaultdict(list)
    broken: list[tuple[Point, Softmax]] = []
    reason = "no softmax was measured"
    fixed = attrgetter(*same, "dtype", "mask", "direction")
    for point in material.points:
        work = point.workload
        if not isinstance(work, Softmax):
            continue
        reason = "not measured: a fused softmax where the rule is kept"
        if point.provider != FALLBACK and _fused(work):
            kept[point.mode, *fixed(work)].append((point, work))
        elif point.provider == FALLBACK and breaks(work):
            broken.append((point, work))
    if kept and not broken:
        return f"not measured: the fallback with {what}"
    if not kept:
        return reason
    pairs = []
    for point, work in broken:
        alike = kept.get((point.mode, *fixed(work)))
        if alike:
            elements = work.unmasked_elements
            nearest, _ = min(alike, key=lambda one: abs(log(one[1].unmasked_elements / elements)))
            pairs.append(_pair(nearest, [point], material))
    return pairs or f"no pair of softmax with the same {', '.join(same)}, one fused and one {what}"


def _fused(work: Softmax) -> bool:
    """Returns whether Megatron-LM's fused kernel supports a softmax."""
    heads = work.batch // work.mask_batch
    return megatron_fused_available(
        sq=work.rows,
        sk=work.cols,
        heads_per_gpu=heads,
        mbs=work.mask_batch,
        dtype=work.dtype,
        mask=work.mask,
    ).available


def first_of(material: RunData, finders: Sequence[PairFinder]) -> PairsOrReason:
    """Returns the pairs from the first finder that finds some.

    If no finder finds pairs, returns the reason that the first finder gives.
    """
    results = [finder(material) for finder in finders]
    return next(filter(lambda found: not isinstance(found, str), results), results[0])


@dataclass(frozen=True)
class _Layer:
    """Sum over the ops of a layer at one grid point.

    keys: record keys of the ops.
    log_cost: log of the layer's time per unit of useful work.
    sigma: standard error of log_cost.
    """

    keys: tuple[str, ...]
    log_cost: float
    sigma: float


def _layers(material: RunData, axis: str) -> list[dict[int, _Layer]]:
    """Returns whole layers by their value of `axis`, in one mapping per setting of the other axes.

    Each op is taken from its fastest provider. An op is summed only if it was measured at every
    value of the axis, always in the same timing mode. A setting without a linear op among the
    summed ops is skipped.
    """
    groups: dict[tuple[object, ...], dict[int, dict[str, Point]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    # The fastest point of each op comes last, so it overwrites the others.
    for point in sorted(material.points, key=lambda p: -p.latency_us):
        if axis in point.axes:
            key = (held_of(point.axes, axis), point.workload.dtype)
            groups[key][point.axes[axis]][point.op] = point
    found = []
    for by_value in groups.values():
        everywhere = set.intersection(*map(set, by_value.values()))
        in_one_mode = []
        for op in everywhere:
            if len({ops[op].mode for ops in by_value.values()}) == 1:
                in_one_mode.append(op)
        common = counted(in_one_mode)
        if not any(name.partition(".")[0] in LINEAR_OPS for name in common):
            continue
        layers = {}
        for value, ops in by_value.items():
            layers[value] = _layer([ops[name] for name in common], material)
        found.append(layers)
    return found


def _layer(points: Sequence[Point], material: RunData) -> _Layer:
    """Sums the ops of one layer, given as one point per op."""
    total_us = sum(point.total_us for point in points)
    work = sum(useful_work(point.workload) * point.count for point in points)
    error = sqrt(sum((point.total_us * material.sigma(point)) ** 2 for point in points)) / total_us
    return _Layer(tuple(point.key for point in points), log(total_us / work), error)


def best_value(material: RunData, axis: str, value: int) -> PairsOrReason:
    """Compares whole layers at `value` of `axis` with layers at the best other value.

    The best other value has the lowest cost relative to `value`, on average over all settings of
    the other axes.
    """
    by_rival: dict[int, list[RulePair]] = defaultdict(list)
    for layers in _layers(material, axis):
        for rival in layers.keys() - {value} if value in layers else ():
            by_rival[rival].append(_between(layers[value], layers[rival]))
    if not by_rival:
        return f"no layer at {axis} = {value} with other values to compare"
    return min(by_rival.values(), key=lambda pairs: fmean(pair.log_effect for pair in pairs))


def doublings(material: RunData, axis: str) -> PairsOrReason:
    """Compares whole layers at each value of `axis` with layers at twice that value."""
    pairs = []
    for layers in _layers(material, axis):
        for value, layer in layers.items():
            if 2 * value in layers:
                pairs.append(_between(layer, layers[2 * value]))
    return pairs or f"no layer measured at both a value of {axis} and twice that"


def _between(kept: _Layer, broken: _Layer) -> RulePair:
    """Returns the pair of a layer that keeps the rule and a layer that breaks it."""
    error = hypot(kept.sigma, broken.sigma)
    return RulePair(kept.keys + broken.keys, broken.log_cost - kept.log_cost, error)
