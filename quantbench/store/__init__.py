"""Stores runs on disk: one folder per run, with run.json and records.jsonl.

Entry points: the modules `folder` (reads and writes a run), `record` and `run` (its contents),
`environment`, and `typed` (JSON of dataclasses). Used by most packages, the last two also without a
run.
"""
