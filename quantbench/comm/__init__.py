"""Measures collectives (all_reduce, all_gather, …) between ranks, for `quantbench comm`."""
