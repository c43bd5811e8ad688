"""Exports the Triton GEMM: `matmul`, `plan`, `GemmPlan`. Used by `quantbench.providers.triton_kernels`."""

from quantbench.kernels.gemm.host import GemmPlan, matmul, plan

__all__ = ["GemmPlan", "matmul", "plan"]
