"""Finds pairs of measurements that test a rule of thumb: one keeps the rule, one breaks it, all
else is similar.

A finder takes a `Material` and returns its pairs, or the reason why there are none. Effects are
ratios of time per unit of useful work, broken / kept: above 1, the rule helps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from math import hypot, log
from operator import attrgetter

import numpy as np

from quantbench.analysis.blocks import (
    TileInUse,
    compute_bound,
    num_blocks,
    padded,
    row_alignment_bytes,
)
from quantbench.analysis.curves import COARSE, LEAST_ERROR, MEDIAN_FACTOR, FittedCurve
from quantbench.analysis.periods import TileOf
from quantbench.analysis.summary import Point, counted, useful_work
from quantbench.device.spec import DeviceSpec
from quantbench.megatron import megatron_fused_available
from quantbench.quantization import quantize
from quantbench.sweep.sizes import LINEAR_OPS
from quantbench.workload import Gemm, Softmax

# A size with a neighbour on one side only (end of a range) counts if they are this close, in log
# size.
_VERY_NEAR = 0.02
# A last wave at least this full counts as whole.
_WHOLE = 0.9

#: provider of the unfused softmax, which Megatron runs if its fused kernel does not support the
#: shape
FALLBACK = "torch.eager"


@dataclass(frozen=True)
class RulePair:
    """Measurements that keep a rule, compared with measurements that break it.

    log_effect: log ratio of the times per unit of work, broken / kept.
    predicted: log_effect computed from tiles and waves alone; None if a tile is unknown.
    """

    keys: tuple[str, ...]
    log_effect: float
    standard_error: float
    predicted: float | None = None


@dataclass(frozen=True)
class Material:
    """Points and fitted curves of a run, as input of the finders.

    tile_of: function from a point to its tile (see `periods.tile_finder`).
    """

    points: Sequence[Point]
    fitted: Sequence[FittedCurve]
    spec: DeviceSpec
    tile_of: TileOf

    def along(self, axis: str) -> list[FittedCurve]:
        return [one for one in self.fitted if one.curve.axis == axis]

    @cached_property
    def _sigma(self) -> dict[int, float]:
        return {
            id(point): float(sigma)
            for one in self.fitted
            for point, sigma in zip(one.curve.points, one.sigma, strict=True)
        }

    def sigma(self, point: Point) -> float:
        """Returns the standard error of a point's log time; from its samples alone if it is on no
        curve.
        """
        own = MEDIAN_FACTOR * point.noise / float(np.sqrt(point.num_samples))
        return self._sigma.get(id(point), max(own, LEAST_ERROR))


#: pairs, or the reason why there are none
PairsOrReason = list[RulePair] | str
PairFinder = Callable[[Material], PairsOrReason]


def log_cost(point: Point) -> float:
    """Returns the logarithm of the time per unit of useful work."""
    return log(point.latency_us / useful_work(point.workload))


def multiples(
    material: Material,
    axis: str,
    divisor: int | Callable[[DeviceSpec], int],
    *,
    alike: Sequence[int] = (),
    same_padding: bool = False,
    ops: Sequence[str] = (),
    size_of: Callable[[Point], int] | None = None,
) -> PairsOrReason:
    """Compares multiples of `divisor` with the nearest other sizes on both sides.

    Using both sides cancels the trend along the axis.

    divisor: number, or function of the device.
    alike: divisors that must divide both sizes or neither, so that related rules do not interfere.
    same_padding: whether head_dim or columns must pad to the same size.
    ops: names of the ops to use; empty for all.
    size_of: size of a point that is to be a multiple, 0 for points without; None for its value on
        the axis.
    """
    by = divisor if isinstance(divisor, int) else divisor(material.spec)
    curves = [
        one for one in material.along(axis) if not ops or one.curve.op.partition(".")[0] in ops
    ]
    if not curves:
        return f"no curve along {axis.replace('_', '-')}" + (f" of {', '.join(ops)}" if ops else "")
    found = (_around_multiples(one, by, alike, same_padding, material, size_of) for one in curves)
    pairs = [pair for own in found for pair in own]
    return (
        pairs
        or f"no neighbouring values of {axis.replace('_', '-')} with one a multiple of {by} and the other not"
    )


def _around_multiples(
    one: FittedCurve,
    by: int,
    alike: Sequence[int],
    same_padding: bool,
    material: Material,
    size_of: Callable[[Point], int] | None,
) -> Iterable[RulePair]:
    curve = one.curve
    sizes = curve.sizes if size_of is None else tuple(map(size_of, curve.points))
    if not all(sizes):
        return
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
            yield _pair([curve.points[i]], [curve.points[j] for j in sides], material)


def _near(sizes: Sequence[int], order: range, size: int) -> Iterable[int]:
    """Returns indices from `order` up to the first whose size is not within COARSE of `size`."""
    return takewhile(lambda j: abs(log(sizes[j] / size)) <= COARSE, order)


def _pair(good: Sequence[Point], bad: Sequence[Point], material: Material) -> RulePair:
    """Compares the geometric mean of the points that break the rule with that of those that keep
    it.
    """
    effect = float(np.mean([log_cost(p) for p in bad]) - np.mean([log_cost(p) for p in good]))
    errors = [
        float(np.sqrt(sum(material.sigma(p) ** 2 for p in side))) / len(side)
        for side in (good, bad)
    ]
    predicted = None
    logs = [[_log_slots(point, material.tile_of(point)) for point in side] for side in (good, bad)]
    if all(value is not None for side in logs for value in side):
        predicted = float(np.mean(logs[1]) - np.mean(logs[0]))  # type: ignore[arg-type]
    return RulePair(tuple(p.key for p in (*good, *bad)), effect, hypot(*errors), predicted)


def _log_slots(point: Point, used: TileInUse | None) -> float | None:
    """Returns the log of the tile elements in all occupied block slots per output element of a
    GEMM. None if its tile is unknown or only assumed."""
    if used is None or used.source == "assumed" or not isinstance(point.workload, Gemm):
        return None
    return -log(
        quantize(
            point.workload, used.tile, max(1, used.resident_blocks if used.waves else 1)
        ).efficiency
    )


def halves(material: Material, axis: str) -> PairsOrReason:
    """Compares compute-bound GEMMs at half a size with the full size along `axis`."""
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
                pairs.append(_pair([whole], [half], material))
    return pairs or f"no product measured at both a value of {axis} and half of it"


def whole_waves(material: Material) -> PairsOrReason:
    """Pairs neighbours with the same tile: a last wave at least 90 % full, and another wave
    begun.
    """
    pairs, known = [], False
    for one in material.fitted:
        uses = [material.tile_of(point) for point in one.curve.points]
        known = known or any(
            used is not None and used.source != "assumed" and used.waves for used in uses
        )
        for i in one.curve.close_gaps:
            before, after = one.curve.points[i], one.curve.points[i + 1]
            if _ends_a_wave(before, uses[i], after, uses[i + 1]):
                pairs.append(_pair([before], [after], material))
    if not pairs and not known:
        return "the tile is not known: no kernel was recorded, and the steps do not identify one"
    return pairs or "no neighbouring sizes with a full last wave before and a new wave after"


def _ends_a_wave(
    before: Point, used: TileInUse | None, after: Point, used_after: TileInUse | None
) -> bool:
    if used is None or used_after is None or used.source == "assumed" or not used.waves:
        return False
    if (used.tile, used.resident_blocks) != (used_after.tile, used_after.resident_blocks):
        return False
    blocks = num_blocks(before.workload, used.tile), num_blocks(after.workload, used.tile)
    if blocks[0] is None or blocks[1] is None:
        return False
    (waves, last), (waves_after, _) = (
        divmod(count - 1, used.resident_blocks) for count in blocks if count
    )
    # Rows aligned to less than 16 bytes use another kernel; cache lines matter less.
    whole, whole_after = (
        (row_alignment_bytes(point.workload) or 0) >= 16 for point in (before, after)
    )
    return (
        waves_after > waves and whole == whole_after and last + 1 >= _WHOLE * used.resident_blocks
    )


def fallbacks(
    material: Material, breaks: Callable[[Softmax], bool], *, same: Sequence[str], what: str
) -> PairsOrReason:
    """Compares fallback softmaxes that break a rule with the nearest softmax that Megatron fuses.

    breaks: condition on a workload.
    same: fields that must be equal.
    what: description of the sizes that break the rule.
    """
    points = [(p, p.workload) for p in material.points if isinstance(p.workload, Softmax)]
    if not points:
        return "no softmax was measured"
    good = [(p, work) for p, work in points if p.provider != FALLBACK and _fused(work)]
    bad = [(p, work) for p, work in points if p.provider == FALLBACK and breaks(work)]
    if not good or not bad:
        missing = f"the fallback with {what}" if good else "a fused softmax where the rule is kept"
        return f"not measured: {missing}"
    pairs = []
    fixed = attrgetter(*same, "dtype", "mask", "direction")
    for point, work in bad:
        alike = [
            (abs(log(w.live_elements / work.live_elements)), p)
            for p, w in good
            if p.mode == point.mode and fixed(w) == fixed(work)
        ]
        if alike:
            _, nearest = min(alike, key=lambda pair: pair[0])
            pairs.append(_pair([nearest], [point], material))
    return pairs or f"no pair of softmax with the same {', '.join(same)}, one fused and one {what}"


def _fused(work: Softmax) -> bool:
    heads = work.batch // work.mask_batch
    return megatron_fused_available(
        sq=work.rows,
        sk=work.cols,
        heads_per_gpu=heads,
        mbs=work.mask_batch,
        dtype=work.dtype,
        mask=work.mask,
    ).available


def first_of(material: Material, finders: Sequence[PairFinder]) -> PairsOrReason:
    """Returns the pairs of the first finder with any, else the first finder's reason."""
    results = [finder(material) for finder in finders]
    return next((found for found in results if not isinstance(found, str)), results[0])


