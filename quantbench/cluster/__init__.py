"""Runs one sweep on all devices of a cluster, compares the devices, and merges runs."""
