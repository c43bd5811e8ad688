"""Imports other tools' tables of times as runs, and summarizes training logs.

Imported runs are marked `origin: imported`.
"""
