"""What is computed: matrix products, softmax, attention, collectives, and the transformer shapes that ask for them."""

from quantbench.workload.attention import Attention
from quantbench.workload.codec import workload_from_json, workload_to_json
from quantbench.workload.collective import Collective
from quantbench.workload.gemm import Gemm
from quantbench.workload.softmax import Softmax
from quantbench.workload.transformer import Op, TransformerShape, Workload

__all__ = [
    "Attention",
    "Collective",
    "Gemm",
    "Op",
    "Softmax",
    "TransformerShape",
    "Workload",
    "workload_from_json",
    "workload_to_json",
]
