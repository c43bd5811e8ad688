"""The command line: one module per command, and the options and output that the commands share."""
