"""Hostile files for every loader: what is fuzzed (`targets`), how files are damaged (`damage`), and two engines."""
