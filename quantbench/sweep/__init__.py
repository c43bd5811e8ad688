"""Measures workloads over a grid of sizes.

Selects the points and their order, and runs the points in a separate worker process.
"""
