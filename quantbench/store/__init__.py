"""Where runs are kept: one folder a run, run.json and records.jsonl in it."""
