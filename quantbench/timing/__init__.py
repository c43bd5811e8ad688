"""How a run is timed. Importing this package loads no torch; `quantbench.timing.cuda` and `.cpu` do."""
