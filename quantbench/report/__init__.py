"""Shows results: the HTML report of a run, plots, and the tables of `sweep`, `compare` and
`predict`.
"""
