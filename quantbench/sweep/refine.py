"""Sharpening edges: from a coarse pass to the exact size at which the time jumps, by halving.

`EdgeSearch` is pure: it says which size it wants measured and is told the samples, so that a test drives it with a
function and a sweep with its records. A gap of g sizes takes log2(g) points for one edge in it; where a point in the
middle shows that both halves hold a part of the jump, both are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt

from quantbench.device import default_attention, default_dtype
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_int
from quantbench.providers.catalog import expand
from quantbench.stats import median
from quantbench.store.record import Measured, Record
from quantbench.sweep.axes import Axis
from quantbench.sweep.edges import NEIGHBOUR
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.plan import PlanPoint, build_plan
from quantbench.sweep.shapes import with_defaults

# A jump below this is followed no further, nor one below so many standard errors of the difference of two points.
_SMALLEST_JUMP = 0.02
_SURE = 3.0
# A half that holds less than this share of the jump is not searched beside the other one.
_WORTH_FOLLOWING = 0.25


@dataclass(frozen=True)
class Gap:
    """Two neighbouring sizes of a coarse pass between which the time jumps.

    low, high: the sizes; low_us, high_us: their times. elasticity: d log time / d log size where nothing steps.
    noise: standard error of a log time. grain: sizes that are no multiple of it are not looked at (rows that are not
    16-byte aligned are slow for a reason of their own).
    """

    low: int
    high: int
    low_us: float
    high_us: float
    elasticity: float = 0.0
    noise: float = 0.0
    grain: int = 1

    def __post_init__(self) -> None:
        require_int("Gap", "low", self.low)
        require_int("Gap", "high", self.high, low=self.low + 1)
        require_int("Gap", "grain", self.grain)
        for name in ("low_us", "high_us"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InputError("Gap", f"{name} = {getattr(self, name)!r}", "a finite time above 0")


@dataclass(frozen=True)
class Edge:
    """The time jumps by `ratio` between `low` and `high`. exact: no size of the grain lies between them."""

    low: int
    high: int
    ratio: float
    exact: bool


@dataclass
class EdgeSearch:
    """Looks for the edges in one gap. Ask `wanted`, measure there, `tell` the samples; `give_up` where that failed."""

    gap: Gap
    _times_us: dict[int, float] = field(default_factory=dict)
    _open: list[tuple[int, int]] = field(default_factory=list)
    _found: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._times_us = {self.gap.low: self.gap.low_us, self.gap.high: self.gap.high_us}
        self._open = [(self.gap.low, self.gap.high)]
        self._settle()

    @property
    def wanted(self) -> int | None:
        """The size to measure next; None when every edge is found."""
        return self._middle(*self._open[0]) if self._open else None

    def tell(self, samples_us: Sequence[float]) -> None:
        """The samples at the wanted size."""
        size = self._expect_wanted()
        self._times_us[size] = median(samples_us)
        low, high = self._open.pop(0)
        halves = [(low, size), (size, high)]
        jumps = [self._jump(*half) for half in halves]
        # Up or down: what counts is the part in the whole's direction.
        whole = self._jump(low, high)
        parts = [jump if whole > 0 else -jump for jump in jumps]
        least = max(_SMALLEST_JUMP, _SURE * sqrt(2) * self.gap.noise, _WORTH_FOLLOWING * abs(whole))
        larger = 0 if parts[0] >= parts[1] else 1
        for i, half in enumerate(halves):
            if i == larger or parts[i] >= least:
                self._open.append(half)
        self._settle()

    def give_up(self) -> None:
        """Nothing can be measured at the wanted size: the edge stays somewhere between its two sides."""
        self._expect_wanted()
        self._found.append(self._open.pop(0))

    def edges(self) -> tuple[Edge, ...]:
        """The edges found so far, by size, and what is still open as edges that are not exact."""
        intervals = sorted([*self._found, *self._open])
        return tuple(
            Edge(low, high, exp(self._jump(low, high)), self._middle(low, high) is None) for low, high in intervals
        )

    def _settle(self) -> None:
        """Put aside what cannot be halved any further."""
        self._found += [interval for interval in self._open if self._middle(*interval) is None]
        self._open = [interval for interval in self._open if self._middle(*interval) is not None]

    def _middle(self, low: int, high: int) -> int | None:
        """The multiple of the grain nearest the middle, strictly between; None where there is none."""
        grain = self.gap.grain
        first, last = low // grain + 1, -(-high // grain) - 1
        return None if first > last else grain * min(max(round((low + high) / 2 / grain), first), last)

    def _jump(self, low: int, high: int) -> float:
        """Rise of the log time from low to high beyond what growth along the axis accounts for."""
        return log(self._times_us[high] / self._times_us[low]) - self.gap.elasticity * log(high / low)

    def _expect_wanted(self) -> int:
        if self.wanted is None:
            raise InputError("EdgeSearch", "a measurement", "none: every edge is found")
        return self.wanted


def find_edges(gap: Gap, measure: Callable[[int], Sequence[float]]) -> tuple[Edge, ...]:
    """Drive a search to its end. measure: from a size to samples in microseconds.

    >>> calls = []
    >>> find_edges(Gap(1024, 2048, 10.0, 20.0), lambda n: calls.append(n) or [10.0 if n <= 1536 else 20.0])
    (Edge(low=1536, high=1537, ratio=2.0, exact=True),)
    >>> len(calls)
    10
    """
    search = EdgeSearch(gap)
    while (size := search.wanted) is not None:
        search.tell(measure(size))
    return search.edges()


@dataclass(frozen=True)
class PlacedGap:
    """A gap of one op and provider along `axis` (as `Place` spells it), the other axes held."""

    gap: Gap
    axis: str
    held: Mapping[str, int]
    op: str
    provider: str


#: from the records of a coarse pass to the gaps that hold a jump, the largest first
FindGaps = Callable[[Sequence[Record]], Sequence[PlacedGap]]


@dataclass
class Refine:
    """The `more` of a sweep with --refine: bisects to every edge that the coarse pass shows, all edges in step.

    axes: those of the plan, as the coarse pass ran them. find: looks at the coarse pass (steps are found a layer up,
    where measurements are given meaning). Nothing is kept between two calls but what the records say, so that a sweep
    that was stopped goes on where it was.
    """

    options: SweepOptions
    axes: tuple[Axis, ...]
    spec: DeviceSpec
    find: FindGaps
    _gaps: tuple[PlacedGap, ...] | None = None

    def __call__(self, records: Sequence[Record]) -> Sequence[PlanPoint]:
        """The next point of each search that is not at its end."""
        return [point for placed, search in self._searches(records) if (point := self._point(placed, search))]

    def edges(self, records: Sequence[Record]) -> tuple[tuple[PlacedGap, Edge], ...]:
        """Every edge as far as the records tell it."""
        return tuple((placed, edge) for placed, search in self._searches(records) for edge in search.edges())

    def _searches(self, records: Sequence[Record]) -> list[tuple[PlacedGap, EdgeSearch]]:
        """Each search as it stands, led through what was measured."""
        if self._gaps is None:
            self._gaps = tuple(self.find([record for record in records if self._is_coarse(record)]))
        outcomes = {
            (place.op, record.provider, *sorted(place.axes.items())): record.outcome
            for record in records
            if record.role == "point"
            for place in record.places
        }
        found = []
        for placed in self._gaps:
            search = EdgeSearch(placed.gap)
            while (size := search.wanted) is not None:
                at = sorted({**placed.held, placed.axis: size}.items())
                outcome = outcomes.get((placed.op, placed.provider, *at))
                if outcome is None:
                    break
                if isinstance(outcome, Measured) and outcome.grade.letter != "rejected":
                    search.tell(outcome.measurement.samples_us)
                else:
                    search.give_up()
            found.append((placed, search))
        return found

    def _is_coarse(self, record: Record) -> bool:
        values = {axis.field: axis.values for axis in self.axes}
        return record.role != "point" or any(
            all(value in values.get(name, ()) for name, value in place.axes.items()) for place in record.places
        )

    def _point(self, placed: PlacedGap, search: EdgeSearch) -> PlanPoint | None:
        """The plan's point for what the search wants; a size that cannot be ends the search there."""
        held = with_defaults(self.options.held, self.spec.kind, default_dtype(self.spec), default_attention(self.spec))
        providers = [name for name in expand(self.options.providers) if name == placed.provider]
        while (size := search.wanted) is not None:
            at = {**placed.held, placed.axis: size}
            axes = tuple(Axis(axis.dim, (at[axis.field],)) for axis in self.axes)
            try:
                plan = build_plan(axes, held, providers, self.options.timing, self.spec)
            except InputError:
                search.give_up()
                continue
            return next(point for point in plan.points if any(place.op == placed.op for place in point.places))
        return None


def grain_of(dim: str) -> int:
    """Steps in which an edge along a dimension is looked for: whole 16 bytes of 16-bit numbers where the dimension is
    a stored row's length, else 1.

    >>> grain_of("n"), grain_of("m")
    (8, 1)
    """
    return NEIGHBOUR.get(dim, 1)
