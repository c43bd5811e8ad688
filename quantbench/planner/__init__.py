"""Predicts memory and time per iteration of parallel layouts of training jobs, and searches over
layouts and shapes.
"""
