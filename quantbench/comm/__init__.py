"""Measures collectives between ranks and stores them as a run: `quantbench comm` under torchrun.

Entry points: the modules `session` and `isolation`. Used by the command `comm`.
"""
