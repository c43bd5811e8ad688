"""Implements the command line.

Each command has a module of its name. Further modules hold the options and the output that commands
share.
"""
