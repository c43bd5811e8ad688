"""Programs that test the latency models on public measured tables (extra `tables`).

Most results are in docs/accuracy.md, which `tools.accuracy.page` writes.
"""
