"""Collectives between ranks: which points, in lock step, kept like any sweep. `quantbench comm` under torchrun."""
