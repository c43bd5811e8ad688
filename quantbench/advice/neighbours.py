"""The best shapes near one: by predicted time per token at equal parameters, and by how far one must move for it.

A smaller model is faster for being small, so times are held against each other per token and parameter: `gain` is how
many more tokens a second the neighbour's ops would take at the shape's own number of parameters. Arithmetic that
parameters do not pay for (attention between all pairs of tokens) counts as time and as nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantbench.advice.cost import Parts, ratio_factor
from quantbench.advice.space import Space, alone, together
from quantbench.latency.op_times import RememberedTimes
from quantbench.planner.formulas import useful_parameters
from quantbench.units import signed_percent
from quantbench.workload import Op, TransformerShape
from quantbench.workload.transformer import Compute

# Shapes whose times differ by less are as good as each other: no model here tells them apart.
_AS_GOOD = 0.01
# A neighbour must promise this much.
_WORTH_MOVING = 0.005
# Rows of heads in whole cache lines of 128 bytes; wider alignment is worth nothing more.
_LINE_ELEMENTS = 64


@dataclass(frozen=True)
class Neighbour:
    """A shape near the one asked about. gain: tokens per second at equal parameters, as a share more; low, high: nine
    times out of ten. parameters: of it, a padded vocabulary left out; more: the change in them, as a share. move: the
    largest relative change among hidden, ffn and layers. nearest: whether no shape that is nearer gains as much.
    reasons: why, the largest saving first."""

    shape: TransformerShape
    gain: float
    low: float
    high: float
    parameters: int
    more: float
    move: float
    nearest: bool
    reasons: tuple[str, ...] = ()

    @property
    def sure(self) -> bool:
        """Whether the whole interval of the gain is above 0."""
        return self.low > 0

    @property
    def gain_words(self) -> str:
        """`+3.2 % (+1.5 % to +4.9 %)`."""
        return f"{signed_percent(self.gain)} ({signed_percent(self.low)} to {signed_percent(self.high)})"


@dataclass(frozen=True)
class _Timed:
    """us: per token and parameter, in proportion. parts: each op's share of it."""

    shape: TransformerShape
    us: float
    parameters: int
    parts: Parts
    move: float


class Neighbours:
    """The search around one shape. space: None looks for none. others: shapes besides to be held against it."""

    def __init__(
        self,
        base: TransformerShape,
        times: RememberedTimes,
        space: Space | None,
        others: Sequence[TransformerShape] = (),
    ) -> None:
        self._source = times
        self._base = base
        self._singles = alone(base, space) if space else {}
        self._joint = list(together(base, space)) if space else []
        found = {base, *self._joint, *(shape for shapes in self._singles.values() for shape in shapes)}
        self.tried = len(found) - 1
        self._timed = _times({*found, *others}, times, base)

    def best(self, count: int) -> tuple[Neighbour, ...]:
        """At most `count` shapes, of each hidden size one: first those that are surely faster, then the others; in both
        first those that no nearer shape of theirs equals, fastest first."""
        per_size: dict[int, list[_Timed]] = defaultdict(list)
        for shape in self._joint:
            per_size[shape.hidden].append(self._timed[shape])
        sure: list[_Timed] = []
        unsure: list[_Timed] = []
        for timed in per_size.values():
            surely = [one for one in timed if self._against_base(one).sure]
            (sure if surely else unsure).append(_best_aligned(surely or timed))
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
        """The best change of each thing alone, where one is worth it; the largest gain first."""
        found: list[Neighbour] = []
        for name, shapes in self._singles.items():
            if shapes:
                best = _PREFERRED[name]([self._timed[shape] for shape in shapes])
                found += self._worth_it([best], {best.shape})
        return tuple(sorted(found, key=lambda n: -n.gain))

    def against(self, shapes: Iterable[TransformerShape]) -> tuple[Neighbour, ...]:
        """Given shapes, whatever their gain."""
        return tuple(self._against_base(self._timed[shape]) for shape in shapes)

    def _worth_it(self, ranked: Iterable[_Timed], nearest: set[TransformerShape]) -> tuple[Neighbour, ...]:
        found = (self._against_base(timed, nearest=timed.shape in nearest) for timed in ranked)
        return tuple(one for one in found if one.gain >= _WORTH_MOVING)

    def _against_base(self, timed: _Timed, *, nearest: bool = False) -> Neighbour:
        base = self._timed[self._base]
        ratio = base.us / timed.us
        factor = ratio_factor(base.parts, timed.parts, self._source.common_error)
        more = timed.parameters / base.parameters - 1
        return Neighbour(
            timed.shape, ratio - 1, ratio / factor - 1, ratio * factor - 1, timed.parameters, more, timed.move, nearest
        )


def fastest_first(shapes: Iterable[TransformerShape], times: RememberedTimes) -> list[TransformerShape]:
    """Shapes by their predicted time per token and parameter. Vocabulary padded beyond the smallest is no gain."""
    asked = list(shapes)
    timed = _times(asked, times, min(asked, key=lambda shape: shape.vocab))
    return sorted(asked, key=lambda shape: timed[shape].us)


def _times(
    shapes: Iterable[TransformerShape], times: RememberedTimes, base: TransformerShape
) -> dict[TransformerShape, _Timed]:
    ops = {shape: shape.ops() for shape in shapes}
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
    return _Timed(shape, total_us / shape.tokens / count, count, parts, move)


def _fastest(timed: Sequence[_Timed]) -> _Timed:
    return min(timed, key=lambda t: t.us)


def _equals(timed: Sequence[_Timed]) -> list[_Timed]:
    """Those as fast as the fastest, as far as a model can tell."""
    least = _fastest(timed).us
    return [t for t in timed if t.us <= least * (1 + _AS_GOOD)]


def _best_aligned(timed: Sequence[_Timed]) -> _Timed:
    """Of those as fast as the fastest, the one whose heads' rows are aligned best."""
    return max(_equals(timed), key=lambda t: (min(_LINE_ELEMENTS, t.shape.head_dim & -t.shape.head_dim), -t.us))


def _smallest_batch(timed: Sequence[_Timed]) -> _Timed:
    """Of those as fast as the fastest, the smallest micro-batch: larger ones take memory."""
    return min(_equals(timed), key=lambda t: t.shape.mbs)


#: which change of one thing alone is shown, by its name
_PREFERRED = {"heads": _best_aligned, "ffn": _fastest, "vocab": _fastest, "mbs": _smallest_batch}
