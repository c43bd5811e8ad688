"""Selects the points of a sweep and their order, and estimates how long they take.

Points that belong together form a group, such as both sides of a predicted edge (a size after which
a GEMM needs more waves). Groups run from a coarse to a fine grid until the budget ends. The order
is otherwise random, so that device drift does not look like a trend along an axis. A reference
point is repeated every few points to measure the drift.

`build_plan` plans a grid of axes, and `lay_out` plans any list of grid points.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.op_times import copy_us, roofline_us
from quantbench.launch import Tile
from quantbench.providers.catalog import runs_kind
from quantbench.store.record import GridPosition, record_key
from quantbench.sweep.axes import Axis, Held, check_axes, places_of
from quantbench.sweep.edges import edge_indices, neighbour_groups, predicted_jump
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import COLD_L2_MULTIPLE
from quantbench.workload import Gemm, GroupedGemm, Op, Workload

# Bounds (3 and 10) on the number of points between two repetitions of the reference point. Between
# the bounds, the number is a third of the plan's points. Including those at the start and the end,
# there are then four repetitions, which suffice to estimate their noise.
_REFERENCE_EVERY = range(3, 11)

# Wall time of a point apart from its runs, in s, and the usual number of samples per point. The
# wall time covers creating the inputs and identifying the kernel. On a CPU, both numbers come from
# real sweeps. On a GPU, the wall time is twice that of two warm-up windows.
_POINT_OVERHEAD_S = {"cuda": 0.20, "cpu": 0.06}
_USUAL_SAMPLES = 40
# Number of runs per point that are not samples: the first run, three checked runs and one warm-up
# run.
_OTHER_RUNS = 5
# Cost of the correctness checks (`quantbench.providers.audit`). The time for new inputs and random
# projections is proportional to the bytes that the workload reads and writes. On one Xeon core it
# was 2.4 to 5.5 ns per byte, for GEMMs of 0.5 to 17 GFLOP in fp32 and bf16. On a GPU, conversions
# and projections are counted as this many passes over the same bytes. The results of softmax and
# attention are also recomputed, which takes as long as _CHECK_RUNS runs (on the same Xeon 4 to 6
# for softmax, and 4 to 12 for attention).
_CHECK_S_PER_BYTE_ON_CPU = 4e-9
_CHECK_PASSES_ON_GPU = 50
_CHECK_RUNS = {"softmax": 5, "attention": 8}
# Bytes that are read before each sample to make the cache cold, as a multiple of the size of the
# last-level cache.
_FLUSH_FACTOR = {"cuda": COLD_L2_MULTIPLE, "cpu": 3}


def point_estimate_s(workload: Workload, timing: TimingOptions, spec: DeviceSpec) -> float:
    """Estimates the wall time to measure one point, including its checks, in s."""
    run_s = sample_s = roofline_us(workload, spec) / 1e6
    if timing.cache == "cold":
        sample_s += copy_us(_FLUSH_FACTOR[spec.torch_kind] * spec.l2_bytes, spec) / 1e6
    samples = max(timing.min_samples, min(_USUAL_SAMPLES, timing.max_samples))
    # min_samples samples are taken even if they need longer than max_time_s.
    sampling_s = max(min(timing.max_time_s, samples * sample_s), timing.min_samples * sample_s)
    check_s = _CHECK_RUNS.get(workload.kind, 0) * run_s
    if spec.kind == "cpu":
        check_s += _CHECK_S_PER_BYTE_ON_CPU * workload.min_bytes
    else:
        check_s += _CHECK_PASSES_ON_GPU * workload.min_bytes / (spec.memory_gb_per_s * 1e9)
    return _POINT_OVERHEAD_S[spec.torch_kind] + sampling_s + _OTHER_RUNS * sample_s + check_s


@dataclass(frozen=True)
class PlanPoint:
    """Planned measurement of one workload with one provider.

    key: identifier of workload, provider and timing options, as in the records of the run.
    places: positions in the grid, with their ops, that have this workload.
    estimate_s: expected wall time, in s.
    named: whether to identify the point's kernel even if identification takes long in this sweep.
    """

    key: str
    workload: Workload
    provider: str
    places: tuple[GridPosition, ...]
    estimate_s: float
    named: bool = True


@dataclass(frozen=True)
class Group:
    """Points that are planned together or not at all, in the order in which they run.

    In a grid, a group has neighbouring grid points along the longest axis, such as both sides of a
    predicted edge. It has their ops of one direction, forward or backward, with all providers.
    Without such grouping, a group is one grid point with all its ops.

    rank: groups with a lower rank run first. In a grid, the smallest and the largest value of the
        longest axis come first, then finer and finer grids between them. All forward ops come
        before all backward ops.
    """

    points: tuple[PlanPoint, ...]
    rank: int = 0


@dataclass(frozen=True)
class Plan:
    """Groups in the order in which they run, and the reference point.

    groups: groups that are expected to fit into the budget. A point that several groups share is
        measured once.
    reference: point that is repeated to measure drift; None if the plan has fewer than two GEMMs.
    left_out: groups that are not expected to fit. They run after `groups` if time is left.
    impossible: reasons why grid points, or ops at grid points, are left out as impossible.
    """

    groups: tuple[Group, ...]
    reference: PlanPoint | None
    left_out: tuple[Group, ...] = ()
    impossible: tuple[str, ...] = ()

    @cached_property
    def points(self) -> tuple[PlanPoint, ...]:
        """Distinct points of `groups`, in the order in which they run."""
        return _points_in(self.groups)

    @property
    def total(self) -> int:
        """Number of distinct points in all groups, including `left_out`."""
        return len(_points_in((*self.groups, *self.left_out)))

    @property
    def reference_every(self) -> int:
        """Number of points between two repetitions of the reference point."""
        return reference_every(len(self.points))

    @property
    def estimate_s(self) -> float:
        """Expected wall time in s, including the repetitions of the reference point."""
        total = sum(point.estimate_s for point in self.points)
        if self.reference is not None:
            total += self.reference.estimate_s * (1 + len(self.points) // self.reference_every)
        return total

    def without(self, done: Collection[str]) -> Plan:
        """Returns the plan without the points whose keys are in `done`."""
        groups = _without(self.groups, done)
        return replace(self, groups=groups, left_out=_without(self.left_out, done))

    def within(self, budget_s: float | None) -> Plan:
        """Returns the plan with the groups that fit into the budget.

        The remaining groups become `left_out`.

        budget_s: time for the plan, in s; None for no limit.
        """
        every = (*self.groups, *self.left_out)
        if budget_s is None:
            return replace(self, groups=every, left_out=())
        reference_s = 0.0
        if self.reference is not None:
            reference_s = self.reference.estimate_s / self.reference_every
        count = num_fitting(every, budget_s, lambda point: point.estimate_s + reference_s)
        return replace(self, groups=every[:count], left_out=every[count:])


def reference_every(points: int) -> int:
    """Returns the number of points between two repetitions of the reference point.

    points: number of points in the plan.
    """
    return min(max(points // 3, _REFERENCE_EVERY[0]), _REFERENCE_EVERY[-1])


def _points_in(groups: Iterable[Group]) -> tuple[PlanPoint, ...]:
    """Returns the distinct points of the groups, in order."""
    points = chain.from_iterable(group.points for group in groups)
    return tuple({point.key: point for point in points}.values())


def _without(groups: Iterable[Group], done: Collection[str]) -> tuple[Group, ...]:
    """Returns the groups without the points whose keys are in `done`, and without empty groups."""
    found = []
    for group in groups:
        left = tuple(point for point in group.points if point.key not in done)
        if left:
            found.append(replace(group, points=left))
    return tuple(found)


def num_fitting(groups: Sequence[Group], budget: float, cost: Callable[[PlanPoint], float]) -> int:
    """Returns how many groups, counted from the first, fit into the budget; at least one.

    budget: largest total cost of the groups' points. A point that several groups share counts once.
    cost: function that returns the cost of a point, in the unit of `budget`.
    """
    keys: set[str] = set()
    for number, group in enumerate(groups):
        budget -= sum(cost(point) for point in group.points if point.key not in keys)
        if budget < 0 and number:
            return number
        keys |= {point.key for point in group.points}
    return len(groups)


@dataclass(frozen=True)
class GridPoint:
    """One point of the grid, with its ops.

    axes: value on each axis, by `Axis.field`.
    rank: rank of the group that contains the grid point.
    group: identifier of this group; None if the grid point is a group alone.
    named: as in `PlanPoint`.
    """

    axes: dict[str, int]
    ops: tuple[Op, ...]
    rank: int = 0
    group: Hashable = None
    named: bool = True


def build_plan(
    axes: tuple[Axis, ...],
    held: Held,
    providers: Sequence[str],
    timing: TimingOptions,
    spec: DeviceSpec,
    tiles: Sequence[Tile | None] | None = (None,),
) -> Plan:
    """Builds the plan for a sweep over a grid.

    axes: axes with their edges added.
    held: values of all other sizes, with the defaults filled in.
    tiles: tiles to predict edges for, as in `predicted_edges`. The two sides of a predicted edge
        are in one group. With None, each grid point is a group alone.

    Raises InputError if no points remain.
    """
    check_axes(axes)
    places, impossible = places_of(axes, held)
    points = [GridPoint(at, ops) for at, ops in places]
    if tiles and points:
        points = _in_groups(points, axes, spec, tiles)
    return lay_out(points, providers, timing, spec, impossible=impossible)


def _in_groups(
    grid: Sequence[GridPoint],
    axes: tuple[Axis, ...],
    spec: DeviceSpec,
    tiles: Sequence[Tile | None],
) -> list[GridPoint]:
    """Groups neighbouring points along the longest axis, and separates forward from backward ops.

    Returns two grid points for each given one: its forward ops and its backward ops. The grouping
    along the longest axis is the same at all values of the other axes.
    """
    longest = max(axes, key=lambda axis: len(axis.values)).field
    # At each value of the longest axis, the first grid point represents all grid points.
    ops_of = {place.axes[longest]: place.ops for place in reversed(grid)}
    values = sorted(ops_of)
    jumps = [predicted_jump(ops_of[a], ops_of[b], spec, tiles) for a, b in pairwise(values)]
    group_of = {}
    for number, (indices, rank) in enumerate(neighbour_groups(jumps)):
        for i in indices:
            group_of[values[i]] = (number, rank)
    # If the identification of kernels takes long, only the kernels at every second value and at
    # edges are identified.
    at_edges = edge_indices(jumps)
    named = {value for i, value in enumerate(values) if i % 2 == 0 or i in at_edges}
    found = []
    for place in grid:
        number, rank = group_of[place.axes[longest]]
        others = tuple((name, value) for name, value in place.axes.items() if name != longest)
        for backward in (False, True):
            ops = tuple(op for op in place.ops if (op.phase != "forward") == backward)
            later = backward * len(values)  # higher than the rank of any forward group
            group = (number, others, backward)
            in_order = place.axes[longest] in named
            found.append(replace(place, ops=ops, rank=rank + later, group=group, named=in_order))
    return found


def lay_out(
    grid: Sequence[GridPoint],
    providers: Sequence[str],
    timing: TimingOptions,
    spec: DeviceSpec,
    *,
    impossible: tuple[str, ...] = (),
) -> Plan:
    """Builds the plan for a list of grid points.

    The plan has one point for each op and each provider that runs the op, without duplicates. The
    groups are sorted by rank, and shuffled within a rank.

    impossible: as in `Plan`.
    Raises InputError if no provider runs any of the ops.
    """
    points: dict[str, PlanPoint] = {}
    members: dict[Hashable, list[list[str]]] = {}
    ranks: dict[Hashable, int] = {}
    for number, place in enumerate(grid):
        name: Hashable = ("place", number) if place.group is None else ("group", place.group)
        keys = []
        for point in _points_of(place, providers, timing, spec):
            seen = points.get(point.key)
            if seen is not None:
                places = seen.places + point.places
                point = replace(seen, places=places, named=seen.named or point.named)
            points[point.key] = point
            keys.append(point.key)
        if keys:
            members.setdefault(name, []).append(keys)
            ranks.setdefault(name, place.rank)
    if not points:
        raise InputError(
            "sweep",
            "no point is left to measure",
            "axes, ops and providers that have points in common",
        )
    chance = random.Random(timing.seed)
    groups = []
    for name, at_places in members.items():
        chance.shuffle(at_places)
        for keys in at_places:
            chance.shuffle(keys)
        ordered = dict.fromkeys(chain.from_iterable(at_places))
        groups.append(Group(tuple(points[key] for key in ordered), ranks[name]))
    chance.shuffle(groups)
    groups.sort(key=lambda group: group.rank)
    return Plan(tuple(groups), _reference(list(points.values())), impossible=impossible)


def _points_of(
    place: GridPoint, providers: Sequence[str], timing: TimingOptions, spec: DeviceSpec
) -> Iterator[PlanPoint]:
    """Yields a point for each op of a grid point and each provider that runs the op."""
    for op in place.ops:
        for provider in providers:
            if runs_kind(provider, op.workload.kind):
                yield PlanPoint(
                    record_key(op.workload, provider, timing),
                    op.workload,
                    provider,
                    (GridPosition(place.axes, op.label, op.count),),
                    point_estimate_s(op.workload, timing, spec),
                    place.named,
                )


def _reference(points: Sequence[PlanPoint]) -> PlanPoint | None:
    """Returns the GEMM point with the median expected time; None if there are fewer than two GEMMs.

    A GEMM of median time is long enough to have little noise, and short enough to be repeated.
    Among grouped GEMMs, only those with the first provider are considered, because another provider
    may not run on the device.
    """
    gemms = [point for point in points if isinstance(point.workload, Gemm)]
    grouped = [point for point in points if isinstance(point.workload, GroupedGemm)]
    gemms += [point for point in grouped if point.provider == grouped[0].provider]
    if len(gemms) < 2:
        return None
    gemms.sort(key=lambda point: (point.estimate_s, point.key))
    return gemms[len(gemms) // 2]
