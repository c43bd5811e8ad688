"""Measures workloads over a grid of sizes: which points, in what order, in which process, and how a
run resumes.
"""
