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
    """A PNG in the page.

    file: its name beside the page.
    data: the same as a `data:` address.
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
class KernelLabel:
    """A kernel in the bands below a curve.

    colour: of its band.
    label: what is written in the band.
    name: the kernel's whole name.
    """

    colour: str
    label: str
    name: str


@dataclass(frozen=True)
class PictureCard:
    """A picture with its explanations.

    note: a sentence on what was left out.
    cliffs: number, place, cost and cause of each numbered cliff.
    kernels: legend of the kernel bands.
    """

    title: str
    picture: Picture
    note: str = ""
    cliffs: Table | None = None
    kernels: tuple[KernelLabel, ...] = ()


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


@dataclass(frozen=True)
class Banner:
    """A warning above everything else. kind: imported, simulated or warning."""

    kind: str
    title: str
    text: str


@dataclass(frozen=True)
class Page:
    """The whole page.

    facts: name and value, for the foot.
    lead: the first screen; None where nothing was measured.
    explanation: what makes the steps, in a sentence, or "".
    lead_picture: the picture of the first screen.
    made_by: the last line.
    """

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
    """The pictures of one report: `path` reserves a file, `picture` embeds it once it is drawn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []

    def path(self, *parts: str) -> Path:
        """A new file name for a picture. parts: any texts."""
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
