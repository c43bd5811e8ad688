"""Measures collectives between ranks and stores the times as a run."""
