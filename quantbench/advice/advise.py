"""Advises on the sizes of a transformer: the time lost past edges on a GPU, and better sizes.

An edge is a condition by which an op becomes less efficient, such as a partly filled wave or a
misaligned row. Each better shape comes with the reasons for its gain. The advice also names broken
rules of libraries, times that rest on no measurement, and experts that do not fit in memory.
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
from quantbench.latency.op_times import OpTimes, RememberedTimes
from quantbench.units import percent
from quantbench.workload import Attention, Gemm, Softmax, TransformerShape

# At most _REASONS ops give reasons for one shape. After the first, an op gives a reason only if it
# saves at least _WORTH_SAYING of the shape's time.
_WORTH_SAYING = 0.004
_REASONS = 3
# A size that is a multiple of this fills the tiles of every kernel in common use.
_ROUND = 128
# Smallest relative increase of an op's rate that is given as a reason.
_SAME_RATE = 0.01
# Kinds of edges that an op either has crossed or not, unlike partly filled tiles and waves.
_HARD = {"alignment", "fused softmax"}
# Smallest increase of the tile and wave efficiency that is given as a reason.
_FULLER = 0.02
#: default number of neighbours that are returned
TOP = 8


@dataclass(frozen=True)
class Advised:
    """A shape compared with the given shape.

    found: the shape, its gain and the reasons for the gain.
    changes: changed sizes as text.
    cost: predicted cost of the shape.
    """

    found: Neighbour
    changes: str
    cost: ShapeCost


@dataclass(frozen=True)
class Unmeasured:
    """Part of the predicted time that rests on no measurement.

    reason: why there is no measurement.
    ops: labels of the ops that the reason applies to.
    share: fraction of the shape's time that these ops take, 0 to 1.
    """

    reason: str
    ops: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Advice:
    """Predicted cost of a shape, and better shapes near it.

    device: GPU for which the times are predicted.
    note: sources of the predicted times.
    cost: predicted cost of the shape.
    unmeasured: parts of the time that rest on no measurement, largest part first.
    neighbours: shapes that are predicted to be faster. Surely faster shapes come first.
    alike: the best shape that has as many heads as the given shape, and the best shape that has
        heads of the same width. Shapes among the neighbours are left out.
    singles: best change of each dimension alone, largest gain first.
    tried: number of shapes within `space` that were compared with the given shape.
    space: limits of the shapes that were tried.
    broken: rules of number formats and libraries that the shape breaks.
    missing: texts on work that has no model and is left out of the times.
    blocks: texts on sizes of the experts that are not multiples of 128.
    too_large: text that says that the weights of the experts exceed a GPU's memory, and which `ep`
        helps; "" if they fit.
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
        """The shape that the advice is about."""
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
        """Whether to keep the shape.

        The shape is kept if the weights of its experts fit in memory, misaligned rows waste little
        of its time, and no shape with the same micro-batch is surely faster.
        """
        if self.too_large or self.cost.misaligned:
            return False
        faster = (*self.better, *self.better_alone)
        return all(one.found.shape.mbs != self.shape.mbs for one in faster)

    @property
    def compared(self) -> tuple[Advised, ...]:
        """All shapes of this advice except the given shape, without repetition."""
        found = {}
        for one in (*self.neighbours, *self.alike, *self.singles):
            found[one.found.shape] = one
        return tuple(found.values())


def _sure(advised: Iterable[Advised]) -> tuple[Advised, ...]:
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
    """Returns advice on a shape, on the device of `times`.

    times: latency models (`ModelTimes`), a profile, or any other `OpTimes`.
    space: limits of the neighbours to try; None for `Space()`.
    top: maximum number of neighbours to return; 0 to try no other shape.
    kernels: source of the kernel launch, and so of the tile, of ops for which `times` gives none;
        None to assume the device's tile for these ops.
    library: library whose rules on divisibility are checked; "" for the rules of every library.

    Raises InputError if the device has no peak for the dtype.

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
    remembered = RememberedTimes(times, softmax=shape.softmax, kernels=kernels)
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
    """Returns the ops whose times rest on no measurement, grouped by the reason.

    The group whose ops take the largest part of the shape's time comes first.
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
    found: Iterable[Neighbour], cost: ShapeCost, times: RememberedTimes
) -> tuple[Advised, ...]:
    """Returns the neighbours with the reasons for their gains, their changes and their costs.

    cost: cost of the given shape.
    """
    advised = []
    for neighbour in found:
        new = cost_of(neighbour.shape, times)
        # The gain is per token and parameter, so the times are compared per token and parameter.
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
    """Returns the reasons why a shape is faster.

    Each of the one to three op names that save the most time gives a reason, and equal reasons are
    merged. A hard edge is added if the new shape has crossed it, and the given shape has crossed
    none of its kind.

    old, new: costs of the given shape and of the faster shape.
    weight: factor on the times of `new` that makes them comparable per token and parameter.
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
    # Such an edge is the next thing to change in the new shape.
    hard = _HARD - _kinds(old)
    for edge in new.edges:
        words = f"but {edge.words}"
        if edge.kind in hard and words not in reasons:
            reasons.append(words)
    return tuple(reasons)


def _kinds(cost: ShapeCost | OpCost) -> set[str]:
    return {edge.kind for edge in cost.edges}


def _reason(name: str, old: ShapeCost, new: ShapeCost) -> tuple[str, str]:
    """Returns why the ops of one name are faster, as a subject and a text that follows it.

    The subject is "" if the text is complete without a subject.
    """
    pairs = list(zip(old.by_name[name], new.by_name[name], strict=True))
    was, now = max(pairs, key=lambda pair: pair[0].waste_us - pair[1].waste_us)
    lost = _kinds(was) - _kinds(now)
    if "alignment" in lost:
        return "", _regained(was, now)
    if "fused softmax" in lost:
        return "", "Megatron's fused softmax runs"
    text = _rounder(pairs) or _fuller(was, now)
    if text is None:
        text = ": a smaller part of the model"
        before = _tflops(old.by_name[name])
        after = _tflops(new.by_name[name])
        if after >= before * (1 + _SAME_RATE) and not isinstance(was.op.workload, Softmax):
            text = f": {after:.0f} instead of {before:.0f} TFLOP/s"
    return name, text


def _regained(was: OpCost, now: OpCost) -> str:
    """Returns a text that names the size by which the rows of an op have become 16-byte aligned.

    was, now: op of the given shape, with misaligned rows, and op of the faster shape.
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


def _rounder(pairs: Sequence[tuple[OpCost, OpCost]]) -> str | None:
    """Returns a text on a side of a GEMM that has become a multiple of _ROUND; None without one.

    pairs: op of the given shape and the same op of the faster shape. The first pair, the forward
        pass, is compared.
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


def _fuller(was: OpCost, now: OpCost) -> str | None:
    """Returns a text on tiles and waves that have become fuller.

    The result is None if the efficiency of tiles and waves is unknown, or rises by less than
    _FULLER.

    was, now: op of the given shape, and op of the faster shape.
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
    return total_flops(costs) / total_us(costs) / 1e6
