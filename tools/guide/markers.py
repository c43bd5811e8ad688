"""Puts generated texts between the markers of a Markdown page.

A marker pair is `<!-- name:begin -->` and `<!-- name:end -->`, within a line or around several lines. `fill` replaces
what stands between them; `table` makes a Markdown table. `tools.guide` and `tools.advice_examples` write their
pages with these two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quantbench.errors import StoreError

_PLACE = re.compile(r"(<!-- (?P<name>[\w.-]+):begin -->)(?P<old>.*?)(<!-- (?P=name):end -->)", re.S)


def fill(text: str, found: Mapping[str, str]) -> str:
    """The page with every marker filled. A value of several lines gets lines of its own.

    Raises StoreError for a marker without a value, and for a value without a marker.

    >>> fill("m = <!-- m:begin -->?<!-- m:end -->.", {"m": "128"})
    'm = <!-- m:begin -->128<!-- m:end -->.'
    """
    names = [match["name"] for match in _PLACE.finditer(text)]
    unknown = sorted(set(names) - found.keys())
    unused = sorted(found.keys() - set(names))
    if unknown:
        raise StoreError("guide", f"no value for {', '.join(unknown)}", "places that the evidence fills")
    if unused:
        raise StoreError("guide", f"no place for {', '.join(unused)}", "a place in the page for everything found")

    def put(match: re.Match[str]) -> str:
        value = found[match["name"]]
        inner = f"\n{value.rstrip()}\n" if "\n" in value else value
        return f"{match[1]}{inner}{match[4]}"

    return _PLACE.sub(put, text)


def table(head: list[str], rows: list[list[str]], *, numeric: bool = True) -> str:
    """A Markdown table. numeric: align all columns but the first to the right."""
    rule = ["---"] + (["---:"] if numeric else ["---"]) * (len(head) - 1)
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
