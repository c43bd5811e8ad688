"""Finds pairs of measurements that differ in what a rule of thumb is about, and in as little else as possible.

`rules` names a finder for each rule: `multiples`, `halves`, `whole_waves` and `fallbacks` pair single ops, `best_value`
and `doublings` pair whole layers. A finder returns its pairs, or in words why there are none. Effects are ratios of
time per unit of useful work, rule broken over rule kept: above 1 the rule pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import hypot, log
from operator import attrgetter

import numpy as np

from quantbench.analysis.blocks import TileInUse, compute_bound, num_blocks, padded, row_alignment_bytes
from quantbench.analysis.cliffs import useful_work
from quantbench.analysis.curves import COARSE, LEAST_ERROR, MEDIAN_FACTOR, Family, FittedCurve
from quantbench.analysis.periods import TileOf
from quantbench.analysis.summary import Point, counted
from quantbench.device.spec import DeviceSpec
from quantbench.quantization import quantize
from quantbench.sweep.axes import LINEAR_OPS
from quantbench.workload import Gemm, Softmax

# On the edge of a range a size has neighbours on one side only; they count when they are this close.
_VERY_NEAR = 0.02
# A last wave at least this full counts as whole.
_WHOLE = 0.9

#: the provider that computes softmax as Megatron does where its fused kernel refuses
FALLBACK = "torch.eager"


@dataclass(frozen=True)
class RulePair:
    """Two measurements, one that keeps a rule and one that breaks it.

    keys: the records behind the pair.
    log_effect: logarithm of the time per unit of work, broken over kept.
    standard_error: of log_effect.
    predicted: what tiles and waves alone would make log_effect; None where the tile is not known.
    """

    keys: tuple[str, ...]
    log_effect: float
    standard_error: float
    predicted: float | None = None


@dataclass(frozen=True)
class Material:
    """What the finders search: the points and fitted curves of a run.

    tile_of: the tiles of each family (`periods.tile_finder`).
    """

    points: Sequence[Point]
    fitted: Sequence[FittedCurve]
    spec: DeviceSpec
    tile_of: Callable[[Family], TileOf]

    def along(self, axis: str) -> list[FittedCurve]:
        """Curves along one axis."""
        return [one for one in self.fitted if one.curve.axis == axis]

    @cached_property
    def _sigma(self) -> dict[int, float]:
        return {
            id(point): float(sigma)
            for one in self.fitted
            for point, sigma in zip(one.curve.points, one.sigma, strict=True)
        }

    def sigma(self, point: Point) -> float:
        """Standard error of a point's log time; from its own samples where it lies on no curve."""
        own = MEDIAN_FACTOR * point.noise / float(np.sqrt(point.num_samples))
        return self._sigma.get(id(point), max(own, LEAST_ERROR))


#: pairs, or why there are none
PairsOrReason = list[RulePair] | str
PairFinder = Callable[[Material], PairsOrReason]


def log_cost(point: Point) -> float:
    """Logarithm of the time per unit of useful work."""
    return log(point.latency_us / useful_work(point.workload))


def multiples(
    axis: str,
    divisor: int | Callable[[DeviceSpec], int],
    *,
    alike: Sequence[int] = (),
    same_padding: bool = False,
    ops: Sequence[str] = (),
) -> PairFinder:
    """Each size that `divisor` divides against its nearest neighbours on both sides that it does not divide.

    On both sides, so that the trend along the axis cancels.

    alike: divisors that must divide both or neither, so that related rules do not interfere.
    same_padding: head_dim or columns must pad to the same size.
    ops: the ops that count; all where empty.
    """

    def find(material: Material) -> PairsOrReason:
        by = divisor if isinstance(divisor, int) else divisor(material.spec)
        curves = [one for one in material.along(axis) if not ops or one.curve.op.partition(".")[0] in ops]
        if not curves:
            return f"no curve along {axis.replace('_', '-')}" + (f" of {', '.join(ops)}" if ops else "")
        pairs = [pair for one in curves for pair in _around_multiples(one, by, alike, same_padding, material)]
        return (
            pairs or f"no neighbouring values of {axis.replace('_', '-')} with one a multiple of {by} and the other not"
        )

    return find


