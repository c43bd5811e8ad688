"""Which points a sweep measures, and in what order.

The plan is deduplicated (one workload at several places is measured once), in seeded random order (so that a drift of
the device does not look like a slope of the axis), with one reference point repeated every few points (so that the
drift shows).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.roofline import roofline_us
from quantbench.providers.catalog import runs_kind
from quantbench.store.record import Place, record_key
from quantbench.sweep.axes import Axis
from quantbench.sweep.shapes import Held, check_axes, ops_at
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import COLD_L2_MULTIPLE
from quantbench.workload import Gemm, Op, Workload

#: points between two repetitions of the reference point
REFERENCE_EVERY = 10

# Wall seconds that a point costs beside its samples (inputs, warm-up, identification) and samples it usually takes: on
# a CPU as seen in real sweeps, on a GPU two windows of warming up and as much again. How many points fit into a budget
# and the estimate of the time left depend on them; nothing that is measured does.
_POINT_OVERHEAD_S = {"cuda": 0.20, "cpu": 0.06}
_USUAL_SAMPLES = 40
# A cold cache is made by passing a few times the last-level cache through it before each sample.
_FLUSH_FACTOR = {"cuda": COLD_L2_MULTIPLE, "cpu": 3}


@dataclass(frozen=True)
class PlanPoint:
    """One measurement to make. rank: 0 for the most informative points of the axes, higher for those between."""

    key: str
    workload: Workload
    provider: str
    places: tuple[Place, ...]
    estimate_s: float
    rank: int


@dataclass(frozen=True)
class Plan:
    """Points in the order they run, and the reference point among them (None when there is no product to repeat).

    dropped: points that did not fit into the budget. impossible: places that cannot be, with the reason, left out.
    """

    points: tuple[PlanPoint, ...]
    reference: PlanPoint | None
    dropped: int = 0
    impossible: tuple[str, ...] = ()

    @property
    def estimate_s(self) -> float:
        """Expected wall time of all points and the repetitions of the reference."""
        total = sum(point.estimate_s for point in self.points)
        if self.reference is not None:
            total += self.reference.estimate_s * (1 + len(self.points) // REFERENCE_EVERY)
        return total


@dataclass(frozen=True)
class Placed:
    """Ops at one place on the axes, before providers and timing make points of them. rank: as in PlanPoint."""

    axes: dict[str, int]
    ops: tuple[Op, ...]
    rank: int = 0


def build_plan(
    axes: tuple[Axis, ...],
    held: Held,
    providers: Sequence[str],
    timing: TimingOptions,
    spec: DeviceSpec,
    *,
    skip_impossible: bool = False,
    budget_s: float | None = None,
) -> Plan:
    """Lay out a sweep over a grid of axes. `axes` have their edges added already, `held` its defaults filled in.

    Raises InputError for a point that cannot be, unless skip_impossible, and when nothing is left to measure.
    """
    check_axes(axes)
    ranks = [_bisection_ranks(len(axis.values)) for axis in axes]
    placed: list[Placed] = []
    impossible: list[str] = []
    for indices in product(*(range(len(axis.values)) for axis in axes)):
        values = tuple(axis.values[i] for axis, i in zip(axes, indices, strict=True))
        try:
            ops = ops_at(axes, values, held)
        except InputError as error:
            if not skip_impossible:
                raise
            impossible.append(str(error))
            continue
        rank = max(rank_of[i] for rank_of, i in zip(ranks, indices, strict=True))
        placed.append(Placed({axis.field: value for axis, value in zip(axes, values, strict=True)}, ops, rank))
    return lay_out(placed, providers, timing, spec, budget_s=budget_s, impossible=tuple(impossible))


def lay_out(
    placed: Sequence[Placed],
    providers: Sequence[str],
    timing: TimingOptions,
    spec: DeviceSpec,
    *,
    budget_s: float | None = None,
    impossible: tuple[str, ...] = (),
) -> Plan:
    """Points for every op and provider that runs it: deduplicated, cut to the budget, shuffled, with a reference."""
    points: dict[str, PlanPoint] = {}
    for place in placed:
        for point in _points_of(place, providers, timing, spec):
            seen = points.get(point.key)
            points[point.key] = point if seen is None else _merge(seen, point)
    if not points:
        raise InputError("sweep", "no point is left to measure", "axes, ops and providers that have points in common")
    kept = list(points.values())
    if budget_s is not None:
        kept = _fit(kept, budget_s)
    random.Random(timing.seed).shuffle(kept)
    return Plan(tuple(kept), _reference(kept), len(points) - len(kept), impossible)


def _points_of(place: Placed, providers: Sequence[str], timing: TimingOptions, spec: DeviceSpec) -> Iterator[PlanPoint]:
    for op in place.ops:
        for provider in providers:
            if runs_kind(provider, op.workload.kind):
                yield PlanPoint(
                    key=record_key(op.workload, provider, timing),
                    workload=op.workload,
                    provider=provider,
                    places=(Place(place.axes, op.label, op.count),),
                    estimate_s=point_estimate_s(op.workload, timing, spec),
                    rank=place.rank,
                )


def _merge(seen: PlanPoint, again: PlanPoint) -> PlanPoint:
    return replace(seen, places=seen.places + again.places, rank=min(seen.rank, again.rank))


def point_estimate_s(workload: Workload, timing: TimingOptions, spec: DeviceSpec) -> float:
    """Expected wall seconds of one point."""
    sample_s = roofline_us(workload, spec) / 1e6
    if timing.cache == "cold":
        sample_s += _FLUSH_FACTOR[spec.kind] * spec.l2_bytes / (spec.memory_gb_per_s * 1e9)
    samples = max(timing.min_samples, min(_USUAL_SAMPLES, timing.max_samples))
    return _POINT_OVERHEAD_S[spec.kind] + min(timing.max_time_s, samples * sample_s)


def _bisection_ranks(count: int) -> list[int]:
    """How late each index comes when an axis is filled from its ends inwards by halves: 0 for both ends, 1 for the
    middle, 2 for the quarters, …

    >>> _bisection_ranks(5)
    [0, 2, 1, 2, 0]
    """
    ranks = [0] * count
    spans = [(0, count - 1, 1)]
    while spans:
        low, high, rank = spans.pop()
        if high - low >= 2:
            middle = (low + high) // 2
            ranks[middle] = rank
            spans += [(low, middle, rank + 1), (middle, high, rank + 1)]
    return ranks


def _fit(points: list[PlanPoint], budget_s: float) -> list[PlanPoint]:
    """The most informative points that fit into the budget; at least one."""
    ordered = sorted(points, key=lambda point: (point.rank, min(tuple(p.axes.values()) for p in point.places)))
    kept: list[PlanPoint] = []
    spent_s = 0.0
    share = 1 + 1 / REFERENCE_EVERY
    for point in ordered:
        spent_s += point.estimate_s * share
        if kept and spent_s > budget_s:
            break
        kept.append(point)
    return kept


def _reference(points: Sequence[PlanPoint]) -> PlanPoint | None:
    """The product whose expected time is the median: long enough to be quiet, short enough to be repeated."""
    products = sorted((p for p in points if isinstance(p.workload, Gemm)), key=lambda p: (p.estimate_s, p.key))
    return products[len(products) // 2] if len(products) > 1 else None
