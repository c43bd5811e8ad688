"""Finds the shapes near a given one with the least predicted time per token and parameter.

Times are compared per token and parameter, so that a smaller model does not win by its size alone.
Arithmetic without parameters (attention between all pairs of tokens) counts as time only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantbench.advice.cost import Shares, ratio_factor
from quantbench.advice.space import Group, Space, shapes_near
from quantbench.latency.op_times import RememberedTimes
from quantbench.units import signed_percent
from quantbench.workload import Op, TransformerShape
from quantbench.workload.kinds import Compute
from quantbench.workload.parameters import useful_parameters

#: shapes whose times differ by a smaller share count as equally fast, because no model here
#: resolves less.
AS_GOOD = 0.01
#: least gain of a neighbour that is returned.
WORTH_MOVING = 0.005
#: 16-bit elements in a cache line of 128 bytes; wider alignment of a head's rows brings nothing
#: more.
LINE_ELEMENTS = 64


@dataclass(frozen=True)
class Neighbour:
    """A shape near the one asked about, compared with it.

    gain: relative increase of tokens per second at equal parameters (0.03: 3 % more).
    low, high: 90 % interval of the gain. With a sliding window, which is not priced, it holds the
        gains with attention over all tokens and with none.
    parameters: number of parameters without padding of the vocabulary.
    parameters_change: relative difference of the parameters from those of the shape asked about.
    move: largest relative change among hidden, ffn and layers.
    nearest: whether no shape with a smaller move gains as much.
    reasons: why it is faster, the largest saving first.
    exchanges_more: whether more GPUs exchange tokens or sums than of the shape asked about, which
        is not priced.
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
        """Whether the 90 % interval of the gain is above 0, and nothing that is not priced becomes
        slower.
        """
        return self.low > 0 and not self.exchanges_more

    @property
    def gain_words(self) -> str:
        return f"{signed_percent(self.gain)} ({signed_percent(self.low)} to {signed_percent(self.high)})"


@dataclass(frozen=True)
class _Timed:
    """A timed shape.

    us: GPU time per token and parameter.
    shares: of each workload in the time.
    attention: share of fused attention in the time.
    move: see `Neighbour`.
    """

    shape: TransformerShape
    us: float
    parameters: int
    shares: Shares
    attention: float
    move: float


class Search:
    """The shapes near `base`, timed. space: limits of the search; None: no neighbours."""

    def __init__(self, base: TransformerShape, times: RememberedTimes, space: Space | None) -> None:
        self._times = times
        groups = shapes_near(base, space, times.device.memory_bytes) if space else {}
        shapes = {base, *(shape for group in groups.values() for shape in group)}
        self.tried = len(shapes) - 1
        ops = {shape: shape.modelled_ops() for shape in shapes}
        times.ask(op.workload for of_shape in ops.values() for op in of_shape)
        timed = {shape: _time(shape, of_shape, times, base) for shape, of_shape in ops.items()}
        self._base = timed[base]
        self._groups = {
            group: [timed[shape] for shape in found] for group, found in groups.items() if found
        }

    def best(self, count: int) -> tuple[Neighbour, ...]:
        """Returns the best shape of each hidden size, at most `count`, that gain 0.5 % or more.
        Surely faster ones come first, then those that no nearer shape equals, then by time."""
        sure: list[_Timed] = []
        unsure: list[_Timed] = []
        for group, timed in self._groups.items():
            if group.joint:
                surely = [one for one in timed if self._compared(one).sure]
                (sure if surely else unsure).append(_preferred(group, surely or timed))
        return (*self._ranked(sure), *self._ranked(unsure))[:count]

    def alike(self) -> tuple[Neighbour, ...]:
        """Returns the best shape with as many heads as the one asked about, and the best with heads
        as wide.
        """
        joint = [one for group, timed in self._groups.items() if group.joint for one in timed]
        found = {}
        for name in ("heads", "head_dim"):
            same = [
                one for one in joint if getattr(one.shape, name) == getattr(self._base.shape, name)
            ]
            surely = [one for one in same if self._compared(one).sure]
            if same:
                chosen = _preferred(Group("hidden", 0), surely or same)
                found[chosen.shape] = self._compared(chosen)
        return tuple(one for one in found.values() if one.gain >= WORTH_MOVING)

    def single(self) -> tuple[Neighbour, ...]:
        """Returns the best change of each dimension alone that gains enough, the largest gain
        first.
        """
        chosen = [
            _preferred(group, timed) for group, timed in self._groups.items() if not group.joint
        ]
        found = [self._compared(one, nearest=True) for one in chosen]
        return tuple(
            sorted((one for one in found if one.gain >= WORTH_MOVING), key=lambda one: -one.gain)
        )

    def _ranked(self, chosen: Sequence[_Timed]) -> tuple[Neighbour, ...]:
        nearest: set[TransformerShape] = set()
        record = float("inf")
        for timed in sorted(chosen, key=lambda one: (one.move, one.us)):
            if timed.us < record:
                record = timed.us
                nearest.add(timed.shape)
        ranked = sorted(chosen, key=lambda one: (one.shape not in nearest, one.us))
        found = (self._compared(one, nearest=one.shape in nearest) for one in ranked)
        return tuple(one for one in found if one.gain >= WORTH_MOVING)

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
    shares = {work: (us / total_us, times.estimate(work)) for work, us in us_of.items()}
    count = useful_parameters(shape, base.vocab)
    sizes = ((getattr(shape, name), getattr(base, name)) for name in ("hidden", "ffn", "layers"))
    return _Timed(
        shape=shape,
        us=total_us * shape.tp / shape.tokens / count,
        parameters=count,
        shares=shares,
        attention=sum(share for work, (share, _) in shares.items() if work.kind == "attention"),
        move=max(abs(new / old - 1) for new, old in sizes),
    )


def _preferred(group: Group, timed: Sequence[_Timed]) -> _Timed:
    """Returns, of those within AS_GOOD of the fastest, the one with the best aligned rows of its
    heads if they change, that with the smallest micro-batch if it does, because larger ones take
    memory, else the fastest."""

    def rank(one: _Timed) -> tuple[float, ...]:
        if group.changed == "mbs":
            return (one.shape.mbs,)
        if group.joint or group.changed == "heads":
            return (-min(LINE_ELEMENTS, one.shape.head_dim & -one.shape.head_dim), one.us)
        return (one.us,)

    least_us = min(one.us for one in timed)
    return min((one for one in timed if one.us <= least_us * (1 + AS_GOOD)), key=rank)
