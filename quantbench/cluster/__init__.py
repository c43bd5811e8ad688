"""Runs one sweep over many devices, compares the devices, and merges runs."""
