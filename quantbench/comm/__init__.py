"""Measures collectives between ranks and stores them as a run: `quantbench comm` under torchrun."""