def _around_multiples(
    one: FittedCurve, by: int, alike: Sequence[int], same_padding: bool, material: Material
) -> Iterable[RulePair]:
    curve, sizes = one.curve, one.curve.sizes
    for i, size in enumerate(sizes):
        if size % by:
            continue

        def fits(j: int, size: int = size, i: int = i) -> bool:
            if sizes[j] % by == 0 or any((sizes[j] % d == 0) != (size % d == 0) for d in alike):
                return False
            pads = [padded(curve.points[k].workload) for k in (i, j)]
            return not same_padding or pads[0] is None or pads[0][2] == (pads[1] or pads[0])[2]

        below = next((j for j in _near(sizes, range(i - 1, -1, -1), size) if fits(j)), None)
        above = next((j for j in _near(sizes, range(i + 1, len(sizes)), size) if fits(j)), None)
        sides = [j for j in (below, above) if j is not None]
        if len(sides) == 2 or (sides and abs(log(sizes[sides[0]] / size)) <= _VERY_NEAR):
            yield _pair([curve.points[i]], [curve.points[j] for j in sides], material, curve.family)


def _near(sizes: Sequence[int], order: range, size: int) -> Iterable[int]:
    """Indices in `order` while their sizes are within COARSE of `size`."""
    return takewhile(lambda j: abs(log(sizes[j] / size)) <= COARSE, order)


def _pair(good: Sequence[Point], bad: Sequence[Point], material: Material, family: Family | None) -> RulePair:
    """The points that break the rule (geometric mean) against those that keep it."""
    effect = float(np.mean([log_cost(p) for p in bad]) - np.mean([log_cost(p) for p in good]))
    errors = [
        float(np.sqrt(sum(material.sigma(p) ** 2 for p in side))) / len(side)
        for side in (good, bad)
    ]  # fmt: skip
    predicted = None
    if family is not None:
        tile_of = material.tile_of(family)
        logs = [[_log_slots(point, tile_of(point)) for point in side] for side in (good, bad)]
        if all(value is not None for side in logs for value in side):
            predicted = float(np.mean(logs[1]) - np.mean(logs[0]))  # type: ignore[arg-type]
    return RulePair(tuple(p.key for p in (*good, *bad)), effect, hypot(*errors), predicted)


def _log_slots(point: Point, used: TileInUse | None) -> float | None:
    """Logarithm of the block slots × tile elements that a product occupies, per element it needs.

    None where its tile is not known; an assumed tile would only predict the assumption.
    """
    if used is None or used.source == "assumed" or not isinstance(point.workload, Gemm):
        return None
    return -log(quantize(point.workload, used.tile, max(1, used.resident_blocks if used.waves else 1)).efficiency)


