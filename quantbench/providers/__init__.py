"""Runs workloads with torch and Triton, and checks their results.

A provider is a variant of a library that runs some kinds of workload. `catalog.make` creates one
from its id. Importing this package does not import torch; `catalog.make` does.
"""
