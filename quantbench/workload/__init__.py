"""Defines workloads (GEMM, softmax, attention, collectives, experts) and the transformer shapes that consist of them.

Entry points: `Gemm`, `Softmax`, `Attention`, `Collective`, `GroupedGemm`, `MoE`, `TransformerShape`, `Op`. Used by
nearly all packages and by users' Python code.
"""

from quantbench.workload.moe import GroupedGemm, MoE
from quantbench.workload.ops import (
    Attention,
    Collective,
    Gemm,
    Softmax,
    Workload,
    workload_from_json,
    workload_to_json,
)
from quantbench.workload.transformer import Op, TransformerShape

__all__ = [
    "Attention",
    "Collective",
    "Gemm",
    "GroupedGemm",
    "MoE",
    "Op",
    "Softmax",
    "TransformerShape",
    "Workload",
    "workload_from_json",
    "workload_to_json",
]
