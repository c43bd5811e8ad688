"""Analyses measured runs.

Finds cliffs and their causes, infers tiles and waves, tests rules of thumb, and compares runs.
"""
