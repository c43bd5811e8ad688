"""Lists the shapes near a given one, in groups from each of which a search keeps the best shape.

A group either has a new hidden size, with heads, MLP and depth to match, or changes a single
dimension (with the sizes that must change with it, such as tp with ep).
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from quantbench.advice.edges import NEAR
from quantbench.errors import InputError, require_choice, require_int
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.quantization import cdiv, divisors
from quantbench.units import percent
from quantbench.workload import TransformerShape
from quantbench.workload.dtypes import ALIGNED_ELEMENTS, DTYPES
from quantbench.workload.parameters import layers_within, padded_vocab, parameters

#: dimensions that `keep` may name
DIMENSIONS = (
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocab",
    "layers",
    "mbs",
    "experts",
    "top_k",
    "moe_ffn",
    "tp",
    "ep",
)
#: Largest factor by which the width of experts may change, and largest degree of expert parallelism
#: that is tried.
EXPERT_FACTOR = 4
LARGEST_EP = 64
#: head widths that attention kernels are tuned for
_USUAL_HEAD_DIMS = (64, 128, 256)
_WIDEST = 1024


@dataclass(frozen=True)
class Space:
    """Limits of the shapes to try.

    tolerance: largest relative difference between a shape's and the given shape's parameters.
    near: largest relative change of hidden, or of the MLP width where that width changes alone.
    hidden_step: step of hidden sizes, and of MLP widths per GPU. The exact sizes are also tried.
    head_dims: head widths to try besides the shape's own.
    heads: largest factor by which the number of heads may change.
    keep: names from DIMENSIONS that must not change.
    largest_mbs: largest micro-batch to try.
    """

    tolerance: float = 0.05
    near: float = NEAR
    hidden_step: int = 128
    head_dims: tuple[int, ...] = _USUAL_HEAD_DIMS
    heads: int = 2
    keep: tuple[str, ...] = ()
    largest_mbs: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance <= 0.5:
            expected = "a share of the parameters from 0 to 0.5"
            raise InputError("advise", f"tolerance = {self.tolerance!r}", expected)
        for width in self.head_dims:
            if require_int("advise", "head_dim", width, high=_WIDEST) % ALIGNED_ELEMENTS:
                expected = f"a multiple of {ALIGNED_ELEMENTS}: 16-byte rows"
                raise InputError("advise", f"head_dim = {width}", expected)
        for name in self.keep:
            require_choice("advise", "keep", name, DIMENSIONS)

    def words(self, base: TransformerShape) -> str:
        """Returns a text that says which shapes near `base` are tried."""
        within = f"parameters within ±{percent(self.tolerance)}"
        widths = ", ".join(map(str, self.head_dims))
        if base.experts:
            text = (
                f"one change alone where the weights fit, {within}; "
                f"experts from a {EXPERT_FACTOR}th to {EXPERT_FACTOR} times as wide in steps of "
                f"{self.hidden_step * base.tp}, as many active parameters; "
                f"ep in powers of 2 up to {LARGEST_EP}; tp and ep on as many GPUs; "
                f"mbs up to {self.largest_mbs}; a padded vocab"
            )
        else:
            text = f"{within}; hidden within ±{percent(self.near)} in steps of {self.hidden_step}; "
            if base.heads * base.head_dim != base.hidden:
                text += "heads as they are"
            else:
                text += f"head_dim {widths} or as it is; kv_heads that tp divides or as they are"
                if base.head_dim % ALIGNED_ELEMENTS:
                    text += f"; as many heads of {_aligned_width(base)}"
        if self.keep:
            text += f"; kept: {', '.join(self.keep)}"
        return text


@dataclass(frozen=True)
class Group:
    """Shapes of which a search keeps one.

    changed: dimension that changes alone, or "hidden" if other dimensions follow it.
    hidden: hidden size of the group.
    """

    changed: str
    hidden: int

    @property
    def joint(self) -> bool:
        """Whether hidden, heads, MLP and layers may all differ."""
        return self.changed == "hidden"


def shapes_near(
    base: TransformerShape, space: Space, memory_bytes: float = float("inf")
) -> dict[Group, list[TransformerShape]]:
    """Returns the shapes near `base` by group, without `base` itself.

    Sizes that change jointly keep the micro-batch, and keep the vocabulary if its rows are 16-byte
    aligned. The number of layers stays if hidden stays and the tolerance allows that. Otherwise, it
    becomes the number with which the parameters come nearest to those of `base`. No micro-batch has
    more rows than the models predict.

    memory_bytes: memory of a GPU. The weights of a model with experts, spread over ep GPUs, must
        take less.
    """
    found: dict[Group, list[TransformerShape]] = defaultdict(list)
    for group, change in _changes(base, space):
        if any(change.get(name, getattr(base, name)) != getattr(base, name) for name in space.keep):
            continue
        shape = _within_budget(replace(base, **change), base, space, same_depth=not group.joint)
        if shape is None or shape == base or shape.tokens > LARGEST_SIDE:
            continue
        if not shape.experts or weights_bytes(shape) < memory_bytes:
            found[group].append(shape)
    return found


def weights_bytes(shape: TransformerShape) -> float:
    """Returns the bytes of the weights on one of tp · ep GPUs."""
    return shape.parameters_per_gpu * DTYPES[shape.dtype].b_bytes


def least_ep(shape: TransformerShape, memory_bytes: float) -> int:
    """Returns the smallest ep with which the weights of a GPU take less than its memory.

    ep is a divisor of the number of experts. The result is 0 if no ep suffices.
    """
    for ep in divisors(shape.experts):
        if weights_bytes(replace(shape, ep=ep)) < memory_bytes:
            return ep
    return 0


def _changes(base: TransformerShape, space: Space) -> Iterator[tuple[Group, dict[str, Any]]]:
    """Yields the group of each candidate, and its sizes that differ from `base`.

    The number of parameters is compared later (`_within_budget`). A shape with experts changes one
    dimension at a time, because the experts have most of its parameters.
    """
    if not base.experts:
        for change in _jointly(base, space):
            yield Group("hidden", change["hidden"]), change
    for name, change in _one_by_one(base, space):
        yield Group(name, base.hidden), change


def _jointly(base: TransformerShape, space: Space) -> Iterator[dict[str, Any]]:
    """Yields the sizes of shapes whose hidden, ffn, vocab and heads may all differ from `base`.

    The vocabulary is padded if the rows of a GPU are not 16-byte aligned.
    """
    step = space.hidden_step
    vocab = base.vocab
    if vocab % (ALIGNED_ELEMENTS * base.tp):
        vocab = padded_vocab(vocab, base.tp)
    low = int((1 - space.near) * base.hidden)
    high = int((1 + space.near) * base.hidden)
    for hidden in sorted({base.hidden, *_multiples(step, low, high)}):
        if hidden % base.tp == 0:
            widths = _widths(base, hidden, step * base.tp)
            for ffn, heads in product(widths, _heads(base, hidden, space)):
                yield {"hidden": hidden, "ffn": ffn, "vocab": vocab, **heads}


def _one_by_one(base: TransformerShape, space: Space) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of a dimension, and the sizes that change with it alone."""
    step = space.hidden_step * base.tp
    if not base.experts:
        for heads in _heads(base, base.hidden, space):
            yield "heads" if "heads" in heads else "head_dim", heads
        for ffn in _multiples(step, (1 - space.near) * base.ffn, (1 + space.near) * base.ffn):
            yield "ffn", {"ffn": ffn}
    yield "vocab", {"vocab": padded_vocab(base.vocab, base.tp)}
    batches = {base.mbs // 2, *(base.mbs << i for i in range(1, space.largest_mbs.bit_length()))}
    for mbs in sorted(batches):
        if 1 <= mbs <= space.largest_mbs:
            yield "mbs", {"mbs": mbs}
    if base.experts:
        for change in _experts(base, space):
            yield "experts", change
        for power in range(LARGEST_EP.bit_length()):
            if base.experts % (1 << power) == 0:
                yield "ep", {"ep": 1 << power}
        for change in _split(base):
            yield "tp and ep", change


def _multiples(step: int, low: float, high: float) -> list[int]:
    """Returns the multiples of `step` from `low` to `high`."""
    return [size for size in range(step, int(high) + 1, step) if size >= low]


def _experts(base: TransformerShape, space: Space) -> Iterator[dict[str, Any]]:
    """Yields experts of other widths.

    The number of experts changes so that the parameters stay nearly the same, and top_k so that the
    arithmetic does. Measured routing is replaced by balanced routing.
    """
    widest = EXPERT_FACTOR * base.moe_ffn
    routing = base.routing if isinstance(base.routing, str) else "balanced"
    for width in _multiples(space.hidden_step * base.tp, base.moe_ffn / EXPERT_FACTOR, widest):
        experts = round(base.experts * base.moe_ffn / width / base.ep) * base.ep
        top_k = round(base.top_k * base.moe_ffn / width)
        active = top_k * width / (base.top_k * base.moe_ffn) - 1
        if 1 <= top_k <= experts and abs(active) <= space.tolerance:
            yield {"experts": experts, "top_k": top_k, "moe_ffn": width, "routing": routing}


def _split(base: TransformerShape) -> Iterator[dict[str, Any]]:
    """Yields other tp and ep with the same number of GPUs and of tokens."""
    gpus = base.tp * base.ep
    samples = base.mbs * base.ep
    widths = (base.heads, base.ffn, base.vocab, base.shared_ffn, base.moe_ffn)
    for ep in divisors(gpus):
        tp = gpus // ep
        if samples % ep or base.experts % ep or any(size % tp for size in widths):
            continue
        if base.kv_heads % tp == 0 or tp % base.kv_heads == 0:
            yield {"tp": tp, "ep": ep, "mbs": samples // ep}


def _within_budget(
    shape: TransformerShape, base: TransformerShape, space: Space, *, same_depth: bool
) -> TransformerShape | None:
    """Returns the shape with the layers that bring its parameters near the base's, or None.

    same_depth: whether the number of layers must stay.
    """
    low, middle, high = layers_within(shape, parameters(base), space.tolerance)
    same_depth = same_depth or "layers" in space.keep
    if (same_depth or shape.hidden == base.hidden) and low <= base.layers <= high:
        return shape
    layers = max(1, round(middle))
    if same_depth or not low <= layers <= high:
        return None
    return replace(shape, layers=layers)


def _widths(base: TransformerShape, hidden: int, step: int) -> list[int]:
    """Returns MLP widths that keep the base's ratio of ffn to hidden.

    The widths are the multiple of `step` nearest to the exact width, and the exact width itself if
    tp divides it.
    """
    exact = round(base.ffn / base.hidden * hidden)
    widths = {max(step, round(exact / step) * step)}
    if exact % base.tp == 0:
        widths.add(exact)
    return sorted(widths)


def _heads(base: TransformerShape, hidden: int, space: Space) -> list[dict[str, Any]]:
    """Returns heads, kv_heads and head_dim that are tried with a hidden size.

    Nothing changes if heads × head_dim is not hidden in the base. If the heads of the base are
    misaligned, the same number of heads is also tried with the next aligned width, with which
    heads × head_dim is more than hidden.
    """
    if base.heads * base.head_dim != base.hidden:
        return [{}]
    found: list[dict[str, Any]] = []
    if hidden == base.hidden and base.head_dim % ALIGNED_ELEMENTS:
        found.append({"head_dim": _aligned_width(base)})
    for width in sorted({*space.head_dims, base.head_dim}):
        heads = hidden // width
        # From base.heads / space.heads to base.heads · space.heads.
        few_enough = base.heads <= space.heads * heads <= space.heads**2 * base.heads
        whole = hidden % width == heads % base.tp == width % ALIGNED_ELEMENTS == 0
        if not whole or not few_enough or width < base.rope_dim:
            continue
        if kv_heads := _kv_heads(base, heads):
            found.append({"heads": heads, "kv_heads": kv_heads, "head_dim": width})
    return found


def _aligned_width(base: TransformerShape) -> int:
    """Returns the smallest aligned head width that is not below the base's."""
    return cdiv(base.head_dim, ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def _kv_heads(base: TransformerShape, heads: int) -> int | None:
    """Returns the number of key/value heads for a number of heads.

    The result keeps the base's ratio of query heads to key/value heads. If that number is not whole
    or tp does not divide it, the result is the base's number of key/value heads. It is None if that
    number does not divide the heads or cannot be split over tp GPUs either.
    """
    group = base.heads // base.kv_heads
    kv_heads = heads // group
    if heads % group == 0 and kv_heads % base.tp == 0:
        return kv_heads
    kv_heads = base.kv_heads
    shared = kv_heads % base.tp == 0 or base.tp % kv_heads == 0
    return kv_heads if shared and heads % kv_heads == 0 else None
