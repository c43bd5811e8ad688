"""The types of a report's page (texts, tables, pictures), and the `Gallery` that draws and embeds its pictures.

The other modules of `report` make these; `page` renders them. Texts may come from files: the page escapes them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantbench.analysis.summary import Point
from quantbench.report.lead import Lead


@dataclass(frozen=True)
class Picture:
    """A PNG. file: its name beside the page; data: the same as a `data:` address; alt: what it shows, in words."""

    file: str
    data: str
    alt: str


@dataclass(frozen=True)
class Table:
    """A plain table. numeric: columns that are aligned to the right; whole: columns that are never folded."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True)
class KernelLabel:
    """A kernel's colour in the bands, what is written there, and its whole name."""

    colour: str
    label: str
    name: str


@dataclass(frozen=True)
class PictureCard:
    """A picture with what there is to say about it. cliffs: number, place, cost and cause of each mark."""

    title: str
    picture: Picture
    note: str = ""
    cliffs: Table | None = None
    kernels: tuple[KernelLabel, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page. note: a sentence under its heading; lines: what there is to say without a picture."""

    id: str
    title: str
    note: str = ""
    cards: tuple[PictureCard, ...] = ()
    table: Table | None = None
    lines: tuple[str, ...] = ()
    folded: bool = False


@dataclass(frozen=True)
class Banner:
    """Says above everything else what must not be overlooked. kind: imported, simulated or warning."""

    kind: str
    title: str
    text: str


@dataclass(frozen=True)
class Page:
    """The whole page. facts: name and value, for the foot. lead: None where nothing was measured. explanation: what
    makes the steps, in a sentence, or nothing."""

    title: str
    subtitle: str
    banners: tuple[Banner, ...]
    facts: tuple[tuple[str, str], ...]
    lead: Lead | None
    explanation: str
    lead_picture: Picture | None
    sections: tuple[Section, ...]
    made_by: str


#: the caption of a picture of these points: see `source.picture_caption`
Caption = Callable[[Sequence[Point]], str]
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Gallery:
    """Names the pictures of one report, draws each into its folder and embeds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []

    def path(self, *parts: str) -> Path:
        """A file of its own for a picture; parts may hold anything."""
        name = "report-" + "-".join(filter(None, (file_name(part).strip("-.")[:40] for part in parts)))
        taken = {path.name for path in self.files}
        number = next(i for i in range(1, len(taken) + 2) if self._numbered(name, i) not in taken)
        path = self.folder / self._numbered(name, number)
        self.files.append(path)
        return path

    @staticmethod
    def _numbered(name: str, number: int) -> str:
        return f"{name}.png" if number == 1 else f"{name}-{number}.png"

    def picture(self, path: Path, alt: str) -> Picture:
        """The drawn file as part of the page."""
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        return Picture(path.name, f"data:image/png;base64,{data}", alt)


def file_name(text: str) -> str:
    """The text with everything but letters, digits, dots, underscores and dashes replaced by dashes."""
    return _NO_NAME.sub("-", text)
