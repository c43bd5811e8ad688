"""Models fitted on public tables, one JSON file a device and kind, written by `quantbench.validate.shipping`."""
