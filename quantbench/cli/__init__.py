"""The command line: one module per command, and the options and output that the commands share.

Entry point: the module `app`, called by `quantbench.__main__`.
"""
