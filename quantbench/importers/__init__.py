"""Imports other tools' tables as runs with `origin: imported` and the source of each figure."""
