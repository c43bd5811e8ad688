"""Defines the union types `Compute` and `Workload`. In JSON, `kind` names a workload's class."""

from quantbench.workload.moe import GroupedGemm, MoE, Permute
from quantbench.workload.ops import Attention, Cast, Collective, Gemm, Softmax

#: Workloads on one GPU. Times of a whole MoE layer are imported or predicted, never measured.
Compute = Gemm | GroupedGemm | Permute | MoE | Softmax | Attention | Cast
#: Every workload that a record can have.
Workload = Compute | Collective
