"""Selects the points of a sweep, their order, and those that fit into a budget.

Entry points: `build_plan` (grid of axes), `lay_out` (list of places) and `Pace` (time estimates). Used by `options`,
`refine`, `runner`, `cli` and `quantbench.cluster`.

A place is one combination of axis values; a workload at several places is measured once. Points are planned in groups:
all ops of a place by all providers and, along the longest axis, both sides of a predicted edge. Groups run in seeded
random order, so that drift of the device does not look like a trend along an axis. A reference point, repeated every
few points, shows the drift. Times are estimated from the data sheet and corrected by the points measured so far.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from statistics import median

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.op_times import roofline_us
from quantbench.providers.catalog import runs_kind
from quantbench.store.record import Place, record_key
from quantbench.sweep.axes import Axis, Held, check_axes, ops_at
from quantbench.sweep.edges import neighbour_groups, predicted_jump
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import COLD_L2_MULTIPLE
from quantbench.workload import Gemm, Op, Workload

#: points between two repetitions of the reference point
REFERENCE_EVERY = 10

# Wall seconds of a point apart from its samples (inputs, kernel name), and its usual number of samples: on a CPU from
# real sweeps, on a GPU two warm-up windows and as much again. They affect only how many points fit into a budget and
# the estimate of the time left.
_POINT_OVERHEAD_S = {"cuda": 0.20, "cpu": 0.06}
_USUAL_SAMPLES = 40
# Runs apart from the samples: the first one, three that are checked, and the warm-up.
_OTHER_RUNS = 5
# Cost of the checks (`quantbench.providers.audit`). New inputs and random projections are proportional to the bytes
# that the workload touches: 2.4 to 5.5 ns per byte for GEMMs of 0.5 to 17 GFLOP in fp32 and bf16 on one core of a Xeon.
# On a GPU, conversions and projections count as passes over memory. Softmax and attention are also recomputed, in the
# time of this many runs (4 to 6 and 4 to 12 on that Xeon).
_CHECK_S_PER_BYTE_ON_CPU = 4e-9
_CHECK_PASSES_ON_GPU = 50
_CHECK_RUNS = {"softmax": 5, "attention": 8}
# Bytes read before each sample to make the cache cold, relative to the size of the last-level cache.
_FLUSH_FACTOR = {"cuda": COLD_L2_MULTIPLE, "cpu": 3}
# Weight of the initial estimates, in seconds of measuring. Most recent points whose median is a kind's slowdown.
_ESTIMATE_WEIGHS_S = 0.5
_REMEMBERED = 25


def point_estimate_s(workload: Workload, timing: TimingOptions, spec: DeviceSpec, slowdown: float = 1.0) -> float:
    """Estimates the wall seconds of a point, including its checks. slowdown: run time relative to the roofline."""
    run_s = sample_s = slowdown * roofline_us(workload, spec) / 1e6
    if timing.cache == "cold":
        sample_s += _FLUSH_FACTOR[spec.torch_kind] * spec.l2_bytes / (spec.memory_gb_per_s * 1e9)
    samples = max(timing.min_samples, min(_USUAL_SAMPLES, timing.max_samples))
    # min_samples are taken even if they exceed max_time_s.
    sampling_s = max(min(timing.max_time_s, samples * sample_s), timing.min_samples * sample_s)
    check_s = _CHECK_RUNS.get(workload.kind, 0) * run_s
    if spec.kind == "cpu":
        check_s += _CHECK_S_PER_BYTE_ON_CPU * workload.min_bytes
    else:
        check_s += _CHECK_PASSES_ON_GPU * workload.min_bytes / (spec.memory_gb_per_s * 1e9)
    return _POINT_OVERHEAD_S[spec.torch_kind] + sampling_s + _OTHER_RUNS * sample_s + check_s


class Pace:
    """Estimator of the wall seconds of points on this machine.

    Learns two ratios from measured points: run time over roofline time, by kind of workload, and the wall time of a
    point over its estimate.
    """

    def __init__(self, timing: TimingOptions, spec: DeviceSpec) -> None:
        self._timing = timing
        self._spec = spec
        self._slowdowns: dict[str, list[float]] = {}
        self._expected_s = _ESTIMATE_WEIGHS_S
        self._took_s = _ESTIMATE_WEIGHS_S

    def learn(self, workload: Workload, run_us: float, took_s: float | None) -> None:
        """Adds a measured point.

        run_us: median of its samples. took_s: its wall seconds, None if they include the start of a worker.
        """
        slowdown = run_us / roofline_us(workload, self._spec)
        known = self._slowdowns.setdefault(workload.kind, [])
        known.append(slowdown)
        del known[:-_REMEMBERED]
        if took_s is not None:
            self._expected_s += point_estimate_s(workload, self._timing, self._spec, slowdown)
            self._took_s += took_s

    def estimate(self) -> Callable[[Workload], float]:
        """Returns a function from a workload to its expected wall seconds, based on the points so far."""
        usual = {kind: median(values) for kind, values in self._slowdowns.items()}
        of_all = median(usual.values()) if usual else 1.0
        rate = self._took_s / self._expected_s

        def seconds(workload: Workload) -> float:
            slowdown = usual.get(workload.kind, of_all)
            return rate * point_estimate_s(workload, self._timing, self._spec, slowdown)

        return seconds


@dataclass(frozen=True)
class PlanPoint:
    """Planned measurement of one workload by one provider. estimate_s: expected wall seconds."""

    key: str
    workload: Workload
    provider: str
    places: tuple[Place, ...]
    estimate_s: float


@dataclass(frozen=True)
class Group:
    """Points that are measured together or not at all, in the order they run. rank: 0 for the ends of the axes, higher
    for groups that fill a finer grid."""

    points: tuple[PlanPoint, ...]
    rank: int = 0


@dataclass(frozen=True)
class Plan:
    """Groups in the order they run, and the reference point (None if the plan has fewer than two GEMMs).

    Groups may share points; each is measured once. left_out: groups that do not fit into the budget, in the order they
    would run. impossible: reason for each place left out as impossible.
    """

    groups: tuple[Group, ...]
    reference: PlanPoint | None
    left_out: tuple[Group, ...] = ()
    impossible: tuple[str, ...] = ()

    @cached_property
    def points(self) -> tuple[PlanPoint, ...]:
        """Returns the distinct points of `groups` in the order they run."""
        return _points_in(self.groups)

    @property
    def total(self) -> int:
        """Returns the number of points of all groups, including left_out."""
        return len(_points_in((*self.groups, *self.left_out)))

    @property
    def estimate_s(self) -> float:
        """Returns the expected wall seconds of the points and the repetitions of the reference."""
        total = sum(point.estimate_s for point in self.points)
        if self.reference is not None:
            total += self.reference.estimate_s * (1 + len(self.points) // REFERENCE_EVERY)
        return total

    def without(self, done: Collection[str]) -> Plan:
        """Returns the plan without the points whose keys are in `done`."""
        return replace(self, groups=_without(self.groups, done), left_out=_without(self.left_out, done))

    def within(self, budget_s: float | None) -> Plan:
        """Returns the plan with the groups that fit into the budget; others become left_out. None: all fit."""
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
    """Returns the groups that fit into the budget together, by rank; if none fits, the shortest of the lowest rank.

    seconds: function from a point to its cost. A point shared by several groups counts once.
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
    """Ops at one place on the axes.

    axes: value of each axis. group: identifier of the places measured together, None for a group of its own. rank: rank
    of that group.
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
    """Builds the plan of a sweep over a grid of axes.

    axes: axes with their edges added. held: all other sizes, defaults filled in. neighbours: whether to group both
    sides of predicted edges; otherwise each place is its own group. Raises InputError for an impossible point, unless
    skip_impossible, and if no points remain.
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
    """Groups neighbouring places along the longest axis, in the same way at all values of the other axes."""
    longest = max(axes, key=lambda axis: len(axis.values)).field
    # The first place at each value represents all places there.
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
    """Builds the plan of a list of places: one point per op and provider that runs it, deduplicated, in shuffled
    groups, with a reference point. Raises InputError if there are no points."""
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
    """Returns the rank of each index of an axis filled by halving: 0 for both ends, 1 for the middle, 2 for the
    quarters, …

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
    """Returns the GEMM with the median expected time: long enough for little noise, short enough to repeat."""
    gemms = sorted((p for p in points if isinstance(p.workload, Gemm)), key=lambda p: (p.estimate_s, p.key))
    return gemms[len(gemms) // 2] if len(gemms) > 1 else None
