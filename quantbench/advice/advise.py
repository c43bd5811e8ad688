"""What a shape costs on a GPU, what of that is wasted past edges, and which shapes near it are better.

>>> from quantbench.device import lookup
>>> from quantbench.planner.op_times import RooflineTimes
>>> from quantbench.workload import TransformerShape
>>> shape = TransformerShape(hidden=1152, heads=12, layers=8, vocab=50304)
>>> advice = advise(shape, RooflineTimes(lookup("a100-sxm4-80gb")))
>>> advice.cost.latency.mid > advice.cost.waste_us
True
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantbench.advice.answers import Answers
from quantbench.advice.cost import ShapeCost, cost_of
from quantbench.advice.neighbours import Neighbour, Neighbours
from quantbench.advice.reasons import changes, reasons
from quantbench.advice.space import Space
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_int
from quantbench.planner.op_times import OpTimes
from quantbench.workload import TransformerShape

#: how many neighbours are named unless asked otherwise
TOP = 8


@dataclass(frozen=True)
class Advised:
    """A neighbour with what it changes, in words, and its own cost."""

    found: Neighbour
    changes: str
    cost: ShapeCost


@dataclass(frozen=True)
class Advice:
    """device, note: what the times are of, and what they rest on. cost: of the shape, op by op. neighbours: better
    shapes, those first that no nearer shape equals; singles: the best change of one thing alone, by its name. tried:
    how many shapes were looked at; space: among which."""

    device: DeviceSpec
    note: str
    cost: ShapeCost
    neighbours: tuple[Advised, ...]
    singles: tuple[Advised, ...]
    tried: int
    space: Space

    @property
    def shape(self) -> TransformerShape:
        """The shape that was asked about."""
        return self.cost.shape


def advise(shape: TransformerShape, times: OpTimes, *, space: Space | None = None, top: int = TOP) -> Advice:
    """Advice on `shape` on the GPU of `times`. top: how many neighbours to name, 0 to look at none.

    times: a latency model (`ModelledTimes`), a profile, or anything else that answers OpTimes. Raises InputError for a
    number format that the device has no peak for.
    """
    require_int("advise", "top", top, low=0)
    if times.device.peak(shape.dtype) is None:
        have = ", ".join(sorted(times.device.peak_tflops))
        raise InputError("advise", f"dtype = {shape.dtype!r} on {times.device.name}", f"one of {have}")
    answers, within = Answers(times, shape.softmax), space or Space()
    cost = cost_of(shape, answers)
    if not top:
        return Advice(times.device, answers.note, cost, (), (), 0, within)
    search = Neighbours(shape, answers, within)
    neighbours = _advised(search.best(top), cost, answers)
    singles = _advised(search.single(), cost, answers)
    return Advice(times.device, answers.note, cost, neighbours, singles, search.tried, within)


def _advised(found: Iterable[Neighbour], cost: ShapeCost, answers: Answers) -> tuple[Advised, ...]:
    advised = []
    for neighbour in found:
        own = cost_of(neighbour.shape, answers)
        # Per token and parameter, as the gain is.
        weight = cost.latency.mid / own.latency.mid / (1 + neighbour.gain)
        why = reasons(cost, own, weight)
        advised.append(Advised(replace(neighbour, reasons=why), changes(cost, own), own))
    return tuple(advised)
