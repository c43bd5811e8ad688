"""Analyses measured runs: cliffs and their causes, tiles and waves, rules of thumb, comparisons of
runs.
"""
