"""Runs GEMMs in Triton with a chosen tile and schedule."""

from quantbench.kernels.gemm.host import GemmPlan, matmul, plan

__all__ = ["GemmPlan", "matmul", "plan"]
