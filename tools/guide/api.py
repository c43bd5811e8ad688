"""Fills docs/api.md with one line per documented name: its arguments and its summary.

The documented names are in the page's directives `::: name`. A module is followed by its public
classes and functions. Run it as `python -m tools.guide.api`.
"""

from __future__ import annotations

import re
import textwrap
from inspect import getdoc, getmodule, isclass, isfunction, ismodule, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from tools.guide.markers import fill

PAGE = Path("docs") / "api.md"
_DIRECTIVE = re.compile(r"^::: (\S+)$", re.M)
_COLUMNS = 120
_MOST_ARGUMENTS = 6  # number of arguments that a line shows


def api_text(page: str) -> str:
    """Returns the list of the names that a page's directives document."""
    lines = []
    for name in _DIRECTIVE.findall(page):
        found = resolve_name(name)
        lines.append(_line("- ", f"quantbench.{name.removeprefix('quantbench.')}", found))
        if not ismodule(found):
            continue
        for member, value in vars(found).items():
            own = isclass(value) or isfunction(value)
            if own and getmodule(value) is found and not member.startswith("_"):
                lines.append(_line("    - ", member, value))
    return "\n".join(lines) + "\n"


def _line(bullet: str, name: str, found: Any) -> str:
    """Returns a name with its arguments, and the first paragraph of its docstring.

    bullet: what begins the line.
    """
    arguments = ""
    if not ismodule(found):
        parameters = signature(found).parameters
        names = [one for one in parameters if one not in ("args", "kwargs")]
        if len(names) > _MOST_ARGUMENTS:
            names[_MOST_ARGUMENTS:] = ["…"]
        arguments = f"({', '.join(names)})"
    words = (getdoc(found) or "").partition("\n\n")[0]
    line = f"`{name}{arguments}`: {' '.join(words.split())}"
    indent = " " * len(bullet)
    return textwrap.fill(
        line,
        _COLUMNS,
        initial_indent=bullet,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(fill(text, {"api": api_text(text)}), encoding="utf-8")
