"""Replaces marked text in a Markdown page, and formats tables to put there.

The text is between the markers `<!-- name:begin -->` and `<!-- name:end -->`, which may be on one
line or on separate lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from quantbench.errors import StoreError

_PLACE = re.compile(r"(<!-- (?P<name>[\w.-]+):begin -->)(?P<old>.*?)(<!-- (?P=name):end -->)", re.S)


def fill(text: str, found: Mapping[str, str]) -> str:
    """Returns the page with a new text between every pair of markers.

    A text of several lines begins on a line of its own.

    text: the page.
    found: new text, by name of the markers.
    Raises StoreError for a name in the page that `found` lacks, and the reverse.

    >>> fill("m = <!-- m:begin -->?<!-- m:end -->.", {"m": "128"})
    'm = <!-- m:begin -->128<!-- m:end -->.'
    """
    names = [match["name"] for match in _PLACE.finditer(text)]
    unknown = sorted(set(names) - found.keys())
    unused = sorted(found.keys() - set(names))
    if unknown:
        raise StoreError("guide", f"no value for {', '.join(unknown)}", "places that are filled")
    if unused:
        raise StoreError(
            "guide", f"no place for {', '.join(unused)}", "a place in the page for everything found"
        )

    def put(match: re.Match[str]) -> str:
        value = found[match["name"]]
        inner = f"\n{value.rstrip()}\n" if "\n" in value else value
        return f"{match[1]}{inner}{match[4]}"

    return _PLACE.sub(put, text)


def write_between(path: Path, name: str, text: str) -> None:
    """Replaces the text between the markers `name` in the file `path`.

    Raises StoreError if the file lacks the markers.
    """
    begin = f"<!-- {name}:begin -->"
    end = f"<!-- {name}:end -->"
    head, begun, rest = path.read_text(encoding="utf-8").partition(begin)
    _, ended, tail = rest.partition(end)
    if not begun or not ended:
        raise StoreError(
            "docs", f"{path} without one {begin} and one {end} after it", "both, in this order"
        )
    path.write_text(f"{head}{begin}\n{text}{end}{tail}", encoding="utf-8")


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1, numeric: bool = True
) -> str:
    """Formats a Markdown table.

    words: number of columns of text, which come first.
    numeric: whether the other columns are aligned to the right.
    """
    rule = ["---"] * words + (["---:"] if numeric else ["---"]) * (len(head) - words)
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
