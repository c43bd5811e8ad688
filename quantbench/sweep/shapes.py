"""From axis values to work: which products, softmax and attention a point on the axes stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isqrt, prod
from typing import Any

from quantbench.errors import InputError, require_choice
from quantbench.sweep.axes import GEMM_DIMS, MODEL_DIMS, MOST_VALUES, Axis
from quantbench.workload import Gemm, Op, TransformerShape
from quantbench.workload.dtypes import GEMM_DTYPES
from quantbench.workload.ops import LAYOUTS
from quantbench.workload.transformer import ATTENTIONS, SOFTMAXES

LINEAR_OPS = ("qkv", "proj", "mlp_up", "mlp_gate", "mlp_up_gate", "mlp_down")
UNFUSED_OPS = ("scores", "softmax", "context")
MODEL_OPS = (*LINEAR_OPS, *UNFUSED_OPS, "attention", "logits")
DIRECTIONS = ("forward", "backward", "both")

#: how attention runs at the points of a sweep: one of the kinds of a shape, or both, as runs before 0.2 measured it
SWEPT_ATTENTIONS = (*ATTENTIONS, "both")

#: the ops that a dimension changes most, measured when nothing else is asked for (of attention, those of its kind)
DEFAULT_OPS = {
    "hidden": LINEAR_OPS,
    "heads": (*UNFUSED_OPS, "attention"),
    "head-dim": (*UNFUSED_OPS, "attention"),
    "ffn": ("mlp_up", "mlp_gate", "mlp_up_gate", "mlp_down"),
    "seq": MODEL_OPS,
    "mbs": MODEL_OPS,
    "tp": MODEL_OPS,
    "vocab": ("logits",),
}

# The head width that hidden sizes are usually built from; it only decides which divisor is taken for `heads`.
_USUAL_HEAD_DIM = 128


@dataclass(frozen=True)
class Held:
    """What the axes do not vary. 0 and "" stand for "not given": the default then depends on the device or the shape.

    attention: one of SWEPT_ATTENTIONS; ops that are named are run whatever it says. softmax: one of SOFTMAXES, for
    predictions; measured is what the provider runs. ops: names of MODEL_OPS, or () for those the axes change most.
    direction: forward, backward or both.
    """

    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    gated: bool = False
    gate_fused: bool = False
    seq: int = 0
    vocab: int = 0
    layers: int = 0
    mbs: int = 1
    tp: int = 1
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    dtype: str = ""
    layout: str = "nn"
    causal: bool = True
    attention: str = ""
    softmax: str = "megatron"
    ops: tuple[str, ...] = ()
    direction: str = "forward"

    def __post_init__(self) -> None:
        for op in self.ops:
            if op not in MODEL_OPS:
                raise InputError("--ops", repr(op), "one of " + ", ".join(MODEL_OPS))
        require_choice("--direction", "direction", self.direction, DIRECTIONS)
        require_choice("--dtype", "dtype", self.dtype, ("", *GEMM_DTYPES))
        require_choice("--layout", "layout", self.layout, LAYOUTS)
        require_choice("--attention", "attention", self.attention, ("", *SWEPT_ATTENTIONS))
        require_choice("--softmax", "softmax", self.softmax, SOFTMAXES)


# Sizes for what is not given: those of a 7-billion-parameter model on a GPU, small ones where one core does the work.
_GPU_DEFAULTS = {"hidden": 4096, "seq": 2048, "vocab": 50304, "layers": 1, "m": 4096, "n": 4096, "k": 4096}
_CPU_DEFAULTS = {"hidden": 768, "seq": 256, "vocab": 1024, "layers": 1, "m": 512, "n": 512, "k": 512}

#: values of an axis for which none were given, as `parse_values` reads them, by device kind
DEFAULT_VALUES: dict[str, dict[str, str]] = {
    "cuda": {
        "hidden": "1024:8192:64", "heads": "8:128:8", "head-dim": "32:256:8", "ffn": "4096:16384:128",
        "seq": "512:8192:256", "mbs": "1:8:1", "tp": "1,2,4,8", "vocab": "49152:51200:64",
        "m": "1024:4096:64", "n": "1024:8192:64", "k": "1024:8192:64", "batch": "1:64:1",
    },
    "cpu": {
        "hidden": "256:1024:16", "heads": "4:24:4", "head-dim": "16:128:8", "ffn": "512:2048:64",
        "seq": "64:512:32", "mbs": "1:4:1", "tp": "1,2,4", "vocab": "960:1536:32",
        "m": "64:512:16", "n": "256:1024:16", "k": "256:1024:32", "batch": "1:16:1",
    },
}  # fmt: skip


def with_defaults(held: Held, device_kind: str, dtype: str, attention: str = "flash") -> Held:
    """`held` with everything that was not given filled in. dtype, attention: the device's usual ones."""
    defaults: Mapping[str, Any] = _GPU_DEFAULTS if device_kind == "cuda" else _CPU_DEFAULTS
    missing = {name: value for name, value in defaults.items() if getattr(held, name) == 0}
    return replace(held, **missing, dtype=held.dtype or dtype, attention=held.attention or attention)


