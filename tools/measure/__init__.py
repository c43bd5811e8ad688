"""Measurements that maintainers make on a GPU in addition to sweeps.

They compare timing methods, measure the cost of a point and the copy bandwidth, and draw random
GEMM shapes.
"""
