"""Imports other tools' tables as runs marked `origin: imported`, and training logs as summaries.

Entry points: the modules `aiconfigurator`, `csv_table` and `megatron_log`, which read, and `runs`
and `training_run`, which write. Used by the command `import`.
"""
