"""Provides Triton kernels for GEMM, attention and softmax, imported as `quantbench.kernels`."""
