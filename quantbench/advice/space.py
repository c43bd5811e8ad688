"""Lists the transformer shapes near a given shape, for `advice.search` to compare.

`shapes_near` returns the shapes in groups, and the search keeps the best shape of each group. The
shapes of a group either have one hidden size, with heads, MLP and number of layers adapted to it,
or differ from the given shape in a single dimension. Sizes that depend on the single dimension
change with it, such as mbs with tp and ep.
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

#: dimensions that may change, and that `Space.keep` may name
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
#: largest factor by which the width of experts may change, up or down
EXPERT_FACTOR = 4
#: largest degree of expert parallelism (ep) that is tried if tp stays the same
LARGEST_EP = 64
# Values of head_dim for which attention kernels are tuned.
_USUAL_HEAD_DIMS = (64, 128, 256)
# Largest head_dim that a user may give.
_WIDEST = 1024


@dataclass(frozen=True)
class Space:
    """Limits of the shapes to try.

    tolerance: largest relative change of the number of parameters.
    near: largest relative change of hidden, or of ffn if only ffn changes.
    hidden_step: step between hidden sizes, and between MLP widths per GPU. The given hidden size
        and the given ratio of ffn to hidden are also tried.
    head_dims: values of head_dim to try in addition to the given one.
    heads: largest factor by which the number of heads may change, up or down.
    keep: names from DIMENSIONS that must not change.
    largest_mbs: largest micro-batch size to try.
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
        """Describes which shapes near `base` are tried."""
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
    """Identifies a group of shapes, of which a search keeps the best one.

    changed: name of the only dimension that changes (or "tp and ep"), or "hidden" if hidden and
        other dimensions change jointly.
    hidden: hidden size of the group's shapes.
    """

    changed: str
    hidden: int

    @property
    def joint(self) -> bool:
        """Whether hidden, heads, ffn, vocab and layers may all change."""
        return self.changed == "hidden"


def shapes_near(
    base: TransformerShape, space: Space, memory_bytes: float = float("inf")
) -> dict[Group, list[TransformerShape]]:
    """Returns the shapes near `base` by group, without `base` itself.

    With another hidden size, the number of layers is adapted so that the number of parameters comes
    nearest to the base's. With the same hidden size, the number of layers is adapted only if the
    tolerance requires it. Single changes never adapt it. Shapes with more tokens per micro-batch
    than the latency models accept are left out.

    memory_bytes: memory of a GPU. Shapes with experts are left out if a GPU's weights do not fit.
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
    """Returns the bytes of a model's weights on one of tp · ep GPUs."""
    return shape.parameters_per_gpu * DTYPES[shape.dtype].b_bytes


def least_ep(shape: TransformerShape, memory_bytes: float) -> int:
    """Returns the smallest ep with which a GPU's weights fit in its memory; 0 if there is none.

    Only divisors of the number of experts are tried.

    memory_bytes: memory of a GPU.
    """
    for ep in divisors(shape.experts):
        if weights_bytes(replace(shape, ep=ep)) < memory_bytes:
            return ep
    return 0


def _changes(base: TransformerShape, space: Space) -> Iterator[tuple[Group, dict[str, Any]]]:
    """Yields the candidates near `base`, as (group, values of the changed sizes by name).

    The numbers of layers and parameters are not considered yet (see `_within_budget`). For a base
    with experts, only single dimensions change, because the experts have most of the parameters.
    """
    if not base.experts:
        for change in _jointly(base, space):
            yield Group("hidden", change["hidden"]), change
    for name, change in _one_by_one(base, space):
        yield Group(name, base.hidden), change


def _jointly(base: TransformerShape, space: Space) -> Iterator[dict[str, Any]]:
    """Yields candidates whose hidden, ffn and heads may all change, as values by size name.

    The vocabulary is padded if its rows on one of tp GPUs are not 16-byte aligned.
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
    """Yields candidates with a single changed dimension, as (dimension, values by size name)."""
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
    """Yields candidates with wider or narrower experts, as values by size name.

    The number of experts is adapted to keep the number of parameters nearly the same, and top_k is
    adapted to keep the FLOPs nearly the same. A measured routing applies only to the experts of the
    base, so balanced routing replaces it.
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
    """Yields candidates with other tp and ep for the same number of GPUs and tokens.

    Each candidate is a dictionary of values by size name.
    """
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
    """Adapts a candidate's number of layers to the base's number of parameters.

    The result is None if the tolerance allows no number of layers.

    same_depth: whether the number of layers must not change.
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
    """Returns the MLP widths to try with a hidden size.

    The exact width has the base's ratio of ffn to hidden. The multiple of `step` nearest to the
    exact width is tried, and the exact width itself if tp divides it.
    """
    exact = round(base.ffn / base.hidden * hidden)
    widths = {max(step, round(exact / step) * step)}
    if exact % base.tp == 0:
        widths.add(exact)
    return sorted(widths)


def _heads(base: TransformerShape, hidden: int, space: Space) -> list[dict[str, Any]]:
    """Returns the heads, kv_heads and head_dim to try with a hidden size, as values by size name.

    Heads stay unchanged if heads × head_dim differs from hidden in the base. If the base's head_dim
    is misaligned and hidden stays, the same number of heads is also tried with the next aligned
    head_dim. Then heads × head_dim exceeds hidden.
    """
    if base.heads * base.head_dim != base.hidden:
        return [{}]
    found: list[dict[str, Any]] = []
    if hidden == base.hidden and base.head_dim % ALIGNED_ELEMENTS:
        found.append({"head_dim": _aligned_width(base)})
    for width in sorted({*space.head_dims, base.head_dim}):
        heads = hidden // width
        # heads must be from base.heads / space.heads to base.heads · space.heads.
        few_enough = base.heads <= space.heads * heads <= space.heads**2 * base.heads
        whole = hidden % width == heads % base.tp == width % ALIGNED_ELEMENTS == 0
        if not whole or not few_enough or width < base.rope_dim:
            continue
        if kv_heads := _kv_heads(base, heads):
            found.append({"heads": heads, "kv_heads": kv_heads, "head_dim": width})
    return found


def _aligned_width(base: TransformerShape) -> int:
    """Returns the base's head_dim, rounded up to the next aligned value."""
    return cdiv(base.head_dim, ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def _kv_heads(base: TransformerShape, heads: int) -> int | None:
    """Returns the number of key/value heads for a number of query heads.

    The first valid one of two numbers is returned: the number with the base's ratio of query heads
    to key/value heads, and the base's number of key/value heads. The result is None if neither
    number divides the query heads and can be split over tp GPUs.

    heads: number of query heads.
    """
    group = base.heads // base.kv_heads
    kv_heads = heads // group
    if heads % group == 0 and kv_heads % base.tp == 0:
        return kv_heads
    kv_heads = base.kv_heads
    shared = kv_heads % base.tp == 0 or base.tp % kv_heads == 0
    return kv_heads if shared and heads % kv_heads == 0 else None
