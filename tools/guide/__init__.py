"""Writes what the documentation shows of measured tables: numbers, tables and figures between markers in the pages.

`python -m tools.guide docs` fills docs/choosing-shapes.md, `python -m tools.guide.front` fills README.md and
docs/index.md; `tools.advice_examples` fills docs/advising.md with the same markers. `make docs` runs all three.
"""
