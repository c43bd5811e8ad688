"""docs/choosing-shapes.md: its tables, numbers and figures, made from measured tables.

`python -m quantbench.report.guide docs` writes them.
"""
