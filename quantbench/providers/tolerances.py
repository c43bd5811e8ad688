"""How far a right result may be from its float64 reference, by format; shared by all providers.

The measure is ‖out − ref‖ / ‖ref‖ over a whole tensor. Errors of single elements are independent and as often up as
down, so it comes out near the root mean square of one element's relative error, whatever the size. Rounding a right
result once costs 1.7e-3 in bf16 (8 bits) and 2.1e-4 in fp16 (11 bits); the bounds are three to four times what right
results show, and far below what wrong ones do: a missing tile of 128² in 4096² is 3e-2, one lost k-step of 64 in 4096
is 1e-1, sums kept in bf16 over k = 1024 are 4e-2.
"""

from __future__ import annotations

from quantbench.providers.base import Tolerance
from quantbench.workload import Attention, Gemm, Softmax

_GEMM = {
    "fp16": Tolerance(1e-3, "fp16 results: 11 bits, 2e-4 from rounding, and split-k parts that may be added in fp16"),
    "bf16": Tolerance(5e-3, "bf16 results: 8 bits, 1.7e-3 from rounding, and split-k parts that may be added in bf16"),
    "fp32": Tolerance(2e-5, "fp32 sums in any order: 6e-8·√k at worst, and far below the 3e-4 of tf32"),
    "tf32": Tolerance(1e-3, "operands cut to 11 bits: 3e-4"),
    "fp8": Tolerance(1e-2, "bf16 results of exact fp8 operands; tensor cores may keep 14 bits between k-steps"),
    "int8": Tolerance(0.0, "integers are exact"),
}

_SOFTMAX = {
    "fp16": Tolerance(1e-3, "one rounding to 11 bits, fp32 inside: 2e-4"),
    "bf16": Tolerance(5e-3, "one rounding to 8 bits, fp32 inside: 1.7e-3"),
    "fp32": Tolerance(1e-5, "fp32 throughout, with a fast exponential of 2 units in the last place"),
}

_ATTENTION = {
    "fp16": Tolerance(2e-3, "probabilities and result rounded to 11 bits: 4e-4"),
    "bf16": Tolerance(1e-2, "probabilities and result rounded to 8 bits: 2.5e-3"),
    "fp32": Tolerance(1e-4, "fp32 products, or three tf32 products for one; a single one would be 3e-4"),
}

_ATTENTION_BACKWARD = {
    "fp16": Tolerance(4e-3, "probabilities, their gradients and results rounded to 11 bits, twice in a row: 8e-4"),
    "bf16": Tolerance(2e-2, "probabilities, their gradients and results rounded to 8 bits, twice in a row: 5e-3"),
    "fp32": Tolerance(2e-4, "fp32 products and sums, and differences of nearly equal numbers"),
}


def gemm_tolerance(gemm: Gemm) -> Tolerance:
    """The bound on a product."""
    return _GEMM[gemm.dtype]


def softmax_tolerance(softmax: Softmax) -> Tolerance:
    """The bound on a softmax or its gradient."""
    return _SOFTMAX[softmax.dtype]


def attention_tolerance(attention: Attention) -> Tolerance:
    """The bound on attention or its three gradients."""
    table = _ATTENTION if attention.direction == "forward" else _ATTENTION_BACKWARD
    return table[attention.dtype]
