"""Fills marked places of README and docs/ with figures from public measured tables, and draws their
pictures.
"""
