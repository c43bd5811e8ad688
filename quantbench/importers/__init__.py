"""Imports the tables of other tools as runs marked `origin: imported`, and training logs as
summaries.
"""
