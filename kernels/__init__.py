"""Triton kernels (GEMM, attention, softmax), imported as `quantbench.kernels`."""
