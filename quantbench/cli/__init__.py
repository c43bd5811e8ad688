"""Implements the command line of quantbench.

Each command is in the module of its name (`import` in `import_`). The other modules define options
and output that several commands share, and the longer parts of some commands.
"""
