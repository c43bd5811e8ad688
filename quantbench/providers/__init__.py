"""Runs workloads with torch and Triton, and checks what they compute. Importing this package does
not import torch; `catalog.make` does.
"""
