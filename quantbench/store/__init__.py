"""Stores runs on disk: one folder per run, with run.json and records.jsonl.

Entry points: the modules `folder` (reads and writes a run), `record` and `run` (its contents). Used by all packages
that measure, import or read runs.
"""
