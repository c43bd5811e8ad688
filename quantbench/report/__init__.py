"""Presents results as an HTML report, as plots, and as tables on the terminal."""
