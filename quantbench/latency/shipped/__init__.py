"""Models fitted on public tables, one JSON file a device and kind, written by `tools.ship_attention`."""
