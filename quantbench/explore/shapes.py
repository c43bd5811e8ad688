"""Writes the arithmetic of transformer shapes as JavaScript: validity, ops, parameters and weights.

The Python code of `workload` is run on symbolic sizes (see `trace`) and recorded as JavaScript, so
the explorer page accepts the same shapes and has the same ops. The module also writes the memory
traffic of softmax and the conditions of Megatron's fused kernel.
"""

from functools import partial
from typing import Any

from quantbench.alignment_rules import side_names
from quantbench.errors import InputError
from quantbench.explore.javascript import Script
from quantbench.explore.trace import flag, inputs
from quantbench.latency.softmax import fallback_bytes
from quantbench.megatron import softmax_objections
from quantbench.workload import MoE, Op, Softmax, TransformerShape
from quantbench.workload.dtypes import VECTOR_DTYPES
from quantbench.workload.ops import DIRECTIONS, LAYOUTS
from quantbench.workload.parameters import parameters
from quantbench.workload.transformer import ATTENTIONS

SIZES = (
    "hidden", "heads", "kv_heads", "head_dim", "ffn", "seq", "mbs", "tp", "vocab", "layers",
    "experts", "top_k", "moe_ffn", "ep", "shared_ffn", "dense_layers", "kv_rank", "q_rank",
    "rope_dim", "value_dim",
)  # fmt: skip
FLAGS = ("gated", "gate_fused", "tied")
# Sizes of ops that the page uses if the op has them.
_OF_OPS = (
    "m", "n", "k", "batch", "heads", "kv_heads", "seq_q", "head_dim", "rows", "mask_batch",
    "tokens", "hidden", "expert_ffn", "num_experts", "top_k", "tp", "ep", "gated",
)  # fmt: skip
# A value of 0 stands for a default in these sizes. The page has replaced it by the default.
_GIVEN = ("head_dim", "kv_heads", "ffn")
# Dtype of the recorded shapes. Attention runs in bf16 if the dtype is 8-bit, so `_op` recognises
# ops of attention by their dtype.
_DTYPE = "fp8"


class _Experts(MoE):
    """Experts without grouped GEMMs, because the page draws their rows itself."""

    def grouped_gemms(self, rank: int | None = None) -> dict[str, Any]:
        return {}


class _Shape(TransformerShape):
    def experts_of(self, tokens: int) -> MoE:
        return _Experts(**vars(super().experts_of(tokens)))


def shape_script() -> str:
    """Returns the body of a JavaScript function that makes an object of functions.

    The functions of a shape are objection (why the shape is impossible, or ""), parameters,
    weights (on one GPU), flashOps and unfusedOps. Further functions, one per direction and dtype,
    describe a softmax.
    """
    sizes: dict[str, Any] = {name: inputs(f"s.{name}")[0] for name in SIZES}
    flags: dict[str, Any] = {name: flag(f"s.{name}") for name in FLAGS}
    made = Script({sizes[name] == 0: False for name in _GIVEN})

    def shape(attention: str = "flash") -> TransformerShape:
        return _Shape(**sizes, **flags, attention=attention, dtype=_DTYPE)

    def possible() -> str:
        shape()
        return ""

    def refusal(error: InputError) -> str:
        return f"{error.value}; expected {error.expected}"

    made.add("objection", possible, refusal)
    made.add("parameters", lambda: parameters(shape()))
    made.add("weights", lambda: shape().parameters_per_gpu)

    def ops(attention: str) -> list[dict[str, Any]]:
        return [_op(op) for op in shape(attention).modelled_ops()]

    for attention in ATTENTIONS:
        made.add(f"{attention}Ops", partial(ops, attention))
    batch, rows, samples = inputs("s.batch", "s.rows", "s.mask_batch")
    for dtype in VECTOR_DTYPES:
        for direction in DIRECTIONS:
            options = {"dtype": dtype, "direction": direction, "mask_batch": samples}
            work = partial(_softmax, batch, rows, rows, **options)
            made.add(f"{direction}_{dtype}", work)
    return str(made)


def _op(op: Op) -> dict[str, Any]:
    """Returns an op as a dictionary for the page.

    `core` says whether the op has the dtype of attention. `sides` names m, n and k.
    """
    work: Any = op.workload
    found = {}
    for name in _OF_OPS:
        if hasattr(work, name):
            found[name] = getattr(work, name)
    for name in ("name", "label", "phase", "count"):
        found[name] = getattr(op, name)
    found["kind"] = work.kind
    found["core"] = work.dtype != _DTYPE
    found["sides"] = list(side_names(op).values())
    if work.kind == "gemm":
        found["layout"] = LAYOUTS.index(work.layout)
    return found


def _softmax(*sizes: Any, **more: Any) -> dict[str, Any]:
    """Returns the bytes of a softmax, and the objections to Megatron's fused kernel.

    The bytes are those of one kernel and of separate kernels.
    """
    work = Softmax(*sizes, **more)
    return {
        "bytes": work.min_bytes,
        "separate": fallback_bytes(work),
        "objections": list(softmax_objections(work)),
    }