@dataclass(frozen=True)
class _Layer:
    """Sum of the ops of a layer at one place. log_cost: log time per unit of work. sigma: its
    standard error.
    """

    keys: tuple[str, ...]
    log_cost: float
    sigma: float


def _layers(material: Material, axis: str) -> list[dict[int, _Layer]]:
    """Returns, for each setting of the other axes, layers by value of `axis`, with each op's
    fastest provider. Uses only ops that were measured at every value in one timing mode, and skips
    settings without a linear op among them."""
    groups: dict[tuple[object, ...], dict[int, dict[str, Point]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for point in sorted(
        material.points, key=lambda p: -p.latency_us
    ):  # the fastest of each op comes last and stays
        if axis in point.axes:
            held = tuple((name, value) for name, value in point.axes.items() if name != axis)
            groups[held, point.workload.dtype][point.axes[axis]][point.op] = point
    found = []
    for by_value in groups.values():
        everywhere = set.intersection(*(set(ops) for ops in by_value.values()))
        common = counted(
            op for op in everywhere if len({ops[op].mode for ops in by_value.values()}) == 1
        )
        if any(name.partition(".")[0] in LINEAR_OPS for name in common):
            found.append(
                {v: _layer([ops[name] for name in common], material) for v, ops in by_value.items()}
            )
    return found


def _layer(points: Sequence[Point], material: Material) -> _Layer:
    times = [p.latency_us * p.count for p in points]
    work = sum(useful_work(p.workload) * p.count for p in points)
    error = float(
        np.sqrt(sum((t * material.sigma(p)) ** 2 for t, p in zip(times, points, strict=True)))
    ) / sum(times)
    return _Layer(tuple(p.key for p in points), log(sum(times) / work), error)


def best_value(material: Material, axis: str, value: int) -> PairsOrReason:
    """Compares whole layers at `value` of `axis` with the fastest other value."""
    groups = [layers for layers in _layers(material, axis) if value in layers and len(layers) > 1]
    if not groups:
        return f"no layer at {axis} = {value} with other values to compare"
    by_rival: dict[int, list[RulePair]] = defaultdict(list)
    for layers in groups:
        for rival in layers.keys() - {value}:
            by_rival[rival].append(_between(layers[value], layers[rival]))
    return min(
        by_rival.values(), key=lambda pairs: float(np.mean([pair.log_effect for pair in pairs]))
    )


def doublings(material: Material, axis: str) -> PairsOrReason:
    """Compares whole layers at each value of `axis` with twice that value."""
    pairs = [
        _between(layers[value], layers[2 * value])
        for layers in _layers(material, axis)
        for value in layers
        if 2 * value in layers
    ]
    return pairs or f"no layer measured at both a value of {axis} and twice that"


def _between(good: _Layer, bad: _Layer) -> RulePair:
    return RulePair(
        good.keys + bad.keys, bad.log_cost - good.log_cost, hypot(good.sigma, bad.sigma)
    )
