"""Measures workloads over a grid of sizes: selects the points and their order, and runs them in a
process of their own.
"""
