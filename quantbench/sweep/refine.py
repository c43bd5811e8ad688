"""Finds the exact edges between the sizes of a coarse sweep by bisection (`--refine`).

A gap is a pair of neighbouring measured sizes between which the time jumps. `Refine` bisects all
gaps, and returns the points that the sweep must measure next. To find one edge in a gap of g sizes,
about log2(g) points are measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log, sqrt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.providers.catalog import expand, gemm_tiles
from quantbench.stats import typical_us
from quantbench.store.record import GridPosition, Measured, Record
from quantbench.sweep.axes import Axis, with_defaults
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.plan import PlanPoint, build_plan

# A bisection step divides an interval into two halves. The half with the larger jump is always
# searched. The other half is searched too if its jump reaches three limits: _SMALLEST_JUMP (in log
# time), _SURE_ERRORS standard errors of a difference between two log times, and the fraction
# _MIN_JUMP_FRACTION of the jump over the whole interval.
_SMALLEST_JUMP = 0.02
_SURE_ERRORS = 3.0
_MIN_JUMP_FRACTION = 0.25


@dataclass(frozen=True)
class Gap:
    """Two neighbouring sizes of a coarse sweep between which the time jumps.

    low, high: the two sizes.
    low_us, high_us: median times at these sizes, in µs.
    elasticity: d log time / d log size of the trend without a jump.
    noise: standard error of a log time.
    grain: only multiples of this number are measured, because sizes in between are slow for another
        reason: misaligned matrix rows.
    """

    low: int
    high: int
    low_us: float
    high_us: float
    elasticity: float = 0.0
    noise: float = 0.0
    grain: int = 1

    def middle(self, low: int, high: int) -> int | None:
        """Returns the multiple of the grain that is nearest to the middle of two sizes.

        Returns None if no multiple lies strictly between them.
        """
        first = low // self.grain + 1
        last = -(-high // self.grain) - 1
        if first > last:
            return None
        middle = round((low + high) / 2 / self.grain)
        return self.grain * min(max(middle, first), last)


@dataclass(frozen=True)
class Edge:
    """A jump of the time between two sizes.

    low, high: the two sizes.
    ratio: factor by which the time grows beyond the trend.
    exact: whether no multiple of the gap's grain lies between the sizes.
    """

    low: int
    high: int
    ratio: float
    exact: bool


#: function that returns the samples at a size, in µs: () if the size cannot be measured, None if it
#: was not measured yet
SamplesOf = Callable[[int], Sequence[float] | None]


def bisect(gap: Gap, samples_of: SamplesOf) -> tuple[int | None, tuple[Edge, ...]]:
    """Bisects a gap as far as the measured sizes allow.

    Returns the size to measure next (None if every edge is found), and the edges so far in
    ascending order. If the middle of an interval cannot be measured, or was not measured yet, the
    whole interval is returned as an inexact edge.
    """
    times_us = {gap.low: gap.low_us, gap.high: gap.high_us}

    def jump(low: int, high: int) -> float:
        """Returns by how much the log time rises from low to high beyond the trend."""
        return log(times_us[high] / times_us[low]) - gap.elasticity * log(high / low)

    wanted = None
    found = []
    left = [(gap.low, gap.high)]
    while left:
        low, high = left[0]
        size = gap.middle(low, high)
        samples_us: Sequence[float] | None = ()
        if size is not None:
            samples_us = samples_of(size)
        if samples_us is None:
            wanted = size
            break
        del left[0]
        if size is None or not len(samples_us):
            found.append((low, high))
            continue
        times_us[size] = typical_us(samples_us)
        # The jump over the whole interval may go up or down. The jump over each half is positive if
        # it goes in the same direction.
        whole = jump(low, high)
        sign = 1 if whole > 0 else -1
        lower = sign * jump(low, size)
        upper = sign * jump(size, high)
        least = max(
            _SMALLEST_JUMP, _SURE_ERRORS * sqrt(2) * gap.noise, _MIN_JUMP_FRACTION * abs(whole)
        )
        if lower >= min(upper, least):
            left.append((low, size))
        if upper > lower or upper >= least:
            left.append((size, high))
    edges = []
    for low, high in sorted([*found, *left]):
        exact = gap.middle(low, high) is None
        edges.append(Edge(low, high, exp(jump(low, high)), exact))
    return wanted, tuple(edges)


@dataclass(frozen=True)
class AxisGap:
    """A gap of one op and provider along an axis.

    axis: name of the axis, as in `GridPosition`.
    held: values on the other axes, by name.
    op: label of the op, as in `GridPosition`.
    """

    gap: Gap
    axis: str
    held: Mapping[str, int]
    op: str
    provider: str


@dataclass
class Refine:
    """Selects the next points of a sweep with --refine.

    The sweep calls the object again and again with all records so far. All gaps are bisected at the
    same time. Each call repeats the bisection from the records alone, so that a stopped sweep can
    be resumed.

    axes: axes with the values of the coarse sweep.
    find: function that finds the gaps in the records of the coarse sweep, the largest jump first.
        It is injected, because `quantbench.analysis` is a higher layer.
    """

    options: SweepOptions
    axes: tuple[Axis, ...]
    spec: DeviceSpec
    find: Callable[[Sequence[Record]], Sequence[AxisGap]]
    _gaps: tuple[AxisGap, ...] | None = None

    def __call__(self, records: Sequence[Record]) -> Sequence[PlanPoint]:
        """Returns the next point to measure in each gap that still needs one."""
        found = []
        for gap, wanted, _ in self._searches(records):
            if wanted is not None and (point := self._point(gap, wanted)):
                found.append(point)
        return found

    def edges(self, records: Sequence[Record]) -> tuple[tuple[AxisGap, Edge], ...]:
        """Returns every edge with its gap, located as exactly as the records allow."""
        found = []
        for gap, _, edges in self._searches(records):
            found += [(gap, edge) for edge in edges]
        return tuple(found)

    def _searches(
        self, records: Sequence[Record]
    ) -> list[tuple[AxisGap, int | None, tuple[Edge, ...]]]:
        """Returns each gap with the result of `bisect`: the size to measure next and the edges."""
        if self._gaps is None:
            self._gaps = tuple(self.find(list(filter(self._is_coarse, records))))
        outcomes = {}
        for record in records:
            if record.role == "point":
                for place in record.places:
                    at = sorted(place.axes.items())
                    outcomes[place.op, record.provider, *at] = record.outcome

        def samples_of(gap: AxisGap, size: int) -> Sequence[float] | None:
            at = sorted({**gap.held, gap.axis: size}.items())
            outcome = outcomes.get((gap.op, gap.provider, *at))
            if isinstance(outcome, Measured) and outcome.grade.letter != "rejected":
                return outcome.measurement.samples_us
            return None if outcome is None and self._point(gap, size) else ()

        return [(gap, *bisect(gap.gap, partial(samples_of, gap))) for gap in self._gaps]

    def _is_coarse(self, record: Record) -> bool:
        """Returns whether a record is that of a coarse grid point or of a reference point."""
        values = {axis.field: axis.values for axis in self.axes}

        def inside(place: GridPosition) -> bool:
            return all(value in values.get(name, ()) for name, value in place.axes.items())

        return record.role != "point" or any(map(inside, record.places))

    def _point(self, gap: AxisGap, size: int) -> PlanPoint | None:
        """Returns the point that measures a gap's op at `size`; None if the size is impossible."""
        held = with_defaults(self.options.held, self.spec, self.options.dims)
        providers = [name for name in expand(self.options.providers) if name == gap.provider]
        at = {**gap.held, gap.axis: size}
        axes = tuple(Axis(axis.dim, (at[axis.field],)) for axis in self.axes)
        tiles = gemm_tiles(providers, self.options.tiles)
        try:
            plan = build_plan(axes, held, providers, self.options.timing, self.spec, tiles)
        except InputError:
            return None
        for point in plan.points:
            if any(place.op == gap.op for place in point.places):
                return point
        raise AssertionError(f"no point of {gap.op}")
