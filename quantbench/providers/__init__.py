"""Who runs a workload. Importing this package loads no torch; `catalog.make` loads what a provider needs."""
