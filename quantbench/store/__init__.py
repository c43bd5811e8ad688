"""Stores runs on disk, in one folder per run with the files run.json and records.jsonl."""
