"""Lists the shapes near a given one, and the nearest shapes that tensor parallelism can split.

Entry points: `Space`, the limits of the search, `DIMENSIONS`, `EXPERT_FACTOR` and `MOST_EP`; `together` (varies hidden,
heads, MLP width and layers) and `alone` (varies heads, MLP width, vocabulary, micro-batch, experts or their split),
used by `neighbours`; `weights_bytes` and `least_ep`; `repaired`, which returns a `Repair`. Used by `advise`,
`explore.page`, the command `advise` and tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from quantbench.advice.edges import NEAR
from quantbench.errors import InputError, require_choice, require_int
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.planner.formulas import parameters
from quantbench.planner.layout import ALIGNED_ELEMENTS, padded_vocab
from quantbench.planner.search import divisors, layers_within
from quantbench.units import percent
from quantbench.workload import TransformerShape
from quantbench.workload.dtypes import DTYPES

#: dimensions that `keep` may name
DIMENSIONS = (
    "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "layers", "mbs", "experts", "top_k", "moe_ffn", "tp",
    "ep",
)  # fmt: skip
#: largest factor by which the width of experts may change, and the largest degree of expert parallelism tried
EXPERT_FACTOR, MOST_EP = 4, 64
#: head widths that attention kernels are tuned for
_USUAL_HEAD_DIMS = (64, 128, 256)
_WIDEST = 1024


@dataclass(frozen=True)
class Space:
    """Limits of the neighbours to try; `planner.search.Space` limits layouts.

    tolerance: largest relative difference of the number of parameters.
    near: largest relative change of hidden, or of the MLP width when it changes alone.
    hidden_step: step of hidden sizes and of MLP widths per GPU; the exact values are tried as well.
    head_dims: head widths to try besides the shape's own.
    heads: largest factor by which the number of heads may change.
    replicate_kv: whether to try fewer key/value heads than tp, copied to several GPUs; the shape's own number is
        always allowed.
    keep: names from DIMENSIONS that must not change.
    most_mbs: largest micro-batch to try.
    """

    tolerance: float = 0.05
    near: float = NEAR
    hidden_step: int = 128
    head_dims: tuple[int, ...] = _USUAL_HEAD_DIMS
    heads: int = 2
    replicate_kv: bool = False
    keep: tuple[str, ...] = ()
    most_mbs: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance <= 0.5:
            raise InputError("advise", f"tolerance = {self.tolerance!r}", "a share of the parameters from 0 to 0.5")
        for width in self.head_dims:
            if require_int("advise", "head_dim", width, high=_WIDEST) % ALIGNED_ELEMENTS:
                raise InputError("advise", f"head_dim = {width}", f"a multiple of {ALIGNED_ELEMENTS}: 16-byte rows")
        for name in self.keep:
            require_choice("advise", "keep", name, DIMENSIONS)

    def words(self, base: TransformerShape) -> str:
        """Says which neighbours of a shape are tried."""
        within = f"parameters within ±{percent(self.tolerance)}"
        if base.experts:
            said = [
                f"one change alone where the weights fit, {within}",
                f"experts from a {EXPERT_FACTOR}th to {EXPERT_FACTOR} times as wide in steps of "
                f"{self.hidden_step * base.tp}, as many active parameters",
                f"ep in powers of 2 up to {MOST_EP}", "tp and ep on as many GPUs",
                f"mbs up to {self.most_mbs}", "a padded vocab",
            ]  # fmt: skip
        else:
            said = [within, f"hidden within ±{percent(self.near)} in steps of {self.hidden_step}"]
            if base.heads * base.head_dim != base.hidden:
                said += ["heads as they are"]
            else:
                widths = f"{', '.join(map(str, self.head_dims))} or " if self.head_dims else ""
                copied = "may be copied over tp" if self.replicate_kv else "that tp divides or as they are"
                said += [f"head_dim {widths}as it is", f"kv_heads {copied}"]
        return "; ".join([*said, *([f"kept: {', '.join(self.keep)}"] if self.keep else [])])


def together(base: TransformerShape, space: Space) -> Iterator[TransformerShape]:
    """Lists shapes with about as many parameters whose hidden size, heads and MLP may all differ.

    None for a shape with experts, which mostly are its parameters: `alone` varies them.
    The micro-batch stays, and so does the vocabulary if its rows are 16-byte aligned. The number of layers stays if
    hidden does and the tolerance allows it; otherwise it is the one that comes nearest to the base's parameters.
    """
    if base.experts:
        return
    step, whole = space.hidden_step, base.vocab % (ALIGNED_ELEMENTS * base.tp) == 0
    vocab = base.vocab if whole else padded_vocab(base.vocab, base.tp)
    low, high = (int((1 + part) * base.hidden) for part in (-space.near, space.near))
    sizes = {base.hidden, *(h for h in range(step, high + 1, step) if h >= low)}
    for hidden in sorted(h for h in sizes if h % base.tp == 0):
        for ffn, heads in product(_widths(base, hidden, step * base.tp), _heads(base, hidden, space)):
            changes: dict[str, Any] = {"hidden": hidden, "ffn": ffn, "vocab": vocab, **heads}
            if _keeps(base, changes, space):
                shape = _within_budget(replace(base, **changes), base, space)
                if shape is not None and shape != base:
                    yield shape


def weights_bytes(shape: TransformerShape) -> float:
    """Returns the bytes of the weights on one of tp · ep GPUs."""
    return shape.parameters_per_gpu * DTYPES[shape.dtype].b_bytes


def least_ep(shape: TransformerShape, memory_bytes: float) -> int:
    """Returns the least divisor of the experts that, as ep, leaves memory beside the weights of a GPU; 0: none does."""
    degrees = (ep for ep in divisors(shape.experts) if weights_bytes(replace(shape, ep=ep)) < memory_bytes)
    return next(degrees, 0)


def alone(base: TransformerShape, space: Space) -> dict[str, list[TransformerShape]]:
    """Lists, by dimension, the shapes that differ only in heads (with kv_heads and head_dim), ffn, vocab or mbs; in the
    experts at equal active and total parameters, in ep alone, or in tp and ep on as many GPUs with as many tokens. No
    micro-batch has more rows than a product that is predicted."""
    step = space.hidden_step * base.tp
    low, high = ((1 + part) * base.ffn for part in (-space.near, space.near))
    batches = {base.mbs // 2, *(base.mbs << i for i in range(1, space.most_mbs.bit_length()))}
    values: dict[str, list[dict[str, Any]]] = {
        "heads": _heads(base, base.hidden, space),
        "ffn": [{"ffn": ffn} for ffn in range(step, int(high) + 1, step) if ffn >= low],
        "vocab": [{"vocab": padded_vocab(base.vocab, base.tp)}],
        "mbs": [{"mbs": mbs} for mbs in sorted(batches) if 1 <= mbs <= space.most_mbs],
    }
    if base.experts:
        degrees = [{"ep": ep} for ep in range(1, MOST_EP + 1) if base.experts % ep == 0 and ep & (ep - 1) == 0]
        values |= {"experts": list(_experts(base, space)), "ep": degrees, "tp and ep": list(_split(base))}
        del values["heads"], values["ffn"]
    found = {}
    for name, changes in values.items():
        kept = (change for change in changes if _keeps(base, change, space))
        shapes = (_within_budget(replace(base, **change), base, space, same_depth=True) for change in kept)
        predicted = (shape for shape in shapes if shape is not None and shape.tokens <= LARGEST_SIDE)
        found[name] = [shape for shape in predicted if shape != base]
    return found


def _experts(base: TransformerShape, space: Space) -> Iterator[dict[str, Any]]:
    """Yields experts of other widths, as many and as many per token as keep the parameters and the arithmetic."""
    step = space.hidden_step * base.tp
    for width in range(step, EXPERT_FACTOR * base.moe_ffn + 1, step):
        experts = round(base.experts * base.moe_ffn / width / base.ep) * base.ep
        top_k = round(base.top_k * base.moe_ffn / width)
        active = top_k * width / (base.top_k * base.moe_ffn) - 1
        if width * EXPERT_FACTOR >= base.moe_ffn and 1 <= top_k <= experts and abs(active) <= space.tolerance:
            change = {"experts": experts, "top_k": top_k, "moe_ffn": width}
            yield change if isinstance(base.routing, str) else {**change, "routing": "balanced"}


def _split(base: TransformerShape) -> Iterator[dict[str, Any]]:
    gpus, samples = base.tp * base.ep, base.mbs * base.ep
    for ep in (ep for ep in range(1, gpus + 1) if gpus % ep == 0 and samples % ep == 0 and base.experts % ep == 0):
        tp = gpus // ep
        heads = base.heads % tp == 0 and (base.kv_heads % tp == 0 or tp % base.kv_heads == 0)
        if heads and not any(size % tp for size in (base.ffn, base.vocab, base.shared_ffn, base.moe_ffn)):
            yield {"tp": tp, "ep": ep, "mbs": samples // ep}


def _keeps(base: TransformerShape, changes: dict[str, Any], space: Space) -> bool:
    return all(changes.get(name, getattr(base, name)) == getattr(base, name) for name in space.keep)


def _within_budget(
    shape: TransformerShape, base: TransformerShape, space: Space, *, same_depth: bool = False
) -> TransformerShape | None:
    low, middle, high = layers_within(shape, parameters(base), space.tolerance)
    same_depth = same_depth or "layers" in space.keep
    if (same_depth or shape.hidden == base.hidden) and low <= base.layers <= high:
        return shape
    layers = max(1, round(middle))
    return replace(shape, layers=layers) if low <= layers <= high and not same_depth else None


def _widths(base: TransformerShape, hidden: int, step: int) -> list[int]:
    """Returns MLP widths in the ratio to hidden: the nearest multiple of step, and the exact one if tp divides it."""
    exact = round(base.ffn / base.hidden * hidden)
    near = max(step, round(exact / step) * step)
    return sorted({near, exact} if exact % base.tp == 0 else {near})


def _heads(base: TransformerShape, hidden: int, space: Space) -> list[dict[str, Any]]:
    """Lists heads, kv_heads and head_dim for hidden. Nothing changes if heads × head_dim is not hidden in the base."""
    if base.heads * base.head_dim != base.hidden:
        return [{}]
    found = []
    for width in sorted({*space.head_dims, base.head_dim}):
        heads = hidden // width
        few_enough = base.heads <= space.heads * heads <= space.heads**2 * base.heads
        whole = hidden % width == heads % base.tp == width % ALIGNED_ELEMENTS == 0
        if not whole or not few_enough or width < base.rope_dim:
            continue
        if kv_heads := _kv_heads(base, heads, space):
            found.append({"heads": heads, "kv_heads": kv_heads, "head_dim": width})
    return found


def _kv_heads(base: TransformerShape, heads: int, space: Space) -> int | None:
    """Returns the key/value heads: in the base's ratio, else the base's number; None if tp allows neither."""
    group = base.heads // base.kv_heads
    for kv_heads in (heads // group if heads % group == 0 else 0, base.kv_heads):
        copied = base.tp % kv_heads == 0 and (space.replicate_kv or kv_heads == base.kv_heads) if kv_heads else False
        if kv_heads and heads % kv_heads == 0 and (kv_heads % base.tp == 0 or copied):
            return kv_heads
    return None


@dataclass(frozen=True)
class Repair:
    """Shapes that tp can split, nearest first. words: one line that names what tp cannot split, and these shapes."""

    words: str
    shapes: tuple[TransformerShape, ...]


def repaired(asked: TransformerShape, tp: int, space: Space) -> Repair | None:
    """Returns the shapes nearest to `asked` (with tp = 1) that tp can split; None if it can split `asked` itself.

    Heads and key/value heads that tp does not divide become the next multiples of tp below and above. If hidden is
    heads × head_dim, it follows at the same head_dim; the MLP width follows hidden, and the layers keep the number of
    parameters. An MLP width that tp does not divide becomes a multiple of `hidden_step` per GPU, and such a vocabulary
    is padded as Megatron pads it.

    Raises InputError if `space.keep` forbids the change, or the number of heads would change by more than a factor of
    `space.heads`.
    """
    names = {"heads": "{} heads", "kv_heads": "{} kv_heads", "ffn": "ffn {}", "vocab": "vocab {}"}
    if asked.kv_heads == asked.heads:
        del names["kv_heads"]
    off = [words.format(getattr(asked, name)) for name, words in names.items() if not _splits(asked, name, tp)]
    if not off:
        return None
    trouble = f"{', '.join(off)} cannot be split over tp = {tp}"
    most = space.heads
    found = [
        _repaired_with(asked, heads, kv_heads, tp, space)
        for heads, kv_heads in _split_heads(asked, tp)
        if asked.heads <= most * heads <= most**2 * asked.heads
    ]
    shapes = [shape for shape in found if all(getattr(shape, name) == getattr(asked, name) for name in space.keep)]
    if not shapes:
        kept = f" with {', '.join(space.keep)} kept" if space.keep else ""
        raise InputError("advise", f"{trouble}{kept}", "a tp that divides heads, kv_heads and ffn, or less to keep")
    shapes.sort(key=lambda s: (abs(s.heads - asked.heads), abs(s.kv_heads - asked.kv_heads), s.heads))
    return Repair(
        f"{trouble}; the nearest shapes that can: {'; '.join(_sizes(s, asked) for s in shapes)}", tuple(shapes)
    )


def _splits(shape: TransformerShape, name: str, tp: int) -> bool:
    size = getattr(shape, name)
    return size % tp == 0 or (name == "kv_heads" and tp % size == 0)


def _split_heads(asked: TransformerShape, tp: int) -> Iterator[tuple[int, int]]:
    """Yields (heads, key/value heads) that tp can split, next to those of the shape; its own if tp divides them."""
    group = asked.heads // asked.kv_heads
    for heads in _multiples_beside(asked.heads, tp):
        if group == 1:
            yield heads, heads
        elif heads % asked.kv_heads == 0 and _splits(asked, "kv_heads", tp):
            yield heads, asked.kv_heads
        else:
            yield from ((heads, kv) for kv in _multiples_beside(max(1, heads // group), tp) if heads % kv == 0)


def _multiples_beside(size: int, tp: int) -> list[int]:
    """Returns the multiples of tp next to a size, at least tp; only the size if it is a multiple itself.

    >>> _multiples_beside(25, 2), _multiples_beside(8, 4)
    ([24, 26], [8])
    """
    return sorted({max(tp, size // tp * tp), -(-size // tp) * tp})


def _repaired_with(asked: TransformerShape, heads: int, kv_heads: int, tp: int, space: Space) -> TransformerShape:
    hidden, ffn = asked.hidden, asked.ffn
    if asked.heads * asked.head_dim == asked.hidden:
        hidden = heads * asked.head_dim
        ffn = round(asked.ffn / asked.hidden * hidden)
    if ffn % tp or hidden != asked.hidden:
        step = space.hidden_step * tp
        ffn = max(step, round(ffn / step) * step)
    vocab = asked.vocab if asked.vocab % tp == 0 else padded_vocab(asked.vocab, tp)
    shape = replace(asked, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, tp=tp)
    if "layers" in space.keep or (hidden, ffn) == (asked.hidden, asked.ffn):
        return shape
    return replace(shape, layers=max(1, round(layers_within(shape, parameters(asked), space.tolerance)[1])))


def _sizes(shape: TransformerShape, asked: TransformerShape) -> str:
    """Describes the changes of a repaired shape: `24 heads (hidden 24 × 64 = 1536)`."""
    said = []
    if shape.heads != asked.heads:
        grew = f" (hidden {shape.heads} × {shape.head_dim} = {shape.hidden})" if shape.hidden != asked.hidden else ""
        said.append(f"{shape.heads} heads{grew}")
    if shape.kv_heads != asked.kv_heads and shape.kv_heads != shape.heads:
        said.append(f"{shape.kv_heads} kv_heads")
    if shape.ffn != asked.ffn and shape.hidden == asked.hidden:
        said.append(f"ffn {shape.ffn}")
    if shape.vocab != asked.vocab:
        said.append(f"vocab {shape.vocab}")
    return ", ".join(said)
