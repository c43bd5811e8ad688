"""The picture of a sweep: share of peak over an axis, one panel per op, with the tile and wave edges that are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.analysis.check import Check
from quantbench.analysis.curves import Curve, curves_of
from quantbench.analysis.drawn_edges import drawn_edges
from quantbench.analysis.summary import Point, points_of
from quantbench.analysis.tiles import TileOf
from quantbench.report.canvas import INTERVAL_COLOUR, MARKERS, PALETTE, plain
from quantbench.report.panels import draw_panels
from quantbench.report.series import curve_names
from quantbench.report.source import picture_caption
from quantbench.store.folder import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More wave edges than this in a panel would be a grey wall; the first ones are the large steps.
_MOST_WAVE_EDGES = 40
# Edges of more curves than this cannot be told apart.
_MOST_WITH_EDGES = 2


def draw_run(run: Run, check: Check, axis: str) -> Path:
    """Draw all points of a run over `axis` into the run's folder. check: of the run. Returns the file."""
    points = points_of(run.records, run.info.device)
    name = axis.replace("_", "-")
    path = run.folder / f"efficiency-{name}.png"
    title, caption = f"efficiency over {name}: {run.info.run_id}", picture_caption(run.info, points)
    draw_efficiency(points, axis, check.tile_of, path, title=title, caption=caption)
    return path


def draw_efficiency(
    points: Sequence[Point], axis: str, tile_of: TileOf, path: Path, *, title: str, caption: str
) -> None:
    """Write a PNG. points: measured ones, of any ops and providers; axis: the field that runs along x.

    Each panel shows one op: medians with their 95 % intervals, a line per provider and per value of the other axes.
    Where the tile is known (recorded, or told by the steps), tile edges are ticks at the foot and wave edges dashed
    lines, in the colour of their curve. tile_of: whose tile a point is computed with (`Check.tile_of`).
    """

    def draw(panel: Axes, op: str) -> None:
        _draw_panel(panel, curves_of([p for p in points if p.op == op], axis, fewest=1), tile_of)

    draw_panels((p.op for p in points), draw, axis, path, title=title, caption=caption)


def _draw_panel(panel: Axes, curves: Sequence[Curve], tile_of: TileOf) -> None:
    for i, (curve, name) in enumerate(zip(curves, curve_names(curves), strict=True)):
        colour, label = PALETTE[i % len(PALETTE)], plain(name, 44)
        y = [_efficiency(p) for p in curve.points]
        panel.plot(
            curve.sizes, y, "-", marker=MARKERS[i % len(MARKERS)], markersize=4, linewidth=1.2, color=colour,
            label=label,
        )  # fmt: skip
        panel.vlines(
            curve.sizes,
            [height * p.latency_us / p.high_us for height, p in zip(y, curve.points, strict=True)],
            [height * p.latency_us / p.low_us for height, p in zip(y, curve.points, strict=True)],
            color=INTERVAL_COLOUR, linewidth=0.9, zorder=4,
        )  # fmt: skip
        if len(curves) <= _MOST_WITH_EDGES:
            _draw_edges(panel, curve, tile_of, colour, label)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("TFLOP/s" if curves[0].points[0].peak_share is None else "share of peak, %")


def _efficiency(point: Point) -> float:
    return point.tflops if point.peak_share is None else 100 * point.peak_share


def _draw_edges(panel: Axes, curve: Curve, tile_of: TileOf, colour: str, name: str) -> None:
    edges = drawn_edges(curve, tile_of)
    if edges.tile:
        panel.plot(
            edges.tile, [0.0] * len(edges.tile), "|", transform=panel.get_xaxis_transform(), color=colour,
            markersize=10, clip_on=False, label=f"tile edge, {name}",
        )  # fmt: skip
    for i, edge in enumerate(edges.wave[:_MOST_WAVE_EDGES]):
        panel.axvline(
            edge, color=colour, linestyle="--", linewidth=0.8, alpha=0.7, zorder=0,
            label=f"wave edge, {name}" if i == 0 else None,
        )  # fmt: skip
