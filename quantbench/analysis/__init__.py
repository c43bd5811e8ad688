"""Analyses measured runs: cliffs and their causes, tiles and waves, rules of thumb, comparisons of
runs.

Entry points: the modules `check` (cliffs, causes and rules of one run), `compare` (two runs),
`forecast` (a predicted sweep) and `summary` (points and rows). Used by `report`, `profile`,
`advice` and the commands.
"""
