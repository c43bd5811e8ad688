"""Triton kernels (GEMM, attention, softmax), imported as `quantbench.kernels`;
`providers.triton_kernels` runs them.
"""
