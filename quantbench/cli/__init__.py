"""Implements the command line: one module per command, and modules for the options and the output
that the commands share.
"""
