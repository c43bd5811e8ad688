"""Measurements that maintainers make on a GPU beside sweeps: comparisons with other timing methods,
the cost of a point, copy bandwidth and random products.
"""
