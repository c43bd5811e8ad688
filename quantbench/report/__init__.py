"""Shows results: the HTML report of a run, plots, and the tables of `sweep`, `compare` and
`predict`.

Entry points: the modules `page` (report of a run), `training` (training logs), `sweep_result`,
`comparison` and `forecast`. Used by the commands of these names and by `tools`.
"""
