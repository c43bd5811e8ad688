"""Predicts the memory and the time per iteration of training jobs.

Also searches over parallel layouts.
"""
