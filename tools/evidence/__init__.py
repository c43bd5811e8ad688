"""Measures a GPU in three resumable steps (`make evidence`) and writes the evidence page."""
