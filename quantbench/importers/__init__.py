"""Imports the tables of other tools as runs, and training logs as summaries.

The runs are marked `origin: imported`.
"""
