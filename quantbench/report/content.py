"""Defines the parts of a report's page: tables, plots, sections.

Entry points: `Section`, `PictureCard`, `Table`; `Gallery`, which names and embeds the plots; the type `Caption`;
`file_name`. Used by the modules of this package that build sections, and by `page`, which renders them.
Texts need no escaping: `page` does it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench.analysis.summary import Point


@dataclass(frozen=True)
class Table:
    """A plain table of the page.

    head: column names, as of `terminal.plain_table`.
    whole: indices of columns that are never folded.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PictureCard:
    """A plot with its explanations.

    file, data, alt: the PNG: its file name in the page's folder, content as a `data:` URL, alternative text.
    note: message about what was left out, or "".
    cliffs: table with number, place, cost and cause of each numbered cliff.
    kernels: (colour, label, full name) for each kernel in the bands below the curves.
    chart: JSON of the interactive plot that a browser draws in place of the picture (`templates/charts.js`), or "".
    """

    file: str
    data: str
    alt: str
    title: str = ""
    note: str = ""
    cliffs: Table | None = None
    kernels: tuple[tuple[str, str, str], ...] = ()
    chart: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page.

    folded: whether it is closed until the reader opens it.
    """

    id: str
    title: str
    note: str = ""
    cards: tuple[PictureCard, ...] = ()
    table: Table | None = None
    lines: tuple[str, ...] = ()
    folded: bool = False


#: returns the caption for a plot of these points: see `source.picture_caption`
Caption = Callable[[Sequence[Point]], str]


class Gallery:
    """The plots of one report: `path` reserves a file name, `card` embeds the file once it is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []

    def path(self, *parts: str) -> Path:
        """Reserves a new file name for a plot, built from `parts`."""
        name = "report-" + "-".join(filter(None, (file_name(part).strip("-.")[:40] for part in parts)))
        path, number = self.folder / f"{name}.png", 1
        while path in self.files:
            number += 1
            path = self.folder / f"{name}-{number}.png"
        self.files.append(path)
        return path

    def card(self, path: Path, alt: str, **more: Any) -> PictureCard:
        """Reads a written PNG for embedding. alt: alternative text. more: further fields of the card."""
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        return PictureCard(path.name, f"data:image/png;base64,{data}", alt, **more)


def file_name(text: str) -> str:
    """Replaces everything but ASCII letters, digits, dots, underscores and dashes by dashes."""
    return re.sub("[^A-Za-z0-9._-]+", "-", text)
