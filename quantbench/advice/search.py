"""Searches the transformer shapes near a given shape for those that are predicted to be fastest.

`Search` predicts all times at the start, and returns the best shapes in several selections. Times
are divided by the numbers of tokens and parameters, so a smaller model does not win only by its
size. Attention scores have no parameters, so they add to the time but not to the divisor.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from quantbench.advice.cost import Shares, ratio_factor
from quantbench.advice.space import Group, Space, shapes_near
from quantbench.latency.op_times import CachedTimes
from quantbench.units import signed_percent
from quantbench.workload import Op, TransformerShape
from quantbench.workload.kinds import Compute
from quantbench.workload.parameters import useful_parameters

#: Largest relative difference between two predicted times that count as equally fast. The latency
#: models do not resolve smaller differences.
EQUAL_WITHIN = 0.01
#: smallest gain for which a shape is returned
MIN_GAIN = 0.005
#: Number of 16-bit elements in a cache line of 128 bytes. Alignment of head_dim beyond a cache line
#: has no effect.
LINE_ELEMENTS = 64


@dataclass(frozen=True)
class Neighbour:
    """A shape near the given shape, and its predicted gain.

    gain: relative increase of tokens per second for an equal number of parameters (0.03 means 3 %
        more).
    low, high: 90 % interval of the gain. For shapes with a sliding window, the model predicts
        attention over all tokens. The interval then covers two extremes: the full time of this
        attention, and no time for attention.
    parameters: number of parameters, without padding of the vocabulary.
    parameters_change: relative difference from the given shape's number of parameters.
    move: largest relative difference from the given shape in hidden, ffn or layers.
    nearest: whether no shape with a smaller move gains as much. Surely faster shapes are compared
        only with each other, and so are the remaining shapes (see `Search.best`).
    reasons: why the shape is faster, largest saving first.
    adds_communication: whether the shape has a larger tp or ep than the given shape. The time of
        the additional communication is not predicted.
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
    adds_communication: bool = False

    @property
    def sure(self) -> bool:
        """Whether the shape is surely faster than the given shape.

        The gain's whole 90 % interval must be above 0, and the shape must add no communication,
        because communication has no model here.
        """
        return self.low > 0 and not self.adds_communication

    @property
    def gain_words(self) -> str:
        """The gain and its interval as text, in percent."""
        gain, low, high = map(signed_percent, (self.gain, self.low, self.high))
        return f"{gain} ({low} to {high})"


@dataclass(frozen=True)
class _Timed:
    """A shape with its predicted time.

    us: time in GPU-µs per token and parameter, summed over the tp GPUs.
    parameters: number of parameters, without padding of the vocabulary.
    shares: for each workload, its fraction of the time and its estimate (see `cost.Shares`).
    attention: fraction of the time that fused attention takes, 0 to 1.
    move: as in `Neighbour`.
    """

    shape: TransformerShape
    us: float
    parameters: int
    shares: Shares
    attention: float
    move: float


class Search:
    """Search for the fastest shapes near a given shape. All times are predicted at the start.

    base: the given shape.
    times: op times on one GPU.
    space: limits of the shapes to try; None to try no other shapes.
    runs: function that returns whether a shape runs without a crash. Shapes that crash are left
        out, unless all shapes near the base crash.
    """

    def __init__(
        self,
        base: TransformerShape,
        times: CachedTimes,
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
        """Returns the best shape of each hidden size, at most `count` shapes in total.

        Shapes that gain less than MIN_GAIN are left out. The order has three criteria: surely
        faster shapes first, then shapes with `nearest` set, then shapes with less time.
        """
        found: dict[bool, list[_Timed]] = {True: [], False: []}
        for group, timed in self._joint.items():
            chosen = self._surest(group, timed)
            found[self._compared(chosen).sure].append(chosen)
        return (*self._ranked(found[True]), *self._ranked(found[False]))[:count]

    def alike(self, listed: Iterable[Neighbour] = ()) -> tuple[Neighbour, ...]:
        """Returns the best shape with as many heads as the base, and the best with its head_dim.

        Shapes that gain less than MIN_GAIN are left out.

        listed: shapes to leave out, because the caller already lists them.
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
        """Returns the best shape for each single changed dimension, largest gain first.

        Shapes that gain less than MIN_GAIN are left out.
        """
        found = []
        for group, timed in self._single.items():
            found.append(self._compared(_preferred(group, timed)))
        return _worthwhile(sorted(found, key=lambda one: -one.gain))

    def _surest(self, group: Group, timed: Sequence[_Timed]) -> _Timed:
        """Returns the preferred shape (`_preferred`) among the surely faster shapes of a group.

        If no shape is surely faster, it is the preferred shape among all of them.

        timed: shapes of the group.
        """
        sure = [one for one in timed if self._compared(one).sure]
        return _preferred(group, sure or timed)

    def _ranked(self, chosen: Sequence[_Timed]) -> tuple[Neighbour, ...]:
        """Finds the nearest shapes, and returns all worthwhile shapes in the order of `best`.

        chosen: best shapes of several groups, either all surely faster or none surely faster.
        """
        nearest: set[TransformerShape] = set()
        record = float("inf")
        for timed in sorted(chosen, key=lambda one: (one.move, one.us)):
            if timed.us < record:
                record = timed.us
                nearest.add(timed.shape)
        ranked = sorted(chosen, key=lambda one: (one.shape not in nearest, one.us))
        return _worthwhile(self._compared(one, nearest=one.shape in nearest) for one in ranked)

    def _compared(self, timed: _Timed, *, nearest: bool = False) -> Neighbour:
        """Compares a shape with the base: computes the gain and its interval.

        nearest: value of `Neighbour.nearest`.
        """
        base = self._base
        ratio = base.us / timed.us
        factor = ratio_factor(base.shares, timed.shares, self._times.common_error)
        ratios = [ratio]
        # A sliding window shortens attention by an unknown factor. The interval therefore covers
        # both extremes: the ratio of the full times, and that of the times without attention.
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
            adds_communication=timed.shape.ep > base.shape.ep or timed.shape.tp > base.shape.tp,
        )


def _time(
    shape: TransformerShape, ops: Iterable[Op], times: CachedTimes, base: TransformerShape
) -> _Timed:
    """Predicts the time of a shape.

    ops: ops of the shape that have latency models.
    base: the given shape, with which `move` compares the shape.
    """
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
    """Returns the neighbours that gain at least MIN_GAIN."""
    return tuple(one for one in found if one.gain >= MIN_GAIN)


def _preferred(group: Group, timed: Sequence[_Timed]) -> _Timed:
    """Selects one shape of a group among those that are about equally fast (within EQUAL_WITHIN).

    - If only the micro-batch size changes, the smallest one is selected, because it needs the least
      memory.
    - If the number of heads may change, the shape with the best aligned head_dim is selected, and
      the fastest one among equally aligned shapes.
    - Otherwise, the fastest shape is selected.

    timed: shapes of the group.
    """

    def rank(one: _Timed) -> tuple[float, ...]:
        if group.changed == "mbs":
            return (one.shape.mbs,)
        if group.joint or group.changed == "heads":
            return (-min(LINE_ELEMENTS, one.shape.head_dim & -one.shape.head_dim), one.us)
        return (one.us,)

    longest_us = min(one.us for one in timed) * (1 + EQUAL_WITHIN)
    return min((one for one in timed if one.us <= longest_us), key=rank)
