"""Defines the content of a report: tables, charts, pictures, and the sections that contain them.

All texts are plain and are escaped only when the page is rendered (`page.render`).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.text import Text

from quantbench.analysis.summary import Point

#: colours of curves that people with any colour vision can distinguish (Okabe and Ito, "Color
#: Universal Design", https://jfly.uni-koeln.de/color/). The palette's vermilion is left out,
#: because it is too close to the red of a cliff.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#666666")

#: function from points to the caption of their plot, such as `source.picture_caption` for one run
Caption = Callable[[Sequence[Point]], str]


@dataclass(frozen=True)
class Table:
    """A table for the page and the terminal.

    head: column names. A column whose name begins with `>` is aligned to the right.
    rows: cells of each row. The style of a Text is shown only on the terminal.
    whole: indices of columns that are never folded.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str | Text, ...], ...]
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Dot:
    """A point of a curve.

    low, high: interval of y.
    words: text that is shown while the reader points at the dot.
    """

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
    """A point of a chart that is marked in red, with a label below it."""

    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Curves that the browser draws with `templates/charts.js`.

    axis: label of x.
    unit: label of y.
    """

    axis: str
    unit: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()

    @property
    def data(self) -> str:
        """The chart as JSON, with the colours of its curves."""
        return json.dumps({**asdict(self), "colours": PALETTE})


@dataclass(frozen=True)
class Card:
    """A chart or a picture with its explanations.

    caption: text that names GPU, dtype, library and source of the data.
    chart: chart; None if the card has a picture.
    picture: `data:` URL of a picture; "" if the card has a chart.
    note: text on curves and marks that the chart leaves out; "" for none.
    table: number, sizes, extra time and cause of each numbered mark; None without such marks.
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
    """A section of the page.

    id: identifier of the section in the HTML page.
    note: text below the title; "" for none.
    lines: texts that are shown as a list.
    folded: whether the section is closed until the reader opens it.
    """

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
    """Returns a text that is safe as a file name.

    Each run of characters other than ASCII letters, digits, dots, underscores and dashes becomes
    one dash.
    """
    return re.sub("[^A-Za-z0-9._-]+", "-", text)
