"""Why one shape is predicted to be faster than another, in a line: which ops save the time, and what changed there."""

from __future__ import annotations

from collections.abc import Sequence

from quantbench.advice.cost import OpCost, ShapeCost
from quantbench.advice.dims import side_names
from quantbench.advice.edges import misaligned_sides
from quantbench.units import percent
from quantbench.workload import Attention, Gemm, Softmax

# A saving of less than this share of the whole time is not worth a reason; more than so many are too many for a line.
_WORTH_SAYING, _MOST = 0.004, 3
# Sizes that are multiples of this fill the tiles of every kernel in common use.
_ROUND = 128
# Rates that differ by less are one rate.
_SAME_RATE = 0.01
# Edges that are not a matter of degree.
_HARD = {"alignment", "fused softmax"}
# How much fuller the waves must be to be the reason.
_FULLER = 0.02


def changes(old: ShapeCost, new: ShapeCost) -> str:
    """What differs: `hidden 14400 → 13824, heads 96 → 72, layers 80 → 87`."""
    names = ("hidden", "heads", "kv_heads", "ffn", "vocab", "layers", "mbs")
    plain = old.shape.kv_heads == old.shape.heads and new.shape.kv_heads == new.shape.heads
    follows = new.shape.ffn * old.shape.hidden == old.shape.ffn * new.shape.hidden
    said = []
    for name in names:
        was, now = getattr(old.shape, name), getattr(new.shape, name)
        if was == now or (name == "kv_heads" and plain) or (name == "ffn" and follows):
            continue
        said.append(f"{name} {was} → {now}")
    return ", ".join(said)


def reasons(old: ShapeCost, new: ShapeCost, weight: float) -> tuple[str, ...]:
    """What saves most, at most three ops' reasons, and at least one; equal ones are one.

    weight: by which the new times are multiplied to be of as many tokens and parameters as the old.
    """
    savings = []
    for name, costs in old.by_name.items():
        was, now = _time(costs), _time(new.by_name.get(name, ())) * weight
        savings.append(((was - now) / old.latency.latency_us, name))
    found: dict[str, list[str]] = {}
    for saved, name in sorted(savings, reverse=True)[:_MOST]:
        if (saved >= _WORTH_SAYING or not found) and name in new.by_name:
            subject, said = _reason(name, old, new)
            found.setdefault(said, []).append(subject)
    said_of = [", ".join(filter(None, subjects)) + said for said, subjects in found.items()]
    return (*said_of, *_drawbacks(old, new))


def _drawbacks(old: ShapeCost, new: ShapeCost) -> tuple[str, ...]:
    """Hard edges that the new shape is past and the old was not: what one would change next."""
    kinds = {finding.edge.kind for cost in old.ops for finding in cost.findings}
    found = dict.fromkeys(f.edge.words for cost in new.ops for f in cost.findings if f.edge.kind in _HARD - kinds)
    return tuple(f"but {words}" for words in found)


def _time(costs: Sequence[OpCost]) -> float:
    return sum(cost.total_us for cost in costs)


def _reason(name: str, old: ShapeCost, new: ShapeCost) -> tuple[str, str]:
    """The most telling difference of one name's ops: of what, and what is said of it."""
    pairs = list(zip(old.by_name[name], new.by_name[name], strict=True))
    was, now = max(pairs, key=lambda pair: pair[0].waste_us - pair[1].waste_us)
    lost = {f.edge.kind for f in was.findings} - {f.edge.kind for f in now.findings}
    if "alignment" in lost:
        return "", _regained(was, now)
    if "fused softmax" in lost:
        return "", "Megatron's fused softmax runs"
    said = _rounder(pairs) or _fuller(was, now)
    if said is None:
        rates = _tflops(old.by_name[name]), _tflops(new.by_name[name])
        slow = isinstance(was.op.workload, Softmax) or rates[1] < rates[0] * (1 + _SAME_RATE)
        less = ": a smaller part of the model"
        said = less if slow else f": {rates[1]:.0f} instead of {rates[0]:.0f} TFLOP/s"
    return name, said


def _regained(was: OpCost, now: OpCost) -> str:
    """Which side has whole vectors again."""
    first, second = was.op.workload, now.op.workload
    if isinstance(first, Gemm) and isinstance(second, Gemm):
        off = misaligned_sides(first)
        for side, name in side_names(was.op).items():
            if side in off:
                return f"{name} {getattr(first, side)} → {getattr(second, side)}: 16-byte aligned"
    if isinstance(first, Attention) and isinstance(second, Attention):
        return f"head_dim {first.head_dim} → {second.head_dim}: 16-byte aligned"
    raise AssertionError(f"{was.op.label} has no rows")


def _rounder(pairs: Sequence[tuple[OpCost, OpCost]]) -> str | None:
    first, second = pairs[0][0].op.workload, pairs[0][1].op.workload
    if not isinstance(first, Gemm) or not isinstance(second, Gemm):
        return None
    for side in ("n", "k", "m"):
        was, now = getattr(first, side), getattr(second, side)
        if was % _ROUND and now % _ROUND == 0:
            return f" {side} {was} → {now} = {now // _ROUND} × {_ROUND}"
    return None


def _fuller(was: OpCost, now: OpCost) -> str | None:
    before, after = was.quantization, now.quantization
    if before is None or after is None or after.efficiency - before.efficiency < _FULLER:
        return None
    full = f"tiles and waves {percent(before.efficiency)} → {percent(after.efficiency)} used"
    same = before.num_waves == after.num_waves
    waves = f"{before.num_waves} waves" if same else f"{before.num_waves} → {after.num_waves} waves"
    return f": {waves}, {full}"


def _tflops(costs: Sequence[OpCost]) -> float:
    return sum(c.op.workload.flops * c.op.count for c in costs) / _time(costs) / 1e6
