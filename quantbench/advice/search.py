"""Finds the transformer shapes near a given shape that have the least predicted time.

Times are per token and parameter, so that a smaller model does not win only by its size. Arithmetic
without parameters (attention between all pairs of tokens) adds to the time only.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from quantbench.advice.cost import Shares, ratio_factor
from quantbench.advice.space import Group, Space, shapes_near
from quantbench.latency.op_times import RememberedTimes
from quantbench.units import signed_percent
from quantbench.workload import Op, TransformerShape
from quantbench.workload.kinds import Compute
from quantbench.workload.parameters import useful_parameters

#: Shapes whose times differ by a smaller share count as equally fast, because no model here
#: resolves smaller differences.
AS_GOOD = 0.01
#: smallest gain of a neighbour that is returned
WORTH_MOVING = 0.005
#: Number of 16-bit elements in a cache line of 128 bytes. Aligning a head's rows to more has no
#: effect.
LINE_ELEMENTS = 64


@dataclass(frozen=True)
class Neighbour:
    """A shape near the given shape, and its predicted gain.

    gain: relative increase of tokens per second at equal parameters (0.03 means 3 % more).
    low, high: 90 % interval of the gain. For a shape with a sliding window, which is not modelled,
        the interval contains the gain with attention over all tokens and the gain without
        attention.
    parameters: number of parameters without padding of the vocabulary.
    parameters_change: relative change of the number of parameters from the given shape.
    move: largest relative change among hidden, ffn and layers.
    nearest: whether no shape with a smaller move gains as much.
    reasons: why the shape is faster, largest saving first.
    exchanges_more: whether the shape has a larger tensor- or expert-parallel degree than the given
        shape. The time of the added communication is not counted.
    """

    shape: TransformerShape
    gain: float
    low: float
    high: float
    parameters: int
    parameters_change: float
    move: float
    nearest: bool
    reasons: tuple[str, ...] = ()
    exchanges_more: bool = False

    @property
    def sure(self) -> bool:
        """Whether the shape is surely faster.

        The 90 % interval of its gain is above 0, and it adds no communication, which has no model.
        """
        return self.low > 0 and not self.exchanges_more

    @property
    def gain_words(self) -> str:
        gain, low, high = map(signed_percent, (self.gain, self.low, self.high))
        return f"{gain} ({low} to {high})"


@dataclass(frozen=True)
class _Timed:
    """A shape with its predicted time.

    us: GPU time in µs per token and parameter.
    shares: share of each workload in the time, and its estimate.
    attention: share of fused attention in the time.
    move: largest relative change, as in `Neighbour`.
    """

    shape: TransformerShape
    us: float
    parameters: int
    shares: Shares
    attention: float
    move: float


class Search:
    """Search for the best shapes near a given shape, whose times are all predicted at the start.

    base: given shape.
    times: predicted times of single ops.
    space: limits of the search; None to try no other shape.
    runs: function that says whether a shape runs at all. Shapes that do not are left out if any
        shape runs.
    """

    def __init__(
        self,
        base: TransformerShape,
        times: RememberedTimes,
        space: Space | None,
        runs: Callable[[TransformerShape], bool] = lambda _: True,
    ) -> None:
        self._times = times
        near = shapes_near(base, space, times.device.memory_bytes) if space else {}
        running = {group: list(filter(runs, found)) for group, found in near.items()}
        groups = {group: found for group, found in running.items() if found} or near
        shapes = {base}.union(*groups.values())
        self.tried = len(shapes) - 1
        ops = {shape: shape.modelled_ops() for shape in shapes}
        times.ask(op.workload for op in chain(*ops.values()))
        timed = {shape: _time(shape, ops[shape], times, base) for shape in shapes}
        self._base = timed[base]
        self._joint: dict[Group, list[_Timed]] = {}
        self._single: dict[Group, list[_Timed]] = {}
        for group, found in groups.items():
            of_kind = self._joint if group.joint else self._single
            of_kind[group] = [timed[shape] for shape in found]

    def best(self, count: int) -> tuple[Neighbour, ...]:
        """Returns the best shape of each hidden size that gains 0.5 % or more, at most `count`.

        Surely faster shapes come before all others. In both groups, the shapes with `nearest` set
        come first, and faster shapes come before slower ones.
        """
        found: dict[bool, list[_Timed]] = {True: [], False: []}
        for group, timed in self._joint.items():
            chosen = self._surest(group, timed)
            found[self._compared(chosen).sure].append(chosen)
        return (*self._ranked(found[True]), *self._ranked(found[False]))[:count]

    def alike(self, listed: Iterable[Neighbour] = ()) -> tuple[Neighbour, ...]:
        """Returns the best shape with as many heads, and the best shape with heads of equal width.

        A shape that gains too little is left out.

        listed: shapes that are left out, because they are listed already.
        """
        known = [one.shape for one in listed]
        found = []
        for name in ("heads", "head_dim"):
            size = getattr(self._base.shape, name)
            same = []
            for timed in chain.from_iterable(self._joint.values()):
                if getattr(timed.shape, name) == size:
                    same.append(timed)
            if same:
                chosen = self._compared(self._surest(Group("hidden", 0), same))
                if chosen.shape not in known:
                    known.append(chosen.shape)
                    found.append(chosen)
        return _worthwhile(found)

    def single(self) -> tuple[Neighbour, ...]:
        """Returns the best change of each dimension alone that gains enough, largest gain first."""
        found = []
        for group, timed in self._single.items():
            found.append(self._compared(_preferred(group, timed)))
        return _worthwhile(sorted(found, key=lambda one: -one.gain))

    def _surest(self, group: Group, timed: Sequence[_Timed]) -> _Timed:
        """Returns the preferred one of the shapes that are surely faster.

        If no shape is surely faster, it returns the preferred one of all shapes.
        """
        sure = [one for one in timed if self._compared(one).sure]
        return _preferred(group, sure or timed)

    def _ranked(self, chosen: Sequence[_Timed]) -> tuple[Neighbour, ...]:
        nearest: set[TransformerShape] = set()
        record = float("inf")
        for timed in sorted(chosen, key=lambda one: (one.move, one.us)):
            if timed.us < record:
                record = timed.us
                nearest.add(timed.shape)
        ranked = sorted(chosen, key=lambda one: (one.shape not in nearest, one.us))
        return _worthwhile(self._compared(one, nearest=one.shape in nearest) for one in ranked)

    def _compared(self, timed: _Timed, *, nearest: bool = False) -> Neighbour:
        base = self._base
        ratio = base.us / timed.us
        factor = ratio_factor(base.shares, timed.shares, self._times.common_error)
        ratios = [ratio]
        if 0 < base.shape.sliding_window < base.shape.seq:
            ratios.append(ratio * (1 - base.attention) / (1 - timed.attention))
        return Neighbour(
            shape=timed.shape,
            gain=ratio - 1,
            low=min(ratios) / factor - 1,
            high=max(ratios) * factor - 1,
            parameters=timed.parameters,
            parameters_change=timed.parameters / base.parameters - 1,
            move=timed.move,
            nearest=nearest,
            exchanges_more=timed.shape.ep > base.shape.ep or timed.shape.tp > base.shape.tp,
        )


def _time(
    shape: TransformerShape, ops: Iterable[Op], times: RememberedTimes, base: TransformerShape
) -> _Timed:
    us_of: dict[Compute, float] = defaultdict(float)
    for op in ops:
        us_of[op.workload] += times.estimate(op.workload).latency_us * op.count
    total_us = sum(us_of.values())
    shares = {}
    attention = 0.0
    for work, us in us_of.items():
        share = us / total_us
        shares[work] = (share, times.estimate(work))
        if work.kind == "attention":
            attention += share
    moves = [shape.hidden / base.hidden, shape.ffn / base.ffn, shape.layers / base.layers]
    count = useful_parameters(shape, base.vocab)
    return _Timed(
        shape=shape,
        us=total_us * shape.tp / shape.tokens / count,
        parameters=count,
        shares=shares,
        attention=attention,
        move=max(max(moves) - 1, 1 - min(moves)),
    )


def _worthwhile(found: Iterable[Neighbour]) -> tuple[Neighbour, ...]:
    return tuple(one for one in found if one.gain >= WORTH_MOVING)


def _preferred(group: Group, timed: Sequence[_Timed]) -> _Timed:
    """Returns the preferred one of the shapes whose times are within AS_GOOD of the fastest.

    If only the micro-batch changes, it is the shape with the smallest micro-batch, which takes the
    least memory. If heads change, it is the shape whose head rows are aligned best. Otherwise it is
    the fastest shape.
    """

    def rank(one: _Timed) -> tuple[float, ...]:
        if group.changed == "mbs":
            return (one.shape.mbs,)
        if group.joint or group.changed == "heads":
            return (-min(LINE_ELEMENTS, one.shape.head_dim & -one.shape.head_dim), one.us)
        return (one.us,)

    longest_us = min(one.us for one in timed) * (1 + AS_GOOD)
    return min((one for one in timed if one.us <= longest_us), key=rank)
