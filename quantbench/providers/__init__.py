"""Runs workloads with torch and Triton. Importing this package does not import torch;
`catalog.make` does.

Entry points: the modules `catalog` (providers by id), `base` (their interface), `audit` (checks of
results), `identity` (kernels that ran). Used by `sweep`, `pytest_plugin` and the command `comm`.
"""
