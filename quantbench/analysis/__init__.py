"""Cliffs, their causes, rules of thumb and comparisons: what measured runs say, computed from records."""
