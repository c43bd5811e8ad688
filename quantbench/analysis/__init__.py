"""Analyses measured runs, compares two runs, and predicts the grid points of a sweep.

The analysis of a run (`check.check_run`) finds cliffs, which are jumps of the time between
neighbouring sizes, and their causes. It infers tiles and waves, and tests rules of thumb.
"""
