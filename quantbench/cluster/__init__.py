"""Runs one sweep over many devices, compares the devices, and merges runs.

Used by the commands `sweep` (`--on ray`)
and `merge`.
"""
