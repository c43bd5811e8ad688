"""Cliffs as pictures and tables show them, wherever they were found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quantbench.analysis.steps import Step
from quantbench.analysis.summary import Point


@dataclass(frozen=True)
class Mark:
    """Between two neighbouring points of a curve the time per unit of work jumps by `ratio` (1.3: 30 % longer).

    low, high: its 95 % interval, None for figures without a spread. cause: in words.
    """

    axis: str
    before: Point
    after: Point
    ratio: float
    low: float | None
    high: float | None
    cause: str

    @property
    def op(self) -> str:
        return self.after.op

    @property
    def held(self) -> dict[str, int]:
        """The other axes."""
        return {name: value for name, value in self.after.axes.items() if name != self.axis}


def marks_of_steps(steps: Iterable[Step]) -> tuple[Mark, ...]:
    """A fall of the rate by `drop` is a rise of the time per unit of work by 1 / (1 − drop)."""
    found = []
    for step in steps:
        known = step.before.num_samples > 1 and step.after.num_samples > 1
        low, high = (1 / (1 - step.low), 1 / (1 - step.high)) if known else (None, None)
        found.append(Mark(step.axis, step.before, step.after, 1 / (1 - step.drop), low, high, step.cause))
    return tuple(found)
