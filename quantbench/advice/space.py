"""Which shapes are tried near a given one: hidden, heads, MLP width, vocabulary and layers together, or one alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from quantbench.advice.edges import NEAR
from quantbench.errors import InputError
from quantbench.planner.formulas import parameters
from quantbench.planner.layout import ALIGNED_ELEMENTS, padded_vocab
from quantbench.planner.search import divisors
from quantbench.planner.shape_search import layers_within
from quantbench.workload import TransformerShape


@dataclass(frozen=True)
class Space:
    """What neighbours are tried.

    tolerance: how far the parameters may be from those of the shape, as a share. near: how far hidden, or the MLP's
    width alone, may be from its own. hidden_step: hidden sizes are multiples of it, MLP widths per GPU too. head_dim:
    from and to, in whole 16-byte vectors. heads: how many times as many or as few heads there may be. most_mbs: the
    largest micro-batch that is tried.
    """

    tolerance: float = 0.05
    near: float = NEAR
    hidden_step: int = 128
    head_dim: tuple[int, int] = (64, 256)
    heads: int = 2
    most_mbs: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance <= 0.5:
            raise InputError("advise", f"tolerance = {self.tolerance!r}", "a share of the parameters from 0 to 0.5")


def together(base: TransformerShape, space: Space) -> Iterator[TransformerShape]:
    """Shapes within the budget whose hidden size, heads and MLP may all differ; the micro-batch stays, and the
    vocabulary unless its rows are no whole vectors. The layers stay where that keeps the budget at the same hidden
    size, else they are those that come nearest to it."""
    step, whole = space.hidden_step, base.vocab % (ALIGNED_ELEMENTS * base.tp) == 0
    vocab = base.vocab if whole else padded_vocab(base.vocab, base.tp)
    low, high = (int((1 + part) * base.hidden) for part in (-space.near, space.near))
    sizes = {base.hidden, *(h for h in range(step, high + 1, step) if h >= low)}
    for hidden in sorted(h for h in sizes if h % base.tp == 0):
        for ffn, heads in product(_widths(base, hidden, step * base.tp), _heads(base, hidden, space)):
            changes: dict[str, Any] = {"hidden": hidden, "ffn": ffn, "vocab": vocab, **heads}
            shape = _within_budget(replace(base, **changes), base, space.tolerance)
            if shape is not None and shape != base:
                yield shape


def alone(base: TransformerShape, space: Space) -> dict[str, list[TransformerShape]]:
    """Shapes that differ in one thing only: heads, ffn, vocab or mbs."""
    step = space.hidden_step * base.tp
    low, high = ((1 + part) * base.ffn for part in (-space.near, space.near))
    batches = {base.mbs // 2, *(base.mbs << i for i in range(1, space.most_mbs.bit_length()))}
    values: dict[str, list[dict[str, Any]]] = {
        "heads": _heads(base, base.hidden, space),
        "ffn": [{"ffn": ffn} for ffn in range(step, int(high) + 1, step) if ffn >= low],
        "vocab": [{"vocab": padded_vocab(base.vocab, base.tp)}],
        "mbs": [{"mbs": mbs} for mbs in sorted(batches) if 1 <= mbs <= space.most_mbs],
    }
    found = {}
    for name, changes in values.items():
        shapes = (_within_budget(replace(base, **change), base, space.tolerance, same_depth=True) for change in changes)
        found[name] = [shape for shape in shapes if shape is not None and shape != base]
    return found


def _within_budget(
    shape: TransformerShape, base: TransformerShape, tolerance: float, *, same_depth: bool = False
) -> TransformerShape | None:
    low, middle, high = layers_within(shape, parameters(base), tolerance)
    if (same_depth or shape.hidden == base.hidden) and low <= base.layers <= high:
        return shape
    layers = max(1, round(middle))
    return replace(shape, layers=layers) if low <= layers <= high and not same_depth else None


def _widths(base: TransformerShape, hidden: int, step: int) -> list[int]:
    """Widths of the MLP that keep its ratio to hidden: exactly where tp can divide that, and the nearest round one."""
    exact = round(base.ffn / base.hidden * hidden)
    near = max(step, round(exact / step) * step)
    return sorted({near, exact} if exact % base.tp == 0 else {near})


def _heads(base: TransformerShape, hidden: int, space: Space) -> list[dict[str, Any]]:
    """Heads whose rows are whole vectors. Where heads of the base make up its hidden size, those of others do so too;
    else neither changes."""
    if base.heads * base.head_dim != base.hidden:
        return [{}]
    low, high = space.head_dim
    found = []
    for heads in divisors(hidden):
        width, few_enough = hidden // heads, base.heads <= space.heads * heads <= space.heads**2 * base.heads
        kv_heads = _kv_heads(base, heads)
        if low <= width <= high and width % ALIGNED_ELEMENTS == 0 and heads % base.tp == 0 and few_enough and kv_heads:
            found.append({"heads": heads, "kv_heads": kv_heads, "head_dim": width})
    return found


def _kv_heads(base: TransformerShape, heads: int) -> int | None:
    """Key/value heads: in the base's ratio, or as many as it has; None where tp allows neither."""
    group = base.heads // base.kv_heads
    for kv_heads in (heads // group if heads % group == 0 else 0, base.kv_heads):
        if kv_heads and heads % kv_heads == 0 and (kv_heads % base.tp == 0 or base.tp % kv_heads == 0):
            return kv_heads
    return None
