"""Which points a sweep measures, in what order, and which of them fit into a budget.

The plan is deduplicated (one workload at several places is measured once). It is made of groups, which are measured
whole: all ops of a place by all providers, and, along the longest axis, both sides of a predicted edge. Groups run in
seeded random order, so that a drift of the device does not look like a slope of the axis, and one reference point is
repeated every few points, so that the drift shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.providers.catalog import runs_kind
from quantbench.store.record import Place, record_key
from quantbench.sweep.axes import Axis
from quantbench.sweep.edges import neighbour_groups, predicted_jump
from quantbench.sweep.pace import point_estimate_s
from quantbench.sweep.shapes import Held, check_axes, ops_at
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm, Op, Workload

#: points between two repetitions of the reference point
REFERENCE_EVERY = 10


@dataclass(frozen=True)
class PlanPoint:
    """One measurement to make."""

    key: str
    workload: Workload
    provider: str
    places: tuple[Place, ...]
    estimate_s: float


@dataclass(frozen=True)
class Group:
    """Points that are measured together or not at all, in the order they run. rank: 0 for the most informative groups
    of the axes, higher for those between."""

    points: tuple[PlanPoint, ...]
    rank: int = 0


@dataclass(frozen=True)
class Plan:
    """Groups in the order they run, and the reference point (None when there is no product to repeat).

    Groups may share points: each is measured once. left_out: groups that did not fit into the budget, in the order
    they would run. impossible: places that cannot be, with the reason.
    """

    groups: tuple[Group, ...]
    reference: PlanPoint | None
    left_out: tuple[Group, ...] = ()
    impossible: tuple[str, ...] = ()

    @cached_property
    def points(self) -> tuple[PlanPoint, ...]:
        """The points of the groups in the order they run, each once."""
        return _points_in(self.groups)

    @property
    def total(self) -> int:
        """Points of all groups, those that did not fit included."""
        return len(_points_in((*self.groups, *self.left_out)))

    @property
    def estimate_s(self) -> float:
        """Expected wall time of the points and the repetitions of the reference."""
        total = sum(point.estimate_s for point in self.points)
        if self.reference is not None:
            total += self.reference.estimate_s * (1 + len(self.points) // REFERENCE_EVERY)
        return total

    def without(self, done: Collection[str]) -> Plan:
        """The plan of what is left to measure. done: keys of points that were measured."""
        return replace(self, groups=_without(self.groups, done), left_out=_without(self.left_out, done))

    def within(self, budget_s: float | None) -> Plan:
        """The plan with the groups that fit into a budget; the others are its left_out. None: with all groups."""
        every = (*self.groups, *self.left_out)
        if budget_s is None:
            return replace(self, groups=every, left_out=())
        reference_s = 0.0 if self.reference is None else self.reference.estimate_s / REFERENCE_EVERY
        kept = {id(group) for group in fitting(every, budget_s, lambda point: point.estimate_s + reference_s)}
        return replace(
            self,
            groups=tuple(group for group in every if id(group) in kept),
            left_out=tuple(group for group in every if id(group) not in kept),
        )


def _points_in(groups: Iterable[Group]) -> tuple[PlanPoint, ...]:
    return tuple({point.key: point for group in groups for point in group.points}.values())


def _without(groups: Iterable[Group], done: Collection[str]) -> tuple[Group, ...]:
    left = (Group(tuple(point for point in group.points if point.key not in done), group.rank) for group in groups)
    return tuple(group for group in left if group.points)


def fitting(groups: Iterable[Group], budget_s: float, seconds: Callable[[PlanPoint], float]) -> list[Group]:
    """The groups that fit into the budget together, the most informative first; of none that does, the shortest.

    seconds: how long a point takes. A point that several groups share counts once.
    """
    ordered = sorted(groups, key=lambda group: group.rank)
    kept: list[Group] = []
    keys: set[str] = set()
    left_s = budget_s
    for group in ordered:
        cost_s = sum(seconds(point) for point in group.points if point.key not in keys)
        if cost_s <= left_s:
            kept.append(group)
            keys |= {point.key for point in group.points}
            left_s -= cost_s
    if not kept and ordered:
        kept = [min(ordered, key=lambda group: (group.rank, sum(seconds(point) for point in group.points)))]
    return kept


@dataclass(frozen=True)
class Placed:
    """Ops at one place on the axes, before providers and timing make points of them.

    group: places of the same group are measured together; None for a place of its own. rank: of that group.
    """

    axes: dict[str, int]
    ops: tuple[Op, ...]
    rank: int = 0
    group: Hashable = None


def build_plan(
    axes: tuple[Axis, ...],
    held: Held,
    providers: Sequence[str],
    timing: TimingOptions,
    spec: DeviceSpec,
    *,
    skip_impossible: bool = False,
    neighbours: bool = True,
) -> Plan:
    """Lay out a sweep over a grid of axes. `axes` have their edges added already, `held` its defaults filled in.
    neighbours: measure both sides of predicted edges together; otherwise each place is a group of its own.

    Raises InputError for a point that cannot be, unless skip_impossible, and when nothing is left to measure.
    """
    check_axes(axes)
    placed: list[Placed] = []
    impossible: list[str] = []
    for values in product(*(axis.values for axis in axes)):
        try:
            ops = ops_at(axes, values, held)
        except InputError as error:
            if not skip_impossible:
                raise
            impossible.append(str(error))
            continue
        placed.append(Placed({axis.field: value for axis, value in zip(axes, values, strict=True)}, ops))
    if neighbours and placed:
        placed = _in_groups(placed, axes, spec)
    return lay_out(placed, providers, timing, spec, impossible=tuple(impossible))


def _in_groups(placed: Sequence[Placed], axes: tuple[Axis, ...], spec: DeviceSpec) -> list[Placed]:
    """The places in groups of neighbours along the longest axis, the same ones at all values of the other axes."""
    longest = max(axes, key=lambda axis: len(axis.values)).field
    # The first place at each value stands for all places there.
    ops_of = {place.axes[longest]: place.ops for place in reversed(placed)}
    values = sorted(ops_of)
    jumps = [predicted_jump(ops_of[a], ops_of[b], spec) for a, b in pairwise(values)]
    groups = neighbour_groups(jumps)
    group_of = {values[i]: (number, rank) for number, (indices, rank) in enumerate(groups) for i in indices}
    ranks = {
        axis.field: dict(zip(axis.values, _bisection_ranks(len(axis.values)), strict=True))
        for axis in axes
        if axis.field != longest
    }
    found = []
    for place in placed:
        number, rank = group_of[place.axes[longest]]
        others = tuple((name, value) for name, value in place.axes.items() if name != longest)
        rank = max([rank, *(ranks[name][value] for name, value in others)])
        found.append(replace(place, rank=rank, group=(number, others)))
    return found


def lay_out(
    placed: Sequence[Placed],
    providers: Sequence[str],
    timing: TimingOptions,
    spec: DeviceSpec,
    *,
    impossible: tuple[str, ...] = (),
) -> Plan:
    """Points for every op and provider that runs it: deduplicated, in groups, shuffled, with a reference."""
    points: dict[str, PlanPoint] = {}
    members: dict[Hashable, list[list[str]]] = {}
    ranks: dict[Hashable, int] = {}
    for number, place in enumerate(placed):
        name: Hashable = ("place", number) if place.group is None else ("group", place.group)
        keys = []
        for point in _points_of(place, providers, timing, spec):
            seen = points.get(point.key)
            points[point.key] = point if seen is None else replace(seen, places=seen.places + point.places)
            keys.append(point.key)
        if keys:
            members.setdefault(name, []).append(keys)
            ranks[name] = min(place.rank, ranks.get(name, place.rank))
    if not points:
        raise InputError("sweep", "no point is left to measure", "axes, ops and providers that have points in common")
    chance = random.Random(timing.seed)
    groups = []
    for name, places in members.items():
        chance.shuffle(places)
        for keys in places:
            chance.shuffle(keys)
        ordered = dict.fromkeys(key for keys in places for key in keys)
        groups.append(Group(tuple(points[key] for key in ordered), ranks[name]))
    chance.shuffle(groups)
    return Plan(tuple(groups), _reference(list(points.values())), impossible=impossible)


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
                )


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


def _reference(points: Sequence[PlanPoint]) -> PlanPoint | None:
    """The product whose expected time is the median: long enough to be quiet, short enough to be repeated."""
    products = sorted((p for p in points if isinstance(p.workload, Gemm)), key=lambda p: (p.estimate_s, p.key))
    return products[len(products) // 2] if len(products) > 1 else None
