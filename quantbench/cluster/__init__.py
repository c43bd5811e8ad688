"""Runs one sweep over many devices, compares the devices, and merges runs.

Entry points: the modules `session` (with `ray_pool`), `cards` and `merge`. Used by the commands `sweep` (`--on ray`)
and `merge`.
"""
