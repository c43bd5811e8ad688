"""Builds the explorer, a page that predicts the times of any transformer shape in a browser.

The page contains the latency models: their code as JavaScript, and their trees as data.
"""
