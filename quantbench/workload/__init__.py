"""Defines workloads (GEMM, softmax, attention, collectives, experts) and transformer shapes.

`TransformerShape.ops` lists the workloads that a transformer's training step runs on one GPU.
"""

from quantbench.workload.kinds import Compute, Workload
from quantbench.workload.moe import GroupedGemm, MoE, Permute
from quantbench.workload.ops import Attention, Collective, Gemm, Softmax
from quantbench.workload.transformer import Op, TransformerShape

__all__ = [
    "Attention", "Collective", "Compute", "Gemm", "GroupedGemm", "MoE", "Op", "Permute", "Softmax",
    "TransformerShape", "Workload",
]  # fmt: skip
