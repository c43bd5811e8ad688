"""Judges latency models on public measured tables, for docs/accuracy.md (extra `tables`)."""
