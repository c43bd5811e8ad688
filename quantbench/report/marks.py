"""Cliffs as pictures and tables show them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantbench.analysis.cliffs import Cliff
from quantbench.analysis.summary import Point

#: what tells one point of a run from another: its record, its op and its place
PlaceKey = tuple[str, str, tuple[tuple[str, int], ...]]
# What a cause rests on, in words.
_TOLD_BY = {"identity": "by the kernel that ran", "arithmetic": "by arithmetic", "clock": "by the clock"}


@dataclass(frozen=True)
class Mark:
    """Between two neighbouring points of a curve the time jumps by `ratio` beyond the trend around it (1.3: 30 %).

    low, high: its 95 % interval. cause: in words, with what it rests on.
    """

    axis: str
    before: Point
    after: Point
    ratio: float
    low: float
    high: float
    cause: str

    @property
    def held(self) -> dict[str, int]:
        """The other axes."""
        return {name: value for name, value in self.after.axes.items() if name != self.axis}


def place_key(point: Point) -> PlaceKey:
    """The same for the same point, however often the run was read."""
    return (point.key, point.op, tuple(point.axes.items()))


def marks_of(cliffs: Iterable[Cliff]) -> tuple[Mark, ...]:
    """Cliffs in the order given."""
    return tuple(
        Mark(c.axis, c.before, c.after, c.ratio, c.low, c.high, f"{c.cause.words} ({_TOLD_BY[c.cause.evidence]})")
        for c in cliffs
    )
