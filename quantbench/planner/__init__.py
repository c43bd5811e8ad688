"""Predicts the memory and the time per iteration of training jobs.

The package also searches for the fastest parallel layout of a job.
"""
