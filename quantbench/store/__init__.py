"""Stores runs on disk: one folder per run, with run.json and records.jsonl."""
