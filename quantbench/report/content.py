"""Defines the parts of a report's page: tables, charts, pictures, sections.

The modules of this package build them, and `page` renders and escapes them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.text import Text

from quantbench.analysis.summary import Point

#: colours of curves that people with any colour vision can tell apart (Okabe and Ito, "Color
#: Universal Design", https://jfly.uni-koeln.de/color/), without its vermilion, which is too close
#: to the red of a cliff
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#666666")

#: returns the caption for these points: see `source.picture_caption`
Caption = Callable[[Sequence[Point]], str]


@dataclass(frozen=True)
class Table:
    """A plain table, for the page and the terminal.

    head: column names, as of `terminal.plain_table`.
    rows: cells; the page shows a styled text without its style.
    whole: indices of columns that are never folded.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str | Text, ...], ...]
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Dot:
    """A point of a curve with its interval. words: shown when a reader points at it."""

    x: float
    y: float
    low: float
    high: float
    words: str


@dataclass(frozen=True)
class Line:
    """A curve of a chart."""

    name: str
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class Mark:
    """A size marked in red; its label is drawn below the point."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Curves that the browser draws (`templates/charts.js`). axis, unit: labels of x and y."""

    axis: str
    unit: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()

    @property
    def data(self) -> str:
        """The chart as JSON, with its colours."""
        return json.dumps({**asdict(self), "colours": PALETTE})


@dataclass(frozen=True)
class Card:
    """A chart, or a picture as a `data:` URL, with its explanations.

    caption: GPU, dtype, library and source of the data.
    note: message about what was left out, or "".
    table: number, place, cost and cause of each numbered mark.
    kernels: (label, full name) of each kernel that ran.
    """

    title: str
    caption: str
    chart: Chart | None = None
    picture: str = ""
    note: str = ""
    table: Table | None = None
    kernels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Section:
    """A section of the page. folded: whether it is closed until the reader opens it."""

    id: str
    title: str
    note: str = ""
    cards: tuple[Card, ...] = ()
    table: Table | None = None
    lines: tuple[str, ...] = ()
    folded: bool = False


def embedded(png: bytes) -> str:
    """Returns a PNG as a `data:` URL."""
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def file_name(text: str) -> str:
    """Replaces everything but ASCII letters, digits, dots, underscores and dashes by dashes."""
    return re.sub("[^A-Za-z0-9._-]+", "-", text)
