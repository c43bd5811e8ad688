"""Measures collectives between ranks and keeps them like any sweep: `quantbench comm` under torchrun."""
