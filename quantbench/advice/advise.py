"""What a shape costs on a GPU, what of that is wasted past edges, and which shapes near it are better.

>>> from quantbench.device import lookup
>>> from quantbench.latency.op_times import RooflineTimes
>>> from quantbench.workload import TransformerShape
>>> shape = TransformerShape(hidden=1152, heads=12, layers=8, vocab=50304)
>>> advice = advise(shape, RooflineTimes(lookup("a100-sxm4-80gb")))
>>> advice.cost.latency.latency_us > advice.cost.waste_us
True
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantbench.advice.cost import OpCost, ShapeCost, cost_of
from quantbench.advice.neighbours import Neighbour, Neighbours, fastest_first
from quantbench.advice.reasons import changes, reasons
from quantbench.advice.space import Repair, Space
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_int
from quantbench.latency.op_times import OpTimes, RememberedTimes
from quantbench.planner.calibration import shipped
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
class Unmeasured:
    """A reason why times rest on no measurement. ops: of which; share: of the shape's time."""

    reason: str
    ops: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Advice:
    """device, note: what the times are of, and what they rest on. cost: of the shape, op by op. unmeasured: what of its
    time rests on no measurement, the largest share first. neighbours: shapes near it that are predicted to be faster,
    those first that are surely so, then those that no nearer shape equals; singles: the best change of one thing alone.
    tried: how many shapes were looked at; space: among which. repair: where tp could not split the shape that was asked
    about; `cost` is then of the fastest repaired shape, and repaired are the others, held against it."""

    device: DeviceSpec
    note: str
    cost: ShapeCost
    unmeasured: tuple[Unmeasured, ...]
    neighbours: tuple[Advised, ...]
    singles: tuple[Advised, ...]
    tried: int
    space: Space
    repair: Repair | None = None
    repaired: tuple[Advised, ...] = ()

    @property
    def shape(self) -> TransformerShape:
        """The shape that was asked about; the fastest repaired one where tp could not split it."""
        return self.cost.shape

    @property
    def better(self) -> tuple[Advised, ...]:
        """Neighbours that are surely faster: the whole interval of their gain is above 0."""
        return tuple(one for one in self.neighbours if one.found.sure)

    @property
    def better_alone(self) -> tuple[Advised, ...]:
        """Changes of one thing alone that are surely faster."""
        return tuple(one for one in self.singles if one.found.sure)

    @property
    def keep(self) -> bool:
        """Whether no other shape is surely faster (a larger micro-batch is the same shape)."""
        return not any(one.found.shape.mbs == self.shape.mbs for one in (*self.better, *self.better_alone))

    @property
    def compared(self) -> tuple[Advised, ...]:
        """Every other shape that is named, each once."""
        found = {one.found.shape: one for one in (*self.repaired, *self.neighbours, *self.singles)}
        return tuple(found.values())


def advise(
    shape: TransformerShape,
    times: OpTimes,
    *,
    space: Space | None = None,
    top: int = TOP,
    repair: Repair | None = None,
    kernels: OpTimes | None = None,
) -> Advice:
    """Advice on `shape` on the GPU of `times`.

    times: latency models (`ModelTimes`), a profile, or anything else that answers `OpTimes`.
    space: which neighbours are tried.
    top: how many neighbours to name, 0 to look at none.
    repair: from `repaired`, shapes that stand in for `shape` (its tp is 1 then) where tp cannot split it; the fastest
        per token and parameter is advised on.
    kernels: where launches are asked for that `times` does not name; without it the device's assumed tile stands in.

    Raises InputError for a number format that the device has no peak for.
    """
    require_int("advise", "top", top, low=0)
    if times.device.peak(shape.dtype) is None:
        have = ", ".join(sorted(times.device.peak_tflops))
        raise InputError("advise", f"dtype = {shape.dtype!r} on {times.device.name}", f"one of {have}")
    share = shipped().elsewhere.unaligned_share
    known = RememberedTimes(times, softmax=shape.softmax, unaligned_share=share, kernels=kernels)
    within = space or Space()
    others: tuple[TransformerShape, ...] = ()
    if repair is not None:
        shape, *rest = fastest_first(repair.shapes, known)
        others = tuple(rest)
    cost = cost_of(shape, known)
    unmeasured = _unmeasured(cost)
    if not top and not others:
        return Advice(times.device, known.note, cost, unmeasured, (), (), 0, within, repair)
    search = Neighbours(shape, known, within if top else None, others)
    return Advice(
        times.device, known.note, cost, unmeasured, _advised(search.best(top), cost, known),
        _advised(search.single(), cost, known), search.tried, within, repair,
        _advised(search.against(others), cost, known),
    )  # fmt: skip


def _unmeasured(cost: ShapeCost) -> tuple[Unmeasured, ...]:
    ops: dict[str, list[OpCost]] = defaultdict(list)
    for op in cost.ops:
        if op.latency.unmeasured:
            ops[op.latency.unmeasured].append(op)
    found = [
        Unmeasured(reason, tuple(op.op.label for op in own), sum(op.total_us for op in own) / cost.latency.latency_us)
        for reason, own in ops.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.share))


def _advised(found: Iterable[Neighbour], cost: ShapeCost, times: RememberedTimes) -> tuple[Advised, ...]:
    advised = []
    for neighbour in found:
        own = cost_of(neighbour.shape, times)
        # Per token and parameter, as the gain is.
        weight = cost.latency.latency_us / own.latency.latency_us / (1 + neighbour.gain)
        why = reasons(cost, own, weight)
        advised.append(Advised(replace(neighbour, reasons=why), changes(cost, own), own))
    return tuple(advised)
