"""What a report's page holds, ready to be shown: texts, pictures and tables, nothing that needs working out.

Every text may come from a file and is escaped where the page is made.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class Card:
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
    cards: tuple[Card, ...] = ()
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
