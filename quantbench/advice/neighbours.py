"""Finds the shapes near a given one with the least predicted time per token and parameter.

Entry points: `Neighbours`, `fastest_first`, the type `Neighbour`; `AS_GOOD`, `WORTH_MOVING` and `LINE_ELEMENTS`. Used
by `advice.advise` and `explore.page`. (`analysis.neighbours` compares measured points.) Times are compared per token
and parameter, so that a smaller model does not win by its size alone. `gain` is the relative increase of tokens per
second at the shape's own number of parameters. Arithmetic without parameters (attention between all pairs of tokens)
counts as time only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quantbench.advice.cost import Shares, ratio_factor
from quantbench.advice.space import Space, alone, together, weights_bytes
from quantbench.latency.op_times import RememberedTimes
from quantbench.planner.formulas import useful_parameters
from quantbench.units import signed_percent
from quantbench.workload import Op, TransformerShape
from quantbench.workload.kinds import Compute

#: shapes whose times differ by a smaller share count as equally fast, because no model here resolves less.
AS_GOOD = 0.01
#: least gain of a neighbour that is returned.
WORTH_MOVING = 0.005
#: 16-bit elements in a cache line of 128 bytes; wider alignment of a head's rows brings nothing more.
LINE_ELEMENTS = 64


@dataclass(frozen=True)
class Neighbour:
    """A shape compared with the one asked about.

    gain: relative increase of tokens per second at equal parameters (0.03: 3 % more).
    low, high: 90 % interval of the gain. With a sliding window, which is not priced, it holds the gains with attention
        over all tokens and with none.
    parameters: number of parameters without padding of the vocabulary.
    more: relative difference of the parameters from those of the shape asked about.
    move: largest relative change among hidden, ffn and layers.
    nearest: whether no shape with a smaller move gains as much.
    reasons: why it is faster, the largest saving first.
    exchanges_more: whether more GPUs exchange tokens or sums than of the shape asked about, which is not priced.
    """

    shape: TransformerShape
    gain: float
    low: float
    high: float
    parameters: int
    more: float
    move: float
    nearest: bool
    reasons: tuple[str, ...] = ()
    exchanges_more: bool = False

    @property
    def sure(self) -> bool:
        """Whether the 90 % interval of the gain is above 0, and nothing that is not priced becomes slower."""
        return self.low > 0 and not self.exchanges_more

    @property
    def gain_words(self) -> str:
        return f"{signed_percent(self.gain)} ({signed_percent(self.low)} to {signed_percent(self.high)})"


@dataclass(frozen=True)
class _Timed:
    """A timed shape. us: GPU time per token and parameter. parts: share of each workload. move: see `Neighbour`."""

    shape: TransformerShape
    us: float
    parameters: int
    parts: Shares
    move: float


class Neighbours:
    """The shapes near `base`, timed.

    space: limits of the search; None: no neighbours.
    others: more shapes to time.
    """

    def __init__(
        self, base: TransformerShape, times: RememberedTimes, space: Space | None, others: Iterable[TransformerShape]
    ) -> None:
        self._source = times
        self._base = base
        singles, limit = alone(base, space) if space else {}, times.device.memory_bytes
        # Experts, spread over ep GPUs, must leave memory on each.
        self._singles = {
            name: [one for one in shapes if not one.experts or weights_bytes(one) < limit]
            for name, shapes in singles.items()
        }
        self._joint = list(together(base, space)) if space else []
        found = {base, *self._joint, *(shape for shapes in self._singles.values() for shape in shapes)}
        self.tried = len(found) - 1
        self._timed = _times({*found, *others}, times, base)

    def best(self, count: int) -> tuple[Neighbour, ...]:
        """Returns the best shape of each hidden size, at most `count`, that gain 0.5 % or more. Surely faster ones come
        first, then those that no nearer shape equals, then by time."""
        per_size: dict[int, list[_Timed]] = defaultdict(list)
        for shape in self._joint:
            per_size[shape.hidden].append(self._timed[shape])
        sure: list[_Timed] = []
        unsure: list[_Timed] = []
        for timed in per_size.values():
            surely = [one for one in timed if self._against_base(one).sure]
            (sure if surely else unsure).append(_choose(surely or timed, "heads"))
        return (*self._ranked(sure), *self._ranked(unsure))[:count]

    def _ranked(self, chosen: Sequence[_Timed]) -> tuple[Neighbour, ...]:
        nearest: set[TransformerShape] = set()
        record = float("inf")
        for timed in sorted(chosen, key=lambda t: (t.move, t.us)):
            if timed.us < record:
                record = timed.us
                nearest.add(timed.shape)
        ranked = sorted(chosen, key=lambda t: (t.shape not in nearest, t.us))
        return self._worth_it(ranked, nearest)

    def single(self) -> tuple[Neighbour, ...]:
        """Returns the best change of each dimension alone that gains enough, the largest gain first."""
        found: list[Neighbour] = []
        for name, shapes in self._singles.items():
            if shapes:
                best = _choose([self._timed[shape] for shape in shapes], name)
                found += self._worth_it([best], {best.shape})
        return tuple(sorted(found, key=lambda n: -n.gain))

    def against(self, shapes: Iterable[TransformerShape]) -> tuple[Neighbour, ...]:
        """Compares shapes of `others` with the base, whatever their gain."""
        return tuple(self._against_base(self._timed[shape]) for shape in shapes)

    def _worth_it(self, ranked: Iterable[_Timed], nearest: set[TransformerShape]) -> tuple[Neighbour, ...]:
        found = (self._against_base(timed, nearest=timed.shape in nearest) for timed in ranked)
        return tuple(one for one in found if one.gain >= WORTH_MOVING)

    def _against_base(self, timed: _Timed, *, nearest: bool = False) -> Neighbour:
        base = self._timed[self._base]
        ratio = base.us / timed.us
        factor = ratio_factor(base.parts, timed.parts, self._source.common_error)
        more = timed.parameters / base.parameters - 1
        least = most = ratio
        if 0 < self._base.sliding_window < self._base.seq:
            without = ratio * (1 - _attention(base)) / (1 - _attention(timed))
            least, most = min(ratio, without), max(ratio, without)
        grows = timed.shape.ep > self._base.ep or timed.shape.tp > self._base.tp
        return Neighbour(
            timed.shape, ratio - 1, least / factor - 1, most * factor - 1, timed.parameters, more, timed.move, nearest,
            exchanges_more=grows,
        )  # fmt: skip


def _attention(timed: _Timed) -> float:
    """Returns the share of fused attention in the time of a shape."""
    return sum(share for work, (share, _) in timed.parts.items() if work.kind == "attention")


def fastest_first(shapes: Iterable[TransformerShape], times: RememberedTimes) -> list[TransformerShape]:
    """Sorts shapes by predicted time per token and parameter, not counting padding of the vocabulary."""
    asked = list(shapes)
    timed = _times(asked, times, min(asked, key=lambda shape: shape.vocab))
    return sorted(asked, key=lambda shape: timed[shape].us)


def _times(
    shapes: Iterable[TransformerShape], times: RememberedTimes, base: TransformerShape
) -> dict[TransformerShape, _Timed]:
    ops = {shape: shape.modelled_ops() for shape in shapes}
    times.ask(op.workload for own in ops.values() for op in own)
    return {shape: _time(shape, own, times, base) for shape, own in ops.items()}


def _time(shape: TransformerShape, ops: Sequence[Op], times: RememberedTimes, base: TransformerShape) -> _Timed:
    us_of: dict[Compute, float] = defaultdict(float)
    for op in ops:
        us_of[op.workload] += times.estimate(op.workload).latency_us * op.count
    total_us = sum(us_of.values())
    parts = {work: (us / total_us, times.estimate(work)) for work, us in us_of.items()}
    count = useful_parameters(shape, base.vocab)
    pairs = ((getattr(shape, name), getattr(base, name)) for name in ("hidden", "ffn", "layers"))
    move = max(abs(own / other - 1) for own, other in pairs)
    return _Timed(shape, total_us * shape.tp / shape.tokens / count, count, parts, move)


# Sort keys for changes of one dimension that are as fast as the fastest: the best alignment of the heads' rows; the
# smallest micro-batch, because larger ones take memory; else the time.
_PREFERENCES: dict[str, Callable[[_Timed], tuple[float, ...]]] = {
    "heads": lambda t: (-min(LINE_ELEMENTS, t.shape.head_dim & -t.shape.head_dim), t.us),
    "mbs": lambda t: (t.shape.mbs,),
}


def _choose(timed: Sequence[_Timed], name: str) -> _Timed:
    """Returns the preferred one among those within AS_GOOD of the fastest."""
    least = min(t.us for t in timed)
    return min((t for t in timed if t.us <= least * (1 + AS_GOOD)), key=_PREFERENCES.get(name, lambda t: (t.us,)))
