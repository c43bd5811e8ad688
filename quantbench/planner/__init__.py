"""Predicts memory and time per iteration of parallel layouts of training jobs, and searches over layouts and shapes.

Entry points: the modules `search` (layouts and shapes), `predict` (one layout), `row_results` and `row_checks` (tables
of layouts). Used by the command `plan`.
"""
