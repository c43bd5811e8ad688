"""Matrix products in Triton with a chosen tile and a known launch: `matmul`, `plan`."""

from quantbench.kernels.gemm.host import GemmPlan, matmul, plan

__all__ = ["GemmPlan", "matmul", "plan"]
