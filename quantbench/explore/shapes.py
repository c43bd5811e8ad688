"""Writes the arithmetic of transformer shapes as JavaScript: validity, ops, parameters and weights.

The Python code of `workload` runs on symbolic sizes (see `trace`), and is recorded as JavaScript.
The explorer page therefore accepts the same shapes as quantbench, and has the same ops. The module
also writes the memory traffic of softmax and the conditions of Megatron-LM's fused kernel.
"""

from functools import partial
from typing import Any

from quantbench.alignment_rules import side_names
from quantbench.errors import InputError
from quantbench.explore.javascript import Script
from quantbench.explore.trace import flag, inputs
from quantbench.latency.softmax import fallback_bytes
from quantbench.megatron import fused_softmax_failures
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
# Fields of workloads that the page gets for each op whose workload has them.
_OF_OPS = (
    "m", "n", "k", "batch", "heads", "kv_heads", "seq_q", "head_dim", "rows", "mask_batch",
    "tokens", "hidden", "expert_ffn", "num_experts", "top_k", "tp", "ep", "gated",
)  # fmt: skip
# Sizes of a shape for which 0 stands for a default. The page replaces 0 by the default before it
# calls the functions, so these sizes are recorded as not 0.
_GIVEN = ("head_dim", "kv_heads", "ffn")
# Dtype of the recorded shapes. With an 8-bit dtype, the core of attention runs in bf16, so `_op`
# recognises the ops of this core by their dtype.
_DTYPE = "fp8"


class _Experts(MoE):
    """Experts without grouped GEMMs, because the page itself draws the rows of each expert."""

    def grouped_gemms(self, rank: int | None = None) -> dict[str, Any]:
        return {}


class _Shape(TransformerShape):
    """Transformer shape whose experts are `_Experts`."""

    def experts_of(self, tokens: int) -> MoE:
        return _Experts(**vars(super().experts_of(tokens)))


def shape_script() -> str:
    """Returns the body of a JavaScript function that returns an object with these functions.

    - objection(shape): why the shape is impossible, or "".
    - parameters(shape), weights(shape): number of parameters, of the whole model and on one GPU.
    - flashOps(shape), unfusedOps(shape): list of ops, by kind of attention (see `_op`).
    - forward_fp16(softmax) and so on, one per direction and dtype: see `_softmax`.
    """
    sizes: dict[str, Any] = {name: inputs(f"s.{name}")[0] for name in SIZES}
    flags: dict[str, Any] = {name: flag(f"s.{name}") for name in FLAGS}
    made = Script({sizes[name] == 0: False for name in _GIVEN})

    def shape(attention: str = "flash") -> TransformerShape:
        return _Shape(**sizes, **flags, attention=attention, dtype=_DTYPE)

    def possible() -> str:
        """Creates the shape, which raises InputError if the shape is impossible."""
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
    """Converts an op to a dictionary for the page.

    core: whether the op runs in the dtype of attention.
    sides: names of the sizes that m, n and k stand for.
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
    """Returns the memory traffic of a softmax, and the conditions of Megatron-LM's fused kernel.

    bytes: traffic of the fused kernel, in bytes.
    separate: traffic of the separate kernels of the fallback, in bytes.
    objections: reasons why the fused kernel does not support the softmax.
    """
    work = Softmax(*sizes, **more)
    return {
        "bytes": work.min_bytes,
        "separate": fallback_bytes(work),
        "objections": list(fused_softmax_failures(work)),
    }
