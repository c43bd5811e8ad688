"""Advises on a transformer's sizes: predicts the time lost past edges on a GPU, and faster sizes.

`advise` returns an `Advice`. An edge is a size past which an op becomes less efficient, for example
because it starts a partly filled wave (a round of tiles over all SMs) or misaligns rows. Each
faster shape comes with the reasons for its gain. The advice also lists broken rules of libraries,
predicted times without a measurement behind them, and experts that do not fit in memory.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from quantbench.advice.cost import OpCost, ShapeCost, cost_of, total_flops, total_us
from quantbench.advice.search import Neighbour, Search
from quantbench.advice.space import DIMENSIONS, Space, least_ep, weights_bytes
from quantbench.alignment_rules import (
    Broken,
    broken_by_shape,
    misaligned_sides,
    runs_without_crash,
    side_names,
)
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_int
from quantbench.latency.op_times import CachedTimes, OpTimes
from quantbench.units import percent
from quantbench.workload import Attention, Gemm, Softmax, TransformerShape

# Smallest saving, as a fraction of the shape's time, for which an op name gives a reason. The op
# name with the largest saving always gives a reason.
_WORTH_SAYING = 0.004
# Largest number of op names that give reasons for one shape.
_REASONS = 3
# Multiple that fills whole tiles of all kernels in common use.
_ROUND = 128
# Smallest relative increase of an op's TFLOP/s that is given as a reason.
_SAME_RATE = 0.01
# Edges that are either crossed or not. In contrast, tiles and waves can be filled more or less.
_HARD = {"alignment", "fused softmax"}
# Smallest increase of the combined tile and wave efficiency that is given as a reason.
_FULLER = 0.02
#: default maximum number of neighbours in an `Advice`
TOP = 8


@dataclass(frozen=True)
class Advised:
    """A shape that was compared with the given shape.

    found: the shape, its gain over the given shape, and the reasons for the gain.
    changes: changed sizes as text, such as `heads 96 → 72`.
    cost: predicted cost of the shape.
    """

    found: Neighbour
    changes: str
    cost: ShapeCost


@dataclass(frozen=True)
class Unmeasured:
    """Ops whose predicted times have no measurement behind them, for one reason.

    reason: why there is no measurement.
    ops: labels of the ops.
    share: fraction of the shape's time that the ops take, 0 to 1.
    """

    reason: str
    ops: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Advice:
    """Predicted cost of the given shape, and faster shapes near it.

    device: GPU for which times are predicted.
    note: sources of the predicted times.
    cost: predicted cost of the given shape.
    unmeasured: ops without a measurement behind their times, largest fraction of the time first.
    neighbours: shapes that are predicted to be faster. Those that are surely faster come first.
    alike: the best shape with the given number of heads, and the best with the given head_dim.
        Shapes that are already among the neighbours are left out.
    singles: best change of each single dimension, largest gain first.
    tried: number of shapes in `space` that were compared with the given shape.
    space: limits of the shapes that were tried.
    broken: rules of number formats and libraries that the given shape breaks.
    missing: descriptions of work that the times leave out, because it has no model.
    blocks: descriptions of experts' sizes that are not multiples of 128.
    too_large: message that the experts' weights exceed a GPU's memory, with the smallest `ep` that
        makes them fit; "" if they fit.
    """

    device: DeviceSpec
    note: str
    cost: ShapeCost
    unmeasured: tuple[Unmeasured, ...]
    neighbours: tuple[Advised, ...]
    alike: tuple[Advised, ...]
    singles: tuple[Advised, ...]
    tried: int
    space: Space
    broken: tuple[Broken, ...] = ()
    missing: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    too_large: str = ""

    @property
    def shape(self) -> TransformerShape:
        """The given shape."""
        return self.cost.shape

    @property
    def better(self) -> tuple[Advised, ...]:
        """Neighbours that are surely faster (see `Neighbour.sure`)."""
        return _sure(self.neighbours)

    @property
    def better_alone(self) -> tuple[Advised, ...]:
        """Shapes with one changed dimension that are surely faster."""
        return _sure(self.singles)

    @property
    def keep(self) -> bool:
        """Whether the advice is to keep the given shape.

        Three conditions must hold: the experts' weights fit in memory, misaligned rows waste less
        than 2 % of the time, and no shape with the same micro-batch size is surely faster.
        """
        if self.too_large or self.cost.misaligned:
            return False
        faster = (*self.better, *self.better_alone)
        return all(one.found.shape.mbs != self.shape.mbs for one in faster)

    @property
    def compared(self) -> tuple[Advised, ...]:
        """All shapes of the advice except the given one, each once."""
        found = {}
        for one in (*self.neighbours, *self.alike, *self.singles):
            found[one.found.shape] = one
        return tuple(found.values())


def _sure(advised: Iterable[Advised]) -> tuple[Advised, ...]:
    """Returns the shapes that are surely faster."""
    return tuple(one for one in advised if one.found.sure)


def advise(
    shape: TransformerShape,
    times: OpTimes,
    *,
    space: Space | None = None,
    top: int = TOP,
    kernels: OpTimes | None = None,
    library: str = "",
) -> Advice:
    """Predicts the cost of a shape, and searches for faster shapes near it.

    times: op times on one GPU: latency models (`ModelTimes`), a profile, or another `OpTimes`.
    space: limits of the shapes to try; None for `Space()`.
    top: maximum number of neighbours to return; 0 to try no other shapes.
    kernels: second source of kernel launches, for ops whose launch `times` does not know; None to
        assume the GPU's usual tile for these ops. The tile determines tile and wave edges.
    library: library whose divisibility rules are checked; "" for the rules of all libraries.

    Raises InputError if the GPU has no peak rate for the shape's dtype.

    >>> from quantbench.device import lookup
    >>> from quantbench.latency.model_times import ModelTimes
    >>> shape = TransformerShape(hidden=1152, heads=12, layers=8, vocab=50304)
    >>> advice = advise(shape, ModelTimes(lookup("a100-sxm4-80gb")))
    >>> advice.cost.latency.latency_us > advice.cost.waste_us
    True
    """
    require_int("advise", "top", top, low=0)
    device = times.device
    if device.peak(shape.dtype) is None:
        what = f"dtype = {shape.dtype!r} on {device.name}"
        raise InputError("advise", what, f"one of {device.dtypes}")
    remembered = CachedTimes(times, softmax=shape.softmax, kernels=kernels)
    space = space or Space()
    cost = cost_of(shape, remembered)

    runs = partial(runs_without_crash, library=library, device=device)
    search = Search(shape, remembered, space if top else None, runs)
    best = search.best(top)
    missing: tuple[str, ...] = ()
    if shape.experts:
        missing = ("a forward pass only: gradients of experts have no model",)
    return Advice(
        device=device,
        note=remembered.note,
        cost=cost,
        unmeasured=_unmeasured(cost),
        neighbours=_advised(best, cost, remembered),
        alike=_advised(search.alike(best), cost, remembered),
        singles=_advised(search.single(), cost, remembered),
        tried=search.tried,
        space=space,
        broken=broken_by_shape(shape, library=library, backward=not shape.experts, device=device),
        missing=missing,
        blocks=_broken_blocks(shape),
        too_large=_too_large(shape, device),
    )


def _too_large(shape: TransformerShape, device: DeviceSpec) -> str:
    """Returns the text of `Advice.too_large`."""
    weights = weights_bytes(shape)
    limit = device.memory_bytes
    if not shape.experts or weights < limit:
        return ""
    ep = least_ep(shape, limit)
    helps = f"they fit from ep = {ep} on" if ep else f"no ep makes them fit at tp = {shape.tp}"
    return f"weights of {weights / 2**30:.0f} GiB on a GPU of {limit / 2**30:.0f} GiB; {helps}"


def _broken_blocks(shape: TransformerShape) -> tuple[str, ...]:
    """Returns the texts of `Advice.blocks`."""
    if not shape.experts:
        return ()
    sizes = {
        "moe_ffn / tp": shape.moe_ffn / shape.tp,
        "shared_ffn / tp": shape.shared_ffn / shape.tp,
        "hidden": shape.hidden,
        "rows of an expert, if balanced": shape.experts_of(shape.tokens).rows_per_expert,
    }
    broken = []
    for name, size in sizes.items():
        if size % _ROUND:
            broken.append(f"{name} = {size:g} = {size / _ROUND:.4g} × {_ROUND}")
    return tuple(broken)


def _unmeasured(whole: ShapeCost) -> tuple[Unmeasured, ...]:
    """Returns the value of `Advice.unmeasured`: ops without a measurement, grouped by the reason.

    whole: cost of the shape.
    """
    ops: dict[str, list[OpCost]] = defaultdict(list)
    for cost in whole.ops:
        if cost.latency.unmeasured:
            ops[cost.latency.unmeasured].append(cost)
    found = []
    for reason, costs in ops.items():
        share = total_us(costs) / whole.latency.latency_us
        found.append(Unmeasured(reason, tuple(cost.op.label for cost in costs), share))
    return tuple(sorted(found, key=lambda one: -one.share))


def _advised(
    found: Iterable[Neighbour], cost: ShapeCost, times: CachedTimes
) -> tuple[Advised, ...]:
    """Adds the cost, the changed sizes and the reasons for the gain to each neighbour.

    cost: cost of the given shape.
    """
    advised = []
    for neighbour in found:
        new = cost_of(neighbour.shape, times)
        # Makes the new times comparable per token and parameter, as in `Neighbour.gain`.
        weight = cost.latency.latency_us / new.latency.latency_us / (1 + neighbour.gain)
        why = _reasons(cost, new, weight)
        advised.append(Advised(replace(neighbour, reasons=why), _changes(cost, new), new))
    return tuple(advised)


def _changes(old: ShapeCost, new: ShapeCost) -> str:
    """Returns the changed sizes as text: `hidden 14400 → 13824, heads 96 → 72, layers 80 → 87`.

    Sizes that only follow from another changed size, such as ffn from hidden, are left out.
    """
    before = old.shape
    after = new.shape
    following = set()
    if after.heads * after.head_dim == after.hidden:
        following.add("head_dim")
    if before.kv_heads == before.heads and after.kv_heads == after.heads:
        following.add("kv_heads")
    if after.ffn * before.hidden == before.ffn * after.hidden:
        following.add("ffn")
    changes = []
    for name in DIMENSIONS:
        was = getattr(before, name)
        now = getattr(after, name)
        if was != now and name not in following:
            changes.append(f"{name} {was} → {now}")
    return ", ".join(changes)


def _reasons(old: ShapeCost, new: ShapeCost, weight: float) -> tuple[str, ...]:
    """Returns the reasons why a shape is faster, largest saving first.

    The op names with the largest savings, at most three, each give a reason. Equal reasons are
    merged. Last come alignment and fused-softmax edges that the new shape has crossed, if the given
    shape has crossed no edge of the same kind.

    old, new: costs of the given shape and of the faster shape.
    weight: factor that makes the times of `new` comparable to those of `old` per token and
        parameter.
    """
    savings = []
    for name, costs in old.by_name.items():
        saved_us = total_us(costs) - total_us(new.by_name.get(name, ())) * weight
        savings.append((saved_us / old.latency.latency_us, name))
    found: dict[str, list[str]] = {}
    for saved, name in sorted(savings, reverse=True)[:_REASONS]:
        if (saved >= _WORTH_SAYING or not found) and name in new.by_name:
            subject, text = _reason(name, old, new)
            found.setdefault(text, []).append(subject)
    reasons = [", ".join(filter(None, subjects)) + text for text, subjects in found.items()]
    # Such an edge shows what to improve next in the new shape.
    hard = _HARD - _kinds(old)
    for edge in new.edges:
        words = f"but {edge.words}"
        if edge.kind in hard and words not in reasons:
            reasons.append(words)
    return tuple(reasons)


def _kinds(cost: ShapeCost | OpCost) -> set[str]:
    """Returns the kinds of edges that a shape or an op has crossed."""
    return {edge.kind for edge in cost.edges}


def _reason(name: str, old: ShapeCost, new: ShapeCost) -> tuple[str, str]:
    """Returns the reason why the ops with one name are faster, as (subject, text).

    The subject is the op name, and the text follows it directly. The subject is "" if the text is
    complete without it.
    """
    pairs = list(zip(old.by_name[name], new.by_name[name], strict=True))
    was, now = max(pairs, key=lambda pair: pair[0].waste_us - pair[1].waste_us)
    lost = _kinds(was) - _kinds(now)
    if "alignment" in lost:
        return "", _alignment_text(was, now)
    if "fused softmax" in lost:
        return "", "Megatron's fused softmax runs"
    text = _multiple_text(pairs) or _efficiency_text(was, now)
    if text is None:
        text = ": a smaller part of the model"
        before = _tflops(old.by_name[name])
        after = _tflops(new.by_name[name])
        if after >= before * (1 + _SAME_RATE) and not isinstance(was.op.workload, Softmax):
            text = f": {after:.0f} instead of {before:.0f} TFLOP/s"
    return name, text


def _alignment_text(was: OpCost, now: OpCost) -> str:
    """Describes the changed size that made an op's rows 16-byte aligned.

    was, now: costs of the op in the given shape, with misaligned rows, and in the faster shape.
    """
    first = was.op.workload
    second = now.op.workload
    if isinstance(first, Gemm) and isinstance(second, Gemm):
        off = misaligned_sides(first)
        for side, name in side_names(was.op).items():
            if side in off:
                return f"{name} {getattr(first, side)} → {getattr(second, side)}: 16-byte aligned"
    if isinstance(first, Attention) and isinstance(second, Attention):
        return f"head_dim {first.head_dim} → {second.head_dim}: 16-byte aligned"
    raise AssertionError(f"{was.op.label} has no rows")


def _multiple_text(pairs: Sequence[tuple[OpCost, OpCost]]) -> str | None:
    """Describes a GEMM's side that has become a multiple of 128; None if there is none.

    pairs: costs of the same op in the given and in the faster shape, one pair per pass. The first
        pair, the forward pass, is compared.
    """
    was_run, now_run = pairs[0]
    first = was_run.op.workload
    second = now_run.op.workload
    if not isinstance(first, Gemm) or not isinstance(second, Gemm):
        return None
    for side in ("n", "k", "m"):
        was = getattr(first, side)
        now = getattr(second, side)
        if was % _ROUND and now % _ROUND == 0:
            return f" {side} {was} → {now} = {now // _ROUND} × {_ROUND}"
    return None


def _efficiency_text(was: OpCost, now: OpCost) -> str | None:
    """Describes an increase of a GEMM's tile and wave efficiency.

    The result is None if the efficiency is unknown, or rises by less than 0.02.

    was, now: costs of the op in the given shape and in the faster shape.
    """
    before = was.quantization
    after = now.quantization
    if before is None or after is None or after.efficiency - before.efficiency < _FULLER:
        return None
    waves = str(before.num_waves)
    if before.num_waves != after.num_waves:
        waves += f" → {after.num_waves}"
    used = f"{percent(before.efficiency)} → {percent(after.efficiency)}"
    return f": {waves} waves, tiles and waves {used} used"


def _tflops(costs: Sequence[OpCost]) -> float:
    """Returns the mean TFLOP/s over several ops."""
    return total_flops(costs) / total_us(costs) / 1e6
