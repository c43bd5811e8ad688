"""Layouts of training jobs: memory, time per iteration, and searches over layouts and shapes."""
