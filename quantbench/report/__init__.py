"""Presents results as an HTML report, as plots, and as tables for the terminal."""
