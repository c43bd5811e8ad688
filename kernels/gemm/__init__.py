"""Runs GEMMs in Triton with a chosen tile and schedule.

Entry points: `matmul`, `plan`, `GemmPlan`. Used by `providers.triton_kernels`.
"""

from quantbench.kernels.gemm.host import GemmPlan, matmul, plan

__all__ = ["GemmPlan", "matmul", "plan"]
