"""Draws heat maps of a run's rates over pairs of axes, for the HTML report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from io import BytesIO
from itertools import combinations

import numpy as np

from quantbench.analysis.summary import LayerRow, Point, values_along
from quantbench.report.canvas import figure, plain, rate, rate_unit
from quantbench.report.content import Caption, Card, Section, embedded
from quantbench.units import axis_words, dashed

# Pairs of axes that are shown before all other pairs.
_FIRST = (("hidden", "mbs"), ("heads", "tp"), ("n", "m"), ("k", "n"))
_MOST_MAPS = 4
# A slice of the run is a candidate for a map if it has at least this fraction of the grid points in
# the fullest slice.
_FULL = 0.9
# Maximum number of cells that are labelled with their value.
_MOST_LABELLED = 130


def maps_section(rows: Sequence[LayerRow], axes: Sequence[str], caption: Caption) -> Section | None:
    """Builds the section with up to four heat maps, each over two axes that vary in the run.

    A map shows one provider and one value of each other axis (`_middle_slice`). Returns None if no
    map would have several values along both axes.

    rows: measured grid points of the run.
    axes: names of the axes.
    caption: function from points to the caption of their plot.
    """
    values = {axis: len(values_along(rows, axis)) for axis in axes}
    varied = [axis for axis in axes if values[axis] > 1]
    pairs = [pair for pair in _FIRST if set(pair) <= set(varied)]
    for pair in combinations(varied, 2):
        if pair not in pairs and pair[::-1] not in pairs:
            pairs.append(pair)
    cards: list[Card] = []
    for pair in pairs:
        # The axis with more values is drawn along x.
        x_axis, y_axis = sorted(pair, key=lambda axis: -values[axis])
        words, own = _middle_slice(rows, x_axis, y_axis)
        several = min(len(values_along(own, axis)) for axis in pair) > 1
        if len(cards) == _MOST_MAPS or not several:
            continue
        points: list[Point] = []
        for row in own:
            points += row.points
        ops = ", ".join(dict.fromkeys(point.op for point in points))
        title = f"Rate of {ops} over {dashed(x_axis)} and {dashed(y_axis)}"
        picture = draw_heat_map(
            own, x_axis, y_axis, title=", ".join(words), caption=caption(points)
        )
        cards.append(Card(title, "", picture=embedded(picture)))
    return Section("maps", "Heat maps over two sizes", cards=tuple(cards)) if cards else None


def _middle_slice(
    rows: Sequence[LayerRow], x_axis: str, y_axis: str
) -> tuple[tuple[str, ...], list[LayerRow]]:
    """Selects the slice of the rows that a map over two axes shows.

    A slice has one provider and one value of each axis other than `x_axis` and `y_axis`. Candidates
    are the slices with at least 90 % as many measured grid points as the fullest slice. The
    candidate with the median total time is selected.

    Returns the slice's provider and axis values as texts, and the slice's rows.
    """
    slices: dict[tuple[str, ...], list[LayerRow]] = defaultdict(list)
    for row in rows:
        if row.missing or not {x_axis, y_axis} <= row.axes.keys():
            continue
        held = dict(row.axes)
        del held[x_axis], held[y_axis]
        slices[row.provider, *axis_words(held, " = ")].append(row)
    fullest = max(map(len, slices.values()), default=0)
    full = []
    for words, own in slices.items():
        if len(own) >= _FULL * fullest:
            full.append((sum(row.latency_us for row in own), words))
    if not full:
        return (), []
    _, words = sorted(full)[len(full) // 2]
    return words, slices[words]


def draw_heat_map(
    rows: Sequence[LayerRow], x_axis: str, y_axis: str, *, title: str, caption: str
) -> bytes:
    """Returns a heat map of the rates as a PNG.

    A cell is one grid point. Cells without a measured grid point stay empty.

    rows: rows of one slice.
    title, caption: texts above the map, as in `canvas.figure`.
    """
    import seaborn as sns

    x = sorted({row.axes[x_axis] for row in rows})
    y = sorted({row.axes[y_axis] for row in rows}, reverse=True)
    cells = np.full((len(y), len(x)), np.nan)
    for row in rows:
        cells[y.index(row.axes[y_axis]), x.index(row.axes[x_axis])] = rate(row)
    # Each row of cells adds 0.26 in. A map with few rows gets extra height to stay readable.
    height_in = min(6.5, 1.6 + 0.26 * len(y) + (0.6 if len(y) < 6 else 0.0))
    drawn = BytesIO()
    with figure(drawn, (6.8, height_in), title=title, caption=caption) as panels:
        panel = panels[0][0]
        sns.heatmap(
            cells,
            ax=panel,
            cmap="viridis",
            annot=cells.size <= _MOST_LABELLED,
            fmt=".0f",
            annot_kws={"fontsize": 7.5},
            cbar_kws={"label": rate_unit(rows[0])},
            xticklabels=False,
            yticklabels=False,
            mask=np.isnan(cells),
        )
        # More labels than these would overlap.
        panel.set_xticks(*_ticks(x, 14))
        panel.set_yticks(*_ticks(y, 20))
        panel.set_xlabel(plain(dashed(x_axis)))
        panel.set_ylabel(plain(dashed(y_axis)))
        panel.tick_params(axis="y", rotation=0)
        panel.tick_params(axis="x", rotation=45 if len(x) > 8 else 0)
    return drawn.getvalue()


def _ticks(values: Sequence[int], most: int) -> tuple[list[float], list[str]]:
    """Returns the centres of at most `most` evenly spaced cells, and their labels."""
    every = -(-len(values) // most)
    centres = np.arange(0.5, len(values), every)
    return centres.tolist(), list(map(str, values[::every]))
