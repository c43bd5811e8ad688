"""Spreads one sweep over the devices of a cluster, compares the devices, and merges runs."""
