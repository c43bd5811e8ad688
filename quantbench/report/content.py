"""The parts of a report's page (tables, pictures, sections), the `Gallery` that names and embeds its pictures, and
`terminal_table`.

The other modules of `report` make these and `page` renders them. Texts may come from files: the page escapes them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantbench.analysis.summary import Point


@dataclass(frozen=True)
class Picture:
    """A PNG in the page.

    file: its name beside the page.
    data: its content as a `data:` address.
    alt: what it shows, in words.
    """

    file: str
    data: str
    alt: str


@dataclass(frozen=True)
class Table:
    """A plain table.

    numeric: columns that are aligned to the right.
    whole: columns that are never folded.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PictureCard:
    """A picture with its explanations.

    note: a sentence on what was left out.
    cliffs: number, place, cost and cause of each numbered cliff.
    kernels: (colour, label, full name) of each kernel in the bands below the curves.
    """

    title: str
    picture: Picture
    note: str = ""
    cliffs: Table | None = None
    kernels: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page.

    id: anchor of the section.
    note: a sentence under its heading.
    lines: sentences that need no picture.
    folded: closed until the reader opens it.
    """

    id: str
    title: str
    note: str = ""
    cards: tuple[PictureCard, ...] = ()
    table: Table | None = None
    lines: tuple[str, ...] = ()
    folded: bool = False


#: the caption of a picture of these points: see `source.picture_caption`
Caption = Callable[[Sequence[Point]], str]


class Gallery:
    """The pictures of one report: `path` reserves a file, `picture` embeds it once it is drawn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []

    def path(self, *parts: str) -> Path:
        """A new file name for a picture. parts: any texts."""
        name = "report-" + "-".join(filter(None, (file_name(part).strip("-.")[:40] for part in parts)))
        path, number = self.folder / f"{name}.png", 1
        while path in self.files:
            number += 1
            path = self.folder / f"{name}-{number}.png"
        self.files.append(path)
        return path

    def picture(self, path: Path, alt: str) -> Picture:
        """The drawn file as part of the page."""
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        return Picture(path.name, f"data:image/png;base64,{data}", alt)


def file_name(text: str) -> str:
    """The text with everything but letters, digits, dots, underscores and dashes replaced by dashes."""
    return re.sub("[^A-Za-z0-9._-]+", "-", text)