def halves(axis: str) -> PairFinder:
    """Along `axis`, each size against half of it: what a product loses when a dimension is split once more."""

    def find(material: Material) -> PairsOrReason:
        pairs = []
        for one in material.along(axis):
            at = dict(zip(one.curve.sizes, one.curve.points, strict=True))
            for size, whole in at.items():
                half = at.get(size // 2) if size % 2 == 0 else None
                if (
                    half is not None
                    and isinstance(whole.workload, Gemm)
                    and compute_bound(half.workload, material.spec)
                ):
                    pairs.append(_pair([whole], [half], material, one.curve.family))
        return pairs or f"no product measured at both a value of {axis} and half of it"

    return find


def whole_waves(material: Material) -> PairsOrReason:
    """Neighbours around a wave's end: the last wave full, and a new one begun. Same kernel and alignment."""
    pairs, known = [], False
    for one in material.fitted:
        tile_of = material.tile_of(one.curve.family)
        uses = [tile_of(point) for point in one.curve.points]
        known = known or any(used is not None and used.source != "assumed" and used.waves for used in uses)
        for i in one.curve.close_gaps:
            before, after = one.curve.points[i], one.curve.points[i + 1]
            if _ends_a_wave(before, uses[i], after, uses[i + 1]):
                pairs.append(_pair([before], [after], material, one.curve.family))
    if not pairs and not known:
        return "the tile is not known: no kernel was recorded, and the steps do not identify one"
    return pairs or "no neighbouring sizes with a full last wave before and a new wave after"


def _ends_a_wave(before: Point, used: TileInUse | None, after: Point, used_after: TileInUse | None) -> bool:
    if used is None or used_after is None or used.source == "assumed" or not used.waves:
        return False
    if (used.tile, used.resident_blocks) != (used_after.tile, used_after.resident_blocks):
        return False
    blocks = num_blocks(before.workload, used.tile), num_blocks(after.workload, used.tile)
    if blocks[0] is None or blocks[1] is None:
        return False
    full = (blocks[0] - 1) % used.resident_blocks + 1
    crossed = (blocks[1] - 1) // used.resident_blocks > (blocks[0] - 1) // used.resident_blocks
    # Whole cache lines are a nicety; rows below 16 bytes are another kernel.
    alike = _whole_loads(before) == _whole_loads(after)
    return crossed and alike and full >= _WHOLE * used.resident_blocks


def _whole_loads(point: Point) -> bool:
    return (row_alignment_bytes(point.workload) or 0) >= 16


def fallbacks(
    keeps: Callable[[Softmax], bool], breaks: Callable[[Softmax], bool], *, same: Sequence[str], what: str
) -> PairFinder:
    """The fused softmax where the rule is kept against the fallback at the nearest size where it is broken.

    same: fields that must be equal.
    what: what the sizes that break the rule are, in words.
    """

    def find(material: Material) -> PairsOrReason:
        points = [(p, p.workload) for p in material.points if isinstance(p.workload, Softmax)]
        if not points:
            return "no softmax was measured"
        good = [(p, work) for p, work in points if p.provider != FALLBACK and keeps(work)]
        bad = [(p, work) for p, work in points if p.provider == FALLBACK and breaks(work)]
        if not good or not bad:
            missing = f"the fallback with {what}" if good else "a fused softmax where the rule is kept"
            return f"not measured: {missing}"
        pairs = []
        fixed = attrgetter(*same, "dtype", "mask", "direction")
        for point, work in bad:
            alike = [(abs(log(w.live_elements / work.live_elements)), p) for p, w in good if fixed(w) == fixed(work)]
            if alike:
                _, nearest = min(alike, key=lambda pair: pair[0])
                pairs.append(_pair([nearest], [point], material, None))
        return pairs or f"no pair of softmax with the same {', '.join(same)}, one fused and one {what}"

    return find


def first_of(*finders: PairFinder) -> PairFinder:
    """The first finder's pairs, or those of the next that finds any; the first one's reason where none does."""

    def find(material: Material) -> PairsOrReason:
        results = [finder(material) for finder in finders]
        return next((found for found in results if not isinstance(found, str)), results[0])

    return find


@dataclass(frozen=True)
class _Layer:
    """All ops of one place together.

    log_cost: logarithm of time per unit of work.
    sigma: standard error of log_cost.
    """

    keys: tuple[str, ...]
    log_cost: float
    sigma: float


def _layers(material: Material, axis: str) -> list[dict[int, _Layer]]:
    """For each setting of the other axes: layers by value of `axis`, each op by its fastest provider.

    Only ops that were measured at every value count. Without a linear product among them they are not a layer.
    """
    groups: dict[tuple[object, ...], dict[int, dict[str, Point]]] = {}
    for point in material.points:
        if axis in point.axes:
            held = tuple((name, value) for name, value in point.axes.items() if name != axis)
            ops = groups.setdefault((held, point.workload.dtype), {}).setdefault(point.axes[axis], {})
            seen = ops.get(point.op)
            if seen is None or point.latency_us < seen.latency_us:
                ops[point.op] = point
    found = []
    for by_value in groups.values():
        common = counted(set.intersection(*(set(ops) for ops in by_value.values())))
        if any(name.partition(".")[0] in LINEAR_OPS for name in common):
            layers = {v: _layer([ops[name] for name in common], material) for v, ops in by_value.items()}
            found.append(layers)
    return found


def _layer(points: Sequence[Point], material: Material) -> _Layer:
    times = [p.latency_us * p.count for p in points]
    work = sum(useful_work(p.workload) * p.count for p in points)
    error = float(np.sqrt(sum((t * material.sigma(p)) ** 2 for t, p in zip(times, points, strict=True)))) / sum(times)
    return _Layer(tuple(p.key for p in points), log(sum(times) / work), error)


def best_value(axis: str, value: int) -> PairFinder:
    """Whole layers at `value` of `axis` against the fastest other value."""

    def find(material: Material) -> PairsOrReason:
        groups = [layers for layers in _layers(material, axis) if value in layers and len(layers) > 1]
        if not groups:
            return f"no layer at {axis} = {value} with other values to compare"
        by_rival: dict[int, list[RulePair]] = {}
        for layers in groups:
            for rival in layers.keys() - {value}:
                by_rival.setdefault(rival, []).append(_between(layers[value], layers[rival]))
        return min(by_rival.values(), key=lambda pairs: float(np.mean([pair.log_effect for pair in pairs])))

    return find


def doublings(axis: str) -> PairFinder:
    """Whole layers at each value of `axis` against twice that value."""

    def find(material: Material) -> PairsOrReason:
        pairs = [
            _between(layers[value], layers[2 * value])
            for layers in _layers(material, axis)
            for value in layers
            if 2 * value in layers
        ]
        return pairs or f"no layer measured at both a value of {axis} and twice that"

    return find


def _between(good: _Layer, bad: _Layer) -> RulePair:
    return RulePair(good.keys + bad.keys, bad.log_cost - good.log_cost, hypot(good.sigma, bad.sigma))
