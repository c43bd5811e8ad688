"""Runs workloads with torch and Triton, and checks their results.

Importing this package does not import torch; `catalog.make` does.
"""
