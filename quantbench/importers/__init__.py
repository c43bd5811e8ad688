"""Imports other tools' tables as runs marked `origin: imported`, and training logs as summaries."""
