"""Share of peak over two axes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from quantbench.analysis.summary import Row
from quantbench.report.canvas import canvas, heading, plain, save

# Pairs that a report shows first where the run has them.
_FIRST = (("hidden", "mbs"), ("heads", "tp"), ("n", "m"), ("k", "n"))
_MOST_MAPS = 4
# Cells are labelled up to this many; beyond, the colours speak alone.
_MOST_LABELLED = 130


@dataclass(frozen=True)
class HeatMap:
    """One map. rows: those drawn, of one provider, all other axes held at `held`."""

    x_axis: str
    y_axis: str
    provider: str
    held: dict[str, int]
    rows: tuple[Row, ...]

    @property
    def caption(self) -> str:
        """What is held, in words."""
        held = ", ".join(f"{name.replace('_', '-')} = {value}" for name, value in self.held.items())
        return f"{self.provider}, {held}" if held else self.provider


def heat_maps(rows: Sequence[Row], axes: Sequence[str]) -> tuple[HeatMap, ...]:
    """Maps for pairs of axes that both vary, the most asked for first, at most four."""
    varied = [axis for axis in axes if len({row.axes.get(axis) for row in rows}) > 1]
    pairs = [pair for pair in _FIRST if set(pair) <= set(varied)]
    pairs += [pair for pair in combinations(varied, 2) if pair not in pairs and pair[::-1] not in pairs]
    found = []
    for x_axis, y_axis in pairs:
        if _wider(rows, y_axis, x_axis):
            x_axis, y_axis = y_axis, x_axis
        slices: dict[tuple[str, tuple[tuple[str, int], ...]], list[Row]] = {}
        for row in rows:
            if row.peak_share is not None and not row.missing and x_axis in row.axes and y_axis in row.axes:
                held = tuple((name, value) for name, value in row.axes.items() if name not in (x_axis, y_axis))
                slices.setdefault((row.provider, held), []).append(row)
        if not slices:
            continue
        # Of the fullest slices those of the provider that takes most time, and of them the middle one.
        fullest = max(len(own) for own in slices.values())
        full = [key for key, own in slices.items() if len(own) >= 0.9 * fullest]
        spent: dict[str, float] = {}
        for key in full:
            spent[key[0]] = spent.get(key[0], 0.0) + sum(row.latency_us for row in slices[key])
        provider = max(spent, key=lambda name: spent[name])
        helds = sorted(held for name, held in full if name == provider)
        held = helds[len(helds) // 2]
        own = slices[provider, held]
        if len({r.axes[x_axis] for r in own}) > 1 and len({r.axes[y_axis] for r in own}) > 1:
            found.append(HeatMap(x_axis, y_axis, provider, dict(held), tuple(own)))
    return tuple(found[:_MOST_MAPS])


def _wider(rows: Sequence[Row], one: str, other: str) -> bool:
    """The axis with more values lies along x."""
    return len({row.axes.get(one) for row in rows}) > len({row.axes.get(other) for row in rows})


def draw_heat_map(heat: HeatMap, path: Path, caption: str) -> None:
    """Write a PNG: percent of peak, one cell a place; cells that were not measured stay empty. caption: see
    `canvas.heading`."""
    import numpy as np
    import seaborn as sns

    x = sorted({row.axes[heat.x_axis] for row in heat.rows})
    y = sorted({row.axes[heat.y_axis] for row in heat.rows}, reverse=True)
    cells = np.full((len(y), len(x)), np.nan)
    column_of, line_of = ({size: i for i, size in enumerate(sizes)} for sizes in (x, y))
    for row in heat.rows:
        assert row.peak_share is not None
        cells[line_of[row.axes[heat.y_axis]], column_of[row.axes[heat.x_axis]]] = 100 * row.peak_share
    with canvas(1, 1, 6.8, min(6.5, 1.6 + 0.26 * len(y) + (0.6 if len(y) < 6 else 0.0))) as (figure, panels):
        panel = panels[0][0]
        sns.heatmap(
            cells, ax=panel, cmap="viridis", annot=cells.size <= _MOST_LABELLED,
            fmt=".0f", annot_kws={"fontsize": 7.5}, cbar_kws={"label": "share of peak, %"},
            xticklabels=False, yticklabels=False, mask=np.isnan(cells),
        )  # fmt: skip
        panel.set_xticks(*_ticks(x, 14))
        panel.set_yticks(*_ticks(y, 20))
        panel.set_xlabel(plain(heat.x_axis.replace("_", "-")))
        panel.set_ylabel(plain(heat.y_axis.replace("_", "-")))
        panel.tick_params(axis="y", rotation=0)
        panel.tick_params(axis="x", rotation=45 if len(x) > 8 else 0)
        heading(figure, heat.caption, caption)
        save(figure, path)


def _ticks(values: Sequence[int], most: int) -> tuple[list[float], list[str]]:
    """The middles of at most `most` cells, evenly spaced, and their labels."""
    every = -(-len(values) // most)
    return [i + 0.5 for i in range(0, len(values), every)], [str(value) for value in values[::every]]
