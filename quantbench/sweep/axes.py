"""Parses the axes of a sweep, and lists the ops at each grid point.

`parse_axis` reads one axis. `Held` has the sizes that no axis varies, and `places_of` combines them
with the axes into the ops of each grid point.

An axis is written as comma-separated items. Each item is an integer or `start:stop[:step]`. The
stop is included if the step reaches it. The suffix `@edges` adds both sides of every predicted edge
(a size after which a GEMM needs more waves) between the smallest and the largest value. Sizes that
are not given get the device's defaults. The number of heads follows from hidden at a fixed
head_dim.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import lcm, prod
from typing import Any

from quantbench.device import default_attention, default_dtype
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, first_repeated, require_choice
from quantbench.quantization import divisors
from quantbench.sweep.sizes import (
    ATTENTION_OPS,
    DIMS,
    EXPERT_OPS,
    GEMM_DIMS,
    LARGEST,
    MODEL_OPS,
    MOE_DIMS,
    SWEPT,
    UNFUSED_OPS,
    usual_sizes,
)
from quantbench.workload import Gemm, Op, TransformerShape
from quantbench.workload.dtypes import GEMM_DTYPES
from quantbench.workload.ops import LAYOUTS
from quantbench.workload.transformer import ATTENTIONS, SOFTMAXES, AttentionDetails, Experts

DIRECTIONS = ("forward", "backward", "both")


#: name of the axis that numbers a list of shapes from 1; a shape's number is not a size, so no
#: trend is fitted along this axis
SHAPE_DIM = "shape"

#: maximum number of values in an axis; also the maximum number of points in a grid
MAX_VALUES = 100_000
# head_dim from which the number of heads follows if neither heads nor head_dim is given.
_USUAL_HEAD_DIM = 128


@dataclass(frozen=True)
class Axis:
    """One dimension of a sweep.

    dim: name of the dimension as the user types it (`head-dim`).
    values: distinct values, in ascending order.
    edges: whether both sides of the predicted edges must still be added to the values.
    Raises InputError for an unknown dimension, and if there are no values.
    """

    dim: str
    values: tuple[int, ...]
    edges: bool = False

    def __post_init__(self) -> None:
        if self.dim not in (*DIMS, SHAPE_DIM):
            raise InputError("--dim", repr(self.dim), "one of " + ", ".join(DIMS))
        if not self.values:
            raise InputError(f"--dim {self.dim}", "no values", "at least one value")

    @property
    def field(self) -> str:
        """Name of the dimension as a Python identifier (`head_dim`)."""
        return self.dim.replace("-", "_")


def parse_axis(text: str, device_kind: str = "") -> Axis:
    """Parses an axis that is written as `dim=values`, or as `dim` for the default values.

    device_kind: device kind that selects the default values, cuda or cpu; "" if the text must
        contain values.
    Raises InputError that names the offending item.

    >>> parse_axis("tp=1,2,4").values
    (1, 2, 4)
    >>> parse_axis("hidden=1024:1280:128@edges")
    Axis(dim='hidden', values=(1024, 1152, 1280), edges=True)
    """
    dim, given, text = text.partition("=")
    if dim not in DIMS:
        raise InputError("--dim", repr(dim), "one of " + ", ".join(DIMS))
    if not given and device_kind:
        text = SWEPT[dim].usual_range(device_kind)
    body, at, suffix = text.strip().partition("@")
    if at and suffix != "edges":
        raise InputError(f"--dim {dim}", f"'@{suffix}'", "@edges or nothing after the values")
    values: set[int] = set()
    for item in body.rstrip(",").split(","):
        found = _parse_item(dim, item.strip())
        if len(values) + len(found) > MAX_VALUES:  # the values are counted before they are listed
            many = f"{text.strip()!r} ({len(values) + len(found):,} values)"
            raise InputError(f"--dim {dim}", many, f"at most {MAX_VALUES:,} values")
        values.update(found)
    if at and len(values) < 2:
        raise InputError(
            f"--dim {dim}", repr(text), "a range for @edges to look in, such as 1024:4096@edges"
        )
    return Axis(dim, tuple(sorted(values)), edges=bool(at))


def _parse_item(dim: str, item: str) -> range:
    """Parses one item of an axis. Raises InputError if it is malformed or out of range."""
    parts = item.split(":")
    expected = f"start:stop[:step] or an integer, all from 1 to {LARGEST:,}"
    if len(parts) > 3 or not all(re.fullmatch("[0-9]{1,10}", part.strip()) for part in parts):
        raise InputError(f"--dim {dim}", repr(item)[:100], expected)
    numbers = list(map(int, parts))
    start = numbers[0]
    stop = numbers[min(1, len(numbers) - 1)]
    step = numbers[2] if len(numbers) == 3 else SWEPT[dim].step
    if start < 1 or step < 1 or stop > LARGEST:
        raise InputError(f"--dim {dim}", repr(item)[:100], expected)
    if stop < start:
        raise InputError(f"--dim {dim}", repr(item), f"a stop that is not below the start {start}")
    return range(start, stop + 1, step)


def check_axes(axes: tuple[Axis, ...], who: str = "sweep") -> None:
    """Raises InputError if the axes cannot form a grid or if the grid is too large.

    who: command to name in error messages.
    """
    if not axes:
        raise InputError(who, "no --dim", "at least one dimension to vary")
    dims = [axis.dim for axis in axes]
    typed = "--dim " + " --dim ".join(dims)
    repeated = first_repeated(dims)
    if repeated:
        raise InputError(who, f"--dim {repeated} twice", "each dimension once")
    if "tokens" in dims and {"seq", "mbs"} & set(dims):
        raise InputError(who, typed, "tokens, or seq and mbs whose product they are")
    if set(GEMM_DIMS) & set(dims) and not set(GEMM_DIMS).issuperset(dims):
        raise InputError(who, typed, "dimensions of a model, or m, n, k, batch: not both")
    places = prod(len(axis.values) for axis in axes)
    if places > MAX_VALUES:
        raise InputError(
            who, f"{places:,} places in the grid of {', '.join(dims)}", f"at most {MAX_VALUES:,}"
        )


@dataclass(frozen=True, kw_only=True)
class GemmSizes:
    """Sizes of a plain GEMM, or of a batch of equal GEMMs. A plain GEMM is not part of a model.

    m, n, k: rows of the output, columns of the output, and inner dimension.
    batch: number of GEMMs in the batch.
    layout: one of LAYOUTS.
    """

    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    layout: str = "nn"


@dataclass(frozen=True)
class Held(GemmSizes, Experts, AttentionDetails):
    """Sizes and options that no axis varies.

    0 and "" select a default that depends on the device or the shape.

    attention: one of ATTENTIONS; `ops` overrides it.
    heads: number of heads; 0 for hidden / head_dim.
    head_dim: width of a head; along a hidden axis, 0 means 128.
    heads_per_kv_head: ratio of heads to kv_heads, used if kv_heads = 0.
    experts: number of routed experts per layer; 0 means an MLP, unless an axis is in MOE_DIMS.
    tokens: tokens in each GPU's micro-batch, which replace seq · mbs in layers with experts.
    softmax: one of SOFTMAXES. Only predictions use this field; a sweep measures the provider's
        softmax.
    ops: names from MODEL_OPS; () for the ops that the axes change most.
    direction: one of DIRECTIONS.
    """

    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    heads_per_kv_head: int = 1
    head_dim: int = 0
    ffn: int = 0
    gated: bool = False
    gate_fused: bool = False
    seq: int = 0
    vocab: int = 0
    layers: int = 0
    mbs: int = 1
    tp: int = 1
    tokens: int = 0
    dtype: str = ""
    attention: str = ""
    ops: tuple[str, ...] = ()
    direction: str = "forward"

    def __post_init__(self) -> None:
        for op in self.ops:
            if op not in MODEL_OPS:
                raise InputError("--ops", repr(op), "one of " + ", ".join(MODEL_OPS))
        if "attention" in self.ops and set(UNFUSED_OPS) & set(self.ops):
            raise InputError(
                "--ops", ",".join(self.ops), "attention, or scores, softmax and context: not both"
            )
        require_choice("--direction", "direction", self.direction, DIRECTIONS)
        require_choice("--dtype", "dtype", self.dtype, ("", *GEMM_DTYPES))
        require_choice("--layout", "layout", self.layout, LAYOUTS)
        require_choice("--attention", "attention", self.attention, ("", *ATTENTIONS))
        require_choice("softmax", "softmax", self.softmax, SOFTMAXES)


def with_defaults(held: Held, spec: DeviceSpec, dims: Collection[str] = ()) -> Held:
    """Returns `held` with the device's defaults in place of unset values.

    dims: axes as the user typed them. An axis in MOE_DIMS adds the defaults of the expert sizes.
    """
    defaults = usual_sizes(spec.torch_kind, "model", "product")
    if held.experts or {dim.partition("=")[0] for dim in dims} & set(MOE_DIMS):
        defaults |= usual_sizes(spec.torch_kind, "experts")
    missing: dict[str, Any] = {
        name: value for name, value in defaults.items() if getattr(held, name) == 0
    }
    missing["dtype"] = held.dtype or default_dtype(spec)
    missing["attention"] = held.attention or default_attention(spec)
    return replace(held, **missing)


def ops_at(
    axes: Sequence[Axis],
    point: dict[str, int],
    held: Held,
    who: str = "sweep",
    *,
    modelled: bool = False,
) -> tuple[tuple[Op, ...], str]:
    """Returns the ops of one point, and a sentence that lists the wanted ops that are missing.

    The sentence is "" if no wanted op is missing.

    point: value on each axis, by `Axis.field`.
    held: values of all other dimensions, with the defaults filled in.
    who: command to name in error messages.
    modelled: whether to return a layer's routed experts as one op, as the latency models predict
        them.

    Raises InputError for an impossible point (for example, heads that do not divide hidden).
    """
    if axes[0].dim in GEMM_DIMS:
        sizes = {name: point.get(name, getattr(held, name)) for name in GEMM_DIMS}
        return (Op("gemm", "forward", Gemm(**sizes, dtype=held.dtype, layout=held.layout), 1),), ""
    heads = _heads_of(point, held, who)
    shape = _shape({**point, **heads.sizes}, held, who)
    # By default, the wanted ops are those that the axes change most. They never include the ops of
    # the attention kind (fused or unfused) that the shape does not use.
    other = UNFUSED_OPS if shape.attention == "flash" else ("attention",)
    changed = set[str]().union(*(SWEPT[axis.dim].ops for axis in axes)).difference(other)
    wanted = held.ops or [op for op in MODEL_OPS if op in changed]
    missing = [op for op in wanted if op in heads.without]
    names = set(wanted).difference(missing)
    if missing and not names:
        raise InputError(who, heads.objection, heads.expected)
    if modelled and shape.experts and held.direction == "forward":
        ops = shape.modelled_ops()
        if names & set(EXPERT_OPS):
            names.add("experts")
    else:
        ops = shape.ops(backward=held.direction != "forward")
    if held.direction == "backward":
        ops = tuple(op for op in ops if op.phase != "forward")
    left_out = ""
    if missing:
        left_out = f"{heads.objection}: without {', '.join(missing)}"
    return tuple(op for op in ops if op.name in names), left_out


def places_of(
    axes: Sequence[Axis], held: Held, who: str = "sweep", *, modelled: bool = False
) -> tuple[list[tuple[dict[str, int], tuple[Op, ...]]], tuple[str, ...]]:
    """Returns each possible grid point with its ops, and the reasons for what is left out.

    Impossible points are left out, and so are ops that a point does not have.

    held, who, modelled: as in `ops_at`.
    Raises InputError if all points are impossible.
    """
    places = []
    left_out = []
    errors = []
    fields = [axis.field for axis in axes]
    for values in product(*(axis.values for axis in axes)):
        point = dict(zip(fields, values, strict=True))
        try:
            ops, without = ops_at(axes, point, held, who, modelled=modelled)
        except InputError as error:
            errors.append(error)
            left_out.append(str(error))
            continue
        if without:
            left_out.append(without)
        places.append((point, ops))
    if errors and not places:
        raise errors[0]
    return places, tuple(left_out)


# Fields that have the same name in `Held` and in `TransformerShape`.
_SHARED = Held.__dataclass_fields__.keys() & TransformerShape.__dataclass_fields__.keys()


def _shape(point: dict[str, int], held: Held, who: str) -> TransformerShape:
    """Builds the transformer shape of one point."""
    values: dict[str, Any] = {name: point.get(name, getattr(held, name)) for name in _SHARED}
    if values["experts"]:
        values["gated"] = True  # all published models with experts are gated
        if tokens := point.get("tokens", held.tokens):
            values |= {"seq": tokens, "mbs": 1}
    else:
        values |= dict.fromkeys(("top_k", "moe_ffn", "shared_ffn"), 0)
    if "attention" in held.ops:
        values["attention"] = "flash"
    elif set(UNFUSED_OPS) & set(held.ops):
        values["attention"] = "unfused"
    try:
        return TransformerShape(**values)
    except InputError as error:
        raise InputError(who, error.value, error.expected) from None


@dataclass(frozen=True)
class _Heads:
    """Head sizes of one point, and the ops that these sizes rule out.

    sizes: heads, kv_heads and head_dim by name. A missing name keeps its value in `Held`.
    without: ops that the point does not have. The attention ops are missing if no allowed number of
        heads gives the wanted head_dim. qkv is missing if its width would depend on the number of
        key/value heads.
    objection: why the ops in `without` are missing.
    expected: condition under which the point would have all ops, for error messages.
    """

    sizes: dict[str, int]
    without: tuple[str, ...] = ()
    objection: str = ""
    expected: str = ""


def _heads_of(point: dict[str, int], held: Held, who: str) -> _Heads:
    """Returns the head sizes of one point.

    A given number of heads is kept. Otherwise the number is hidden / head_dim. If this is no whole
    number, or if tp or kv_heads does not allow it, the attention ops are left out. qkv is also left
    out if its width depends on the number of key/value heads. The other GEMMs do not depend on the
    heads, so they are measured with the allowed number of heads whose head_dim is nearest.

    Without a wanted head_dim, the allowed number whose head_dim is nearest to 128 is used.
    """

    def size(name: str) -> int:
        value: int = point.get(name, getattr(held, name))
        return value

    if size("heads"):
        return _Heads({})
    hidden = size("hidden")
    tp = size("tp")
    kv_heads = size("kv_heads")
    if hidden % tp:
        raise InputError(who, f"hidden = {hidden} with tp = {tp}", "hidden divisible by tp")
    ratio = 1 if kv_heads else held.heads_per_kv_head
    head_dim = size("head_dim")
    if not head_dim and "hidden" in point:
        head_dim = _USUAL_HEAD_DIM
    if not head_dim and kv_heads:
        heads = _nearest_heads(hidden, lcm(tp, kv_heads), _USUAL_HEAD_DIM)
        return _Heads({"heads": heads})
    if head_dim and hidden % head_dim == 0:
        heads = hidden // head_dim
        kv = kv_heads or max(1, heads // ratio)
        split = kv % tp == 0 or tp % kv == 0
        if split and heads % tp == 0 and heads % (kv * ratio) == 0:
            return _Heads({"heads": heads, "kv_heads": kv, "head_dim": head_dim})
    without: tuple[str, ...] = ATTENTION_OPS if head_dim else ()
    replicated = hidden < head_dim * tp * ratio  # key/value heads are replicated over tp
    if hidden % (tp * ratio) or kv_heads or replicated:
        without += ("qkv",)
        ratio = 1
    heads = _nearest_heads(hidden, tp * ratio, head_dim or _USUAL_HEAD_DIM)
    sizes = {"heads": heads, "kv_heads": heads // ratio, "head_dim": hidden // heads}
    expected = "whole heads that tp and kv_heads divide, or --heads, which keeps their number"
    return _Heads(sizes, without, f"hidden = {hidden} with head_dim = {head_dim}", expected)


def _nearest_heads(hidden: int, step: int, head_dim: int) -> int:
    """Returns the number of heads whose head width, hidden / heads, is nearest to `head_dim`.

    step: number that must divide the number of heads; must itself divide hidden.
    """
    rest = hidden // step
    candidates = (divisor * step for divisor in divisors(rest))
    return min(candidates, key=lambda heads: (abs(hidden / heads - head_dim), heads))
