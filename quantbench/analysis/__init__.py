"""Analyses measured runs: finds cliffs and their causes, infers tiles and waves, tests rules of
thumb, and compares runs.
"""
