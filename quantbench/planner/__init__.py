"""Predicts a training job's memory and time per iteration, and finds its fastest layouts.

A layout divides the job's model and data over its GPUs. Entry points: `predict.Planner` for given
layouts, `search.search` for the fastest layouts, `row_results.predict_rows` for tables.
"""
