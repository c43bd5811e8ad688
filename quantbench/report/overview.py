"""Pictures over many shapes at once: heat maps over two axes, and jumps between neighbouring sizes.

`maps_section` and `spread_card` make the parts of the report's page; `page` calls both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from quantbench.analysis.curves import Curve
from quantbench.analysis.summary import Row
from quantbench.report.canvas import CLIFF_COLOUR, canvas, plain
from quantbench.report.content import Caption, Gallery, PictureCard, Section
from quantbench.report.source import dashed

# Pairs that a report shows first where the run has them.
_FIRST = (("hidden", "mbs"), ("heads", "tp"), ("n", "m"), ("k", "n"))
_MOST_MAPS = 4
# Cells are labelled up to this many; beyond, the colours speak alone.
_MOST_LABELLED = 130


@dataclass(frozen=True)
class HeatMap:
    """A map of share of peak over two axes.

    provider, held: what all its rows have in common.
    rows: the rows that are drawn.
    """

    x_axis: str
    y_axis: str
    provider: str
    held: dict[str, int]
    rows: tuple[Row, ...]

    @property
    def caption(self) -> str:
        """Provider and held axes, in words."""
        held = ", ".join(f"{dashed(name)} = {value}" for name, value in self.held.items())
        return f"{self.provider}, {held}" if held else self.provider


def heat_maps(rows: Sequence[Row], axes: Sequence[str]) -> tuple[HeatMap, ...]:
    """Maps for pairs of axes that both vary, the usual pairs first, at most four."""
    values = {axis: len({row.axes.get(axis) for row in rows}) for axis in axes}
    varied = [axis for axis in axes if values[axis] > 1]
    pairs = [pair for pair in _FIRST if set(pair) <= set(varied)]
    pairs += [pair for pair in combinations(varied, 2) if pair not in pairs and pair[::-1] not in pairs]
    found = []
    for x_axis, y_axis in pairs:
        if values[y_axis] > values[x_axis]:  # the axis with more values is drawn along x
            x_axis, y_axis = y_axis, x_axis
        slices: dict[tuple[str, tuple[tuple[str, int], ...]], list[Row]] = defaultdict(list)
        for row in rows:
            if row.peak_share is not None and not row.missing and x_axis in row.axes and y_axis in row.axes:
                held = tuple((name, value) for name, value in row.axes.items() if name not in (x_axis, y_axis))
                slices[row.provider, held].append(row)
        if not slices:
            continue
        # Of the fullest slices those of the provider that takes most time, and of them the middle one.
        fullest = max(len(own) for own in slices.values())
        full = {key: own for key, own in slices.items() if len(own) >= 0.9 * fullest}
        spent: dict[str, float] = defaultdict(float)
        for (provider, _), own in full.items():
            spent[provider] += sum(row.latency_us for row in own)
        provider = max(spent, key=lambda name: spent[name])
        helds = sorted(held for name, held in full if name == provider)
        held = helds[len(helds) // 2]
        own = full[provider, held]
        if len({r.axes[x_axis] for r in own}) > 1 and len({r.axes[y_axis] for r in own}) > 1:
            found.append(HeatMap(x_axis, y_axis, provider, dict(held), tuple(own)))
    return tuple(found[:_MOST_MAPS])


def draw_heat_map(heat: HeatMap, path: Path, caption: str) -> None:
    """Write a PNG: per cent of peak, one cell per place; places that were not measured stay empty.

    caption: see `canvas.canvas`.
    """
    import seaborn as sns

    x = sorted({row.axes[heat.x_axis] for row in heat.rows})
    y = sorted({row.axes[heat.y_axis] for row in heat.rows}, reverse=True)
    cells = np.full((len(y), len(x)), np.nan)
    column_of, line_of = ({size: i for i, size in enumerate(sizes)} for sizes in (x, y))
    for row in heat.rows:
        assert row.peak_share is not None
        cells[line_of[row.axes[heat.y_axis]], column_of[row.axes[heat.x_axis]]] = 100 * row.peak_share
    height_in = min(6.5, 1.6 + 0.26 * len(y) + (0.6 if len(y) < 6 else 0.0))
    with canvas(path, (6.8, height_in), title=heat.caption, caption=caption) as panels:
        panel = panels[0][0]
        sns.heatmap(
            cells, ax=panel, cmap="viridis", annot=cells.size <= _MOST_LABELLED,
            fmt=".0f", annot_kws={"fontsize": 7.5}, cbar_kws={"label": "share of peak, %"},
            xticklabels=False, yticklabels=False, mask=np.isnan(cells),
        )  # fmt: skip
        panel.set_xticks(*_ticks(x, 14))
        panel.set_yticks(*_ticks(y, 20))
        panel.set_xlabel(plain(dashed(heat.x_axis)))
        panel.set_ylabel(plain(dashed(heat.y_axis)))
        panel.tick_params(axis="y", rotation=0)
        panel.tick_params(axis="x", rotation=45 if len(x) > 8 else 0)


def _ticks(values: Sequence[int], most: int) -> tuple[list[float], list[str]]:
    """The middles of at most `most` cells, evenly spaced, and their labels."""
    every = -(-len(values) // most)
    return [i + 0.5 for i in range(0, len(values), every)], [str(value) for value in values[::every]]


def maps_section(rows: Sequence[Row], axes: Sequence[str], gallery: Gallery, caption: Caption) -> Section | None:
    """The section with all heat maps; None for a run of one axis."""
    cards = []
    for heat in heat_maps(rows, axes):
        path = gallery.path("map", heat.x_axis, heat.y_axis)
        draw_heat_map(heat, path, caption([point for row in heat.rows for point in row.points]))
        x, y = dashed(heat.x_axis), dashed(heat.y_axis)
        cards.append(
            PictureCard(f"Share of peak over {x} and {y}", gallery.picture(path, f"heat map over {x} and {y}"))
        )
    return Section("maps", "Heat maps over two sizes", cards=tuple(cards)) if cards else None


# Sizes further apart than this are no neighbours: between them the work itself grows.
_NEIGHBOURS = 1.1
# Fewer curves than this have no spread worth drawing.
_FEWEST_CURVES = 8
# Of more pairs than this, those that jump most are drawn.
_MOST_PAIRS = 28


@dataclass(frozen=True)
class StepSpread:
    """The step from `before` to `after` along an axis, over many curves.

    curves: number of curves.
    low, median, high: 10, 50 and 90 % quantile of the ratio of times per unit of work (1.3: 30 % more).
    share_above: share of curves whose time rises by more than 5 %.
    """

    before: int
    after: int
    curves: int
    low: float
    median: float
    high: float
    share_above: float


def step_spreads(curves: Sequence[Curve], smallest_work: float = 0.0) -> tuple[StepSpread, ...]:
    """Every pair of neighbouring sizes that enough of the curves have, ascending.

    smallest_work: curves whose largest product has fewer FLOPs are left out.
    """
    ratios: dict[tuple[int, int], list[float]] = {}
    for curve in curves:
        if curve.points[-1].workload.flops < smallest_work:
            continue
        for a, b in pairwise(curve.points):
            before, after = a.axes[curve.axis], b.axes[curve.axis]
            if after <= _NEIGHBOURS * before:
                work = b.workload.flops / a.workload.flops if a.workload.flops else 1.0
                ratios.setdefault((before, after), []).append(b.latency_us / a.latency_us / work)
    found = []
    for (before, after), own in sorted(ratios.items()):
        if len(own) >= _FEWEST_CURVES:
            low, middle, high = (float(q) for q in np.quantile(own, (0.1, 0.5, 0.9)))
            found.append(StepSpread(before, after, len(own), low, middle, high, float(np.mean(np.array(own) > 1.05))))
    return tuple(found)


def draw_step_spreads(spreads: Sequence[StepSpread], axis: str, path: Path, caption: str) -> None:
    """Write a PNG: for each pair of neighbours the median step and the range from 10 to 90 % of the curves.

    caption: see `canvas.canvas`.
    """
    chosen = sorted(spreads, key=lambda s: -s.median)[:_MOST_PAIRS]
    chosen.sort(key=lambda s: s.before)
    title = f"jumps of the time over {dashed(axis)}"
    with canvas(path, (6.8, 3.9), title=title, caption=caption) as panels:
        panel = panels[0][0]
        places = range(len(chosen))
        panel.axhline(0, color="0.4", linewidth=0.8)
        panel.vlines(
            places, [100 * (s.low - 1) for s in chosen], [100 * (s.high - 1) for s in chosen], color="0.6", linewidth=5,
            label="10 % to 90 % of the shapes",
        )  # fmt: skip
        panel.plot(
            places, [100 * (s.median - 1) for s in chosen], "o", color=CLIFF_COLOUR, markersize=5, label="median"
        )
        panel.set_xticks(list(places), [f"{s.before}→{s.after}" for s in chosen], rotation=90, fontsize=7.5)
        panel.set_ylabel("time per unit of work, change in %")
        panel.set_xlabel(plain(dashed(axis)))
        panel.grid(visible=False, axis="x")


def spread_card(curves: Sequence[Curve], axis: str, gallery: Gallery, caption: str) -> PictureCard | None:
    """The card with the steps over all shapes, which are `curves` along the axis.

    None where there are too few shapes or no close sizes.
    """
    spreads = step_spreads(curves)
    if not spreads:
        return None
    path = gallery.path("jumps", axis)
    draw_step_spreads(spreads, axis, path, caption)
    shapes = max(s.curves for s in spreads)
    name = dashed(axis)
    title = f"Jumps between neighbouring values of {name}, over {shapes} shapes"
    return PictureCard(title, gallery.picture(path, f"jump of the time per work at each step of {name}"))
