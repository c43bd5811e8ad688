"""Runs workloads with torch and Triton. Importing this package does not import torch; `catalog.make` does."""
