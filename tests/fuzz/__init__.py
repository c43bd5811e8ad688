"""Hostile files for every loader: what is fuzzed (`targets`) and how files are damaged
(`damage`).
"""
