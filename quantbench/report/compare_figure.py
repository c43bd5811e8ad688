"""The picture of a comparison: every point's ratio with its interval, over the axis or sorted by size of change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantbench.analysis.compare import VERDICTS, Compared, Comparison
from quantbench.report.canvas import canvas, plain, save

_COLOURS = {"slower": "#c1272d", "faster": "#1a7f4b", "same": "#7a7a7a", "unclear": "#d19a00"}
# Ratios beyond this are drawn at the rim: one point that is 40 times slower would flatten all others.
_RIM = 3.0


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Write a PNG: above 1 is slower. With one axis that most of the points differ in, that axis runs along x."""
    points = comparison.points
    axis = _axis(points)
    with canvas(1, 1, 9.0, 4.2) as (figure, panels):
        panel = panels[0][0]
        tolerance = comparison.tolerance
        panel.axhspan(1 / (1 + tolerance), 1 + tolerance, color="0.92", zorder=0, label="does not count")
        panel.axhline(1.0, color="0.4", linewidth=0.8)
        _draw_points(panel, points, axis)
        panel.set_yscale("log")
        _ratio_ticks(panel)
        panel.set_ylabel("time of B / time of A   (above 1: slower)")
        panel.set_xlabel(axis.replace("_", "-") if axis else "points, from fastest to slowest")
        panel.legend(fontsize=8, loc="best", ncols=2)
        a, b = comparison.a.info, comparison.b.info
        origin = "" if b.origin == "measured" else f" · {b.origin}"
        figure.suptitle(plain(f"{b.device.name}{origin}: A {a.run_id} · B {b.run_id}"), x=0.01, ha="left", fontsize=10)
        save(figure, path)


def _axis(points: Sequence[Compared]) -> str:
    """The axis that runs along x; none where points of several axes or places lie above each other."""
    names = {tuple(point.place.axes) for point in points}
    if len(names) != 1:
        return ""
    (axes,) = names
    varied = [name for name in axes if len({point.place.axes[name] for point in points}) > 1]
    return varied[0] if len(varied) == 1 else ""


def _draw_points(panel: Any, points: Sequence[Compared], axis: str) -> None:
    ordered = sorted(points, key=lambda p: (p.place.axes[axis] if axis else p.ratio, p.place.op))
    for verdict in VERDICTS:
        own = [(i, p) for i, p in enumerate(ordered) if p.verdict == verdict]
        if not own:
            continue
        x = [p.place.axes[axis] if axis else i for i, p in own]
        y = [_inside(p.ratio) for _, p in own]
        panel.plot(x, y, "o", markersize=4, color=_COLOURS[verdict], label=f"{len(own)} {verdict}", zorder=3)
        panel.vlines(
            x,
            [_inside(p.ratio if p.low is None else p.low) for _, p in own],
            [_inside(p.ratio if p.high is None else p.high) for _, p in own],
            color=_COLOURS[verdict],
            linewidth=0.9,
            zorder=2,
        )


def _inside(ratio: float) -> float:
    return min(max(ratio, 1 / _RIM), _RIM)


def _ratio_ticks(panel: Any) -> None:
    """Plain numbers on the logarithmic axis, at steps that suit its span."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    panel.yaxis.set_major_locator(MaxNLocator(nbins=8))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
