"""Names the unions of workloads, which are told apart by their `kind` when stored as JSON."""

from quantbench.workload.moe import GroupedGemm, MoE, Permute
from quantbench.workload.ops import Attention, Cast, Collective, Gemm, Softmax

#: Workloads of one GPU. The experts of a whole layer are imported and predicted, never measured.
Compute = Gemm | GroupedGemm | Permute | MoE | Softmax | Attention | Cast
#: every workload that a record can have
Workload = Compute | Collective
