"""Lists the shapes near a given one, in groups of which a search takes the best.

One group has a new hidden size with heads, MLP and depth to match; another changes a single
dimension.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from quantbench.advice.edges import NEAR
from quantbench.errors import InputError, require_choice, require_int
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.quantization import ALIGNED_ELEMENTS, divisors
from quantbench.units import percent
from quantbench.workload import TransformerShape
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.parameters import layers_within, padded_vocab, parameters

#: dimensions that `keep` may name
DIMENSIONS = (
    "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "layers", "mbs", "experts", "top_k", "moe_ffn", "tp",
    "ep",
)  # fmt: skip
#: largest factor by which the width of experts may change, and the largest degree of expert
#: parallelism tried
EXPERT_FACTOR, LARGEST_EP = 4, 64
#: head widths that attention kernels are tuned for
_USUAL_HEAD_DIMS = (64, 128, 256)
_WIDEST = 1024


@dataclass(frozen=True)
class Space:
    """Limits of the shapes to try.

    tolerance: largest relative difference of the number of parameters.
    near: largest relative change of hidden, or of the MLP width when it changes alone.
    hidden_step: step of hidden sizes and of MLP widths per GPU; the exact values are tried as well.
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
            raise InputError(
                "advise",
                f"tolerance = {self.tolerance!r}",
                "a share of the parameters from 0 to 0.5",
            )
        for width in self.head_dims:
            if require_int("advise", "head_dim", width, high=_WIDEST) % ALIGNED_ELEMENTS:
                raise InputError(
                    "advise",
                    f"head_dim = {width}",
                    f"a multiple of {ALIGNED_ELEMENTS}: 16-byte rows",
                )
        for name in self.keep:
            require_choice("advise", "keep", name, DIMENSIONS)

    def words(self, base: TransformerShape) -> str:
        """Says which shapes near `base` are tried."""
        within = f"parameters within ±{percent(self.tolerance)}"
        if base.experts:
            said = [
                f"one change alone where the weights fit, {within}",
                f"experts from a {EXPERT_FACTOR}th to {EXPERT_FACTOR} times as wide in steps of "
                f"{self.hidden_step * base.tp}, as many active parameters",
                f"ep in powers of 2 up to {LARGEST_EP}",
                "tp and ep on as many GPUs",
                f"mbs up to {self.largest_mbs}",
                "a padded vocab",
            ]
        else:
            said = [within, f"hidden within ±{percent(self.near)} in steps of {self.hidden_step}"]
            if base.heads * base.head_dim != base.hidden:
                said += ["heads as they are"]
            else:
                widths = ", ".join(map(str, self.head_dims))
                said += [
                    f"head_dim {widths} or as it is",
                    "kv_heads that tp divides or as they are",
                ]
        if self.keep:
            said.append(f"kept: {', '.join(self.keep)}")
        return "; ".join(said)


@dataclass(frozen=True)
class Group:
    """Shapes of which one is to be taken.

    changed: the dimension that changes alone; "hidden" if the others follow it.
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
    """Lists the shapes near `base` by group, without `base` itself.

    Sizes that change jointly keep the micro-batch, and the vocabulary if its rows are 16-byte
    aligned. Their layers stay if hidden does and the tolerance allows it; otherwise they are those
    that come nearest to the base's parameters. No micro-batch has more rows than a product that is
    predicted.

    memory_bytes: memory of a GPU, which the weights of a model with experts, spread over ep GPUs,
        must leave.
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
    """Returns the least divisor of the experts that, as ep, leaves memory beside the weights of a
    GPU; 0: none does.
    """
    degrees = (
        ep for ep in divisors(shape.experts) if weights_bytes(replace(shape, ep=ep)) < memory_bytes
    )
    return next(degrees, 0)


def _changes(base: TransformerShape, space: Space) -> Iterator[tuple[Group, dict[str, Any]]]:
    """Yields the sizes that differ from `base`, before parameters are compared. A shape with
    experts, which mostly are its parameters, changes one dimension at a time."""
    if not base.experts:
        for change in _jointly(base, space):
            yield Group("hidden", change["hidden"]), change
    for name, changes in _one_by_one(base, space).items():
        for change in changes:
            yield Group(name, base.hidden), change


def _jointly(base: TransformerShape, space: Space) -> Iterator[dict[str, Any]]:
    step = space.hidden_step
    aligned = base.vocab % (ALIGNED_ELEMENTS * base.tp) == 0
    vocab = base.vocab if aligned else padded_vocab(base.vocab, base.tp)
    low, high = int((1 - space.near) * base.hidden), int((1 + space.near) * base.hidden)
    sizes = {base.hidden, *_multiples(step, low, high)}
    for hidden in sorted(size for size in sizes if size % base.tp == 0):
        for ffn, heads in product(
            _widths(base, hidden, step * base.tp), _heads(base, hidden, space)
        ):
            yield {"hidden": hidden, "ffn": ffn, "vocab": vocab, **heads}


