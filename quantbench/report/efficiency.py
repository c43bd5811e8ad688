"""The picture of a sweep: share of peak over an axis, one panel per op, predicted edges drawn in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.analysis.drawn_edges import drawn_edges
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.latency.roofline import assumed_tile
from quantbench.report.canvas import INTERVAL_COLOUR, TILE_COLOUR, WAVE_COLOUR
from quantbench.report.panels import draw_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# More wave edges than this in a panel would be a grey wall; the first ones are the large steps.
_MOST_WAVE_EDGES = 40


def draw_efficiency(points: Sequence[Point], axis: str, spec: DeviceSpec, path: Path, *, title: str) -> None:
    """Write a PNG. points: measured ones, of any ops and providers; axis: the field that runs along x.

    Each panel shows one op: measured medians with their 95 % intervals, a line per provider and per value of the
    other axes, predicted tile edges as ticks at the foot and predicted wave edges as dashed lines.
    """

    def draw(panel: Axes, op: str) -> None:
        _draw_panel(panel, [p for p in points if p.op == op], axis, spec)

    draw_panels((p.op for p in points), draw, axis, path, title=title)


def _draw_panel(panel: Axes, points: Sequence[Point], axis: str, spec: DeviceSpec) -> None:
    import seaborn as sns

    x = [p.axes[axis] for p in points]
    y = [_efficiency(p) for p in points]
    names = [_line_name(p, axis) for p in points]
    sns.lineplot(x=x, y=y, hue=names, marker="o", markersize=4, linewidth=1.2, ax=panel, errorbar=None)
    for point, height in zip(points, y, strict=True):
        panel.vlines(
            point.axes[axis],
            height * point.latency_us / point.high_us,
            height * point.latency_us / point.low_us,
            color=INTERVAL_COLOUR,
            linewidth=0.8,
        )
    _draw_edges(panel, points, axis, spec)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("TFLOP/s" if points[0].peak_share is None else "share of peak, %")
    panel.legend(fontsize=8, loc="lower right", title=None)


def _efficiency(point: Point) -> float:
    return point.tflops if point.peak_share is None else 100 * point.peak_share


def _line_name(point: Point, axis: str) -> str:
    others = " ".join(f"{name}={value}" for name, value in point.axes.items() if name != axis)
    return f"{point.provider} {others}".strip()


def _draw_edges(panel: Axes, points: Sequence[Point], axis: str, spec: DeviceSpec) -> None:
    edges = drawn_edges(points, axis, spec)
    source = f"{assumed_tile(spec).tile} assumed" if edges.assumed else "tile of the kernel that ran"
    if edges.tile:
        foot = panel.get_xaxis_transform()
        panel.plot(
            edges.tile, [0.0] * len(edges.tile), "|", transform=foot, color=TILE_COLOUR, markersize=10, clip_on=False,
            label=f"tile edge ({source})",
        )  # fmt: skip
    for i, edge in enumerate(edges.wave[:_MOST_WAVE_EDGES]):
        panel.axvline(
            edge, color=WAVE_COLOUR, linestyle="--", linewidth=0.7, alpha=0.6, zorder=0,
            label=f"wave edge ({source})" if i == 0 else None,
        )  # fmt: skip
