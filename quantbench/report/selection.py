"""The part of a run that somebody asks for: `--where n=5120` of a table of hundreds of shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from quantbench.analysis.summary import Point
from quantbench.errors import InputError

# Values that are named where the one asked for is not there.
_MOST_NAMED = 4


def parse_where(words: Iterable[str]) -> dict[str, int]:
    """Axis values from `n=5120,k=5120` or several such words. Raises InputError for anything else.

    >>> parse_where(["head-dim=128", "n=5120,k=4096"])
    {'head_dim': 128, 'n': 5120, 'k': 4096}
    """
    found = {}
    for word in ",".join(words).split(",") if words else ():
        name, equals, value = word.partition("=")
        if not (equals and name.strip() and re.fullmatch("[0-9]{1,19}", value.strip())):
            raise InputError("--where", repr(word), "an axis and its value, such as n=5120")
        found[name.strip().replace("-", "_")] = int(value)
    return found


def points_where(points: Sequence[Point], where: Mapping[str, int]) -> tuple[Point, ...]:
    """Points at these values. Raises InputError where the run has none there, naming what it has."""
    left = tuple(points)
    for name, wanted in where.items():
        values = {point.axes[name] for point in left if name in point.axes}
        if wanted not in values:
            there = sorted(sorted(values, key=lambda value: abs(value - wanted))[:_MOST_NAMED])
            axes = sorted({axis.replace("_", "-") for point in points for axis in point.axes})
            known = ", ".join(map(str, there)) if there else f"an axis of the run: {', '.join(axes) or 'it has none'}"
            raise InputError("--where", f"{name.replace('_', '-')}={wanted}", f"one of {known}" if there else known)
        left = tuple(point for point in left if point.axes.get(name) == wanted)
    return left


def where_words(where: Mapping[str, int]) -> str:
    """`n = 5120, k = 5120`."""
    return ", ".join(f"{name.replace('_', '-')} = {value}" for name, value in where.items())
