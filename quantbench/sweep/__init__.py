"""Measures workloads over a grid of sizes.

Selects the points and their order, and runs them in a process of their own.
"""
