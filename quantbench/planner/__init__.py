"""Predicts the memory and the time per iteration of training jobs in parallel layouts, and searches
over layouts.
"""