def ops_at(axes: tuple[Axis, ...], values: tuple[int, ...], held: Held, who: str = "sweep") -> tuple[Op, ...]:
    """The ops of one point: `values` gives a value for each of `axes`, `held` everything else (defaults filled in).

    Raises InputError, in the name of the command `who`, for a point that cannot be: heads that do not divide hidden, …
    """
    point = {axis.field: value for axis, value in zip(axes, values, strict=True)}
    if axes[0].dim in GEMM_DIMS:
        sizes = {name: point.get(name, getattr(held, name)) for name in GEMM_DIMS}
        return (Op("gemm", "forward", Gemm(**sizes, dtype=held.dtype, layout=held.layout), 1),)
    wanted = held.ops or _default_ops(axes, held.attention)
    cores = {"flash": ("attention",), "unfused": UNFUSED_OPS}
    # Products are the same with either; they stand where that attention runs which is there.
    main = "unfused" if "attention" not in wanted and set(UNFUSED_OPS) & set(wanted) else "flash"
    found = []
    for attention, core in cores.items():
        names = {op for op in wanted if op in core or (attention == main and op not in (*UNFUSED_OPS, "attention"))}
        shape = _shape(point, held, who, attention)
        found += [op for op in shape.ops(backward=held.direction != "forward") if op.name in names]
    if held.direction == "backward":
        found = [op for op in found if op.phase != "forward"]
    return tuple(found)


def _default_ops(axes: tuple[Axis, ...], attention: str) -> tuple[str, ...]:
    """What the axes change most, with attention run as `attention` says."""
    other = {"flash": UNFUSED_OPS, "unfused": ("attention",)}.get(attention, ())
    found = (op for op in MODEL_OPS if any(op in DEFAULT_OPS[axis.dim] for axis in axes))
    return tuple(op for op in found if op not in other)


def _shape(point: dict[str, int], held: Held, who: str, attention: str) -> TransformerShape:
    names = {f.name for f in fields(TransformerShape)} & {f.name for f in fields(Held)}
    values = {name: point.get(name, getattr(held, name)) for name in names - {"attention"}}
    if values["heads"] == 0:
        values["heads"] = _heads_for(values["hidden"], values["head_dim"], values["tp"], who)
    return TransformerShape(**values, attention=attention)


def _heads_for(hidden: int, head_dim: int, tp: int, who: str) -> int:
    """Heads where none were given: hidden / head_dim if that is given, else the divisor of hidden, itself divisible
    by tp, that brings head_dim nearest to the usual 128 (the linear layers do not depend on it)."""
    if head_dim:
        if hidden % head_dim:
            raise InputError(who, f"hidden = {hidden} with head-dim = {head_dim}", "hidden divisible by head-dim")
        return hidden // head_dim
    if hidden % tp:
        raise InputError(who, f"hidden = {hidden} with tp = {tp}", "hidden divisible by tp")
    per_gpu = hidden // tp
    small = [d for d in range(1, isqrt(per_gpu) + 1) if per_gpu % d == 0]
    divisors = [d * tp for half in small for d in (half, per_gpu // half)]
    return min(divisors, key=lambda heads: (abs(hidden / heads - _USUAL_HEAD_DIM), heads))


def check_axes(axes: tuple[Axis, ...], who: str = "sweep") -> None:
    """Refuse axes that cannot make one grid, or one too large to list, in the name of `who`."""
    if not axes:
        raise InputError(who, "no --dim", "at least one dimension to vary")
    dims = [axis.dim for axis in axes]
    repeated = next((d for d in dims if dims.count(d) > 1), None)
    if repeated:
        raise InputError(who, f"--dim {repeated} twice", "each dimension once")
    if any(d in GEMM_DIMS for d in dims) and any(d in MODEL_DIMS for d in dims):
        raise InputError(who, "--dim " + " --dim ".join(dims), "dimensions of a model, or m, n, k, batch: not both")
    places = prod(len(axis.values) for axis in axes)
    if places > MOST_VALUES:
        raise InputError(who, f"{places:,} places in the grid of {', '.join(dims)}", f"at most {MOST_VALUES:,}")
