"""Fills marked places of the documentation with numbers and tables from public measured tables, and draws its figures.

Entry points: `python -m tools.guide docs` (docs/choosing-shapes.md) and `python -m tools.guide.front` (README.md and
docs/index.md). Run by `make docs`; `tools.advice_examples` and `tools.planner_accuracy` use the same markers.
"""