def _one_by_one(base: TransformerShape, space: Space) -> dict[str, list[dict[str, Any]]]:
    step = space.hidden_step * base.tp
    batches = {base.mbs // 2, *(base.mbs << i for i in range(1, space.largest_mbs.bit_length()))}
    changes: dict[str, list[dict[str, Any]]] = {}
    if not base.experts:
        widths = _multiples(step, (1 - space.near) * base.ffn, (1 + space.near) * base.ffn)
        changes["heads"] = _heads(base, base.hidden, space)
        changes["ffn"] = [{"ffn": ffn} for ffn in widths]
    changes["vocab"] = [{"vocab": padded_vocab(base.vocab, base.tp)}]
    changes["mbs"] = [{"mbs": mbs} for mbs in sorted(batches) if 1 <= mbs <= space.largest_mbs]
    if base.experts:
        degrees = (1 << i for i in range(LARGEST_EP.bit_length()))
        changes["experts"] = list(_experts(base, space))
        changes["ep"] = [{"ep": ep} for ep in degrees if base.experts % ep == 0]
        changes["tp and ep"] = list(_split(base))
    return changes


def _multiples(step: int, low: float, high: float) -> list[int]:
    return [size for size in range(step, int(high) + 1, step) if size >= low]


def _experts(base: TransformerShape, space: Space) -> Iterator[dict[str, Any]]:
    """Yields experts of other widths, as many and as many per token as keep the parameters and the
    arithmetic.
    """
    widest = EXPERT_FACTOR * base.moe_ffn
    for width in _multiples(space.hidden_step * base.tp, base.moe_ffn / EXPERT_FACTOR, widest):
        experts = round(base.experts * base.moe_ffn / width / base.ep) * base.ep
        top_k = round(base.top_k * base.moe_ffn / width)
        active = top_k * width / (base.top_k * base.moe_ffn) - 1
        if 1 <= top_k <= experts and abs(active) <= space.tolerance:
            change = {"experts": experts, "top_k": top_k, "moe_ffn": width}
            yield change if isinstance(base.routing, str) else {**change, "routing": "balanced"}


def _split(base: TransformerShape) -> Iterator[dict[str, Any]]:
    """Yields other tp and ep on as many GPUs with as many tokens."""
    gpus, samples = base.tp * base.ep, base.mbs * base.ep
    for ep in divisors(gpus):
        tp = gpus // ep
        heads = base.heads % tp == 0 and (base.kv_heads % tp == 0 or tp % base.kv_heads == 0)
        widths = (base.ffn, base.vocab, base.shared_ffn, base.moe_ffn)
        if (
            samples % ep == 0
            and base.experts % ep == 0
            and heads
            and not any(size % tp for size in widths)
        ):
            yield {"tp": tp, "ep": ep, "mbs": samples // ep}


def _within_budget(
    shape: TransformerShape, base: TransformerShape, space: Space, *, same_depth: bool
) -> TransformerShape | None:
    low, middle, high = layers_within(shape, parameters(base), space.tolerance)
    same_depth = same_depth or "layers" in space.keep
    if (same_depth or shape.hidden == base.hidden) and low <= base.layers <= high:
        return shape
    layers = max(1, round(middle))
    return replace(shape, layers=layers) if low <= layers <= high and not same_depth else None


def _widths(base: TransformerShape, hidden: int, step: int) -> list[int]:
    """Returns MLP widths in the ratio to hidden: the nearest multiple of step, and the exact one if
    tp divides it.
    """
    exact = round(base.ffn / base.hidden * hidden)
    near = max(step, round(exact / step) * step)
    return sorted({near, exact} if exact % base.tp == 0 else {near})


def _heads(base: TransformerShape, hidden: int, space: Space) -> list[dict[str, Any]]:
    """Lists heads, kv_heads and head_dim for hidden. Nothing changes if heads × head_dim is not
    hidden in the base.
    """
    if base.heads * base.head_dim != base.hidden:
        return [{}]
    found = []
    for width in sorted({*space.head_dims, base.head_dim}):
        heads = hidden // width
        few_enough = base.heads <= space.heads * heads <= space.heads**2 * base.heads
        whole = hidden % width == heads % base.tp == width % ALIGNED_ELEMENTS == 0
        if not whole or not few_enough or width < base.rope_dim:
            continue
        if kv_heads := _kv_heads(base, heads):
            found.append({"heads": heads, "kv_heads": kv_heads, "head_dim": width})
    return found


def _kv_heads(base: TransformerShape, heads: int) -> int | None:
    """Returns the key/value heads: in the base's ratio, else the base's number; None if tp allows
    neither.
    """
    group = base.heads // base.kv_heads
    for kv_heads in (heads // group if heads % group == 0 else 0, base.kv_heads):
        if not kv_heads or heads % kv_heads:
            continue
        copied = kv_heads == base.kv_heads and base.tp % kv_heads == 0
        if kv_heads % base.tp == 0 or copied:
            return kv_heads
    return None
