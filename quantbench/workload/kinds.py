"""Names the unions of workloads. `store.typed` converts them to JSON and back by their `kind`."""

from quantbench.workload.moe import GroupedGemm, MoE, Permute
from quantbench.workload.ops import Attention, Cast, Collective, Gemm, Softmax

#: workloads of one GPU; a whole layer's experts are imported and predicted, never measured
Compute = Gemm | GroupedGemm | Permute | MoE | Softmax | Attention | Cast
#: all workloads that a record can have
Workload = Compute | Collective
