"""The picture of a comparison: every point's ratio with its interval, over the axis or sorted by size of change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantbench.analysis.compare import VERDICTS, Compared, Comparison
from quantbench.report.canvas import CLIFF_COLOUR, PALETTE, canvas, heading, legend_below, save
from quantbench.report.source import picture_caption

_COLOURS = {"slower": CLIFF_COLOUR, "faster": PALETTE[0], "same": "#7a7a7a", "unclear": PALETTE[1]}
_MARKERS = {"slower": "^", "faster": "v", "same": "o", "unclear": "D"}
# Ratios beyond this are drawn at the rim: one point that is 40 times slower would flatten all others.
_RIM = 3.0
_TICK_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_MOST_TICKS = 9
# More points than this are drawn smaller.
_MANY = 300


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
        legend_below(figure, [panel])
        a, b = (
            f"{name}: {run.info.run_id} · {picture_caption(run.info, (getattr(p, side) for p in points))}"
            for name, run, side in (("A", comparison.a, "a"), ("B", comparison.b, "b"))
        )
        heading(figure, a, b)
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
    size = 4.0 if len(points) <= _MANY else 1.5
    ordered = sorted(points, key=lambda p: (p.place.axes[axis] if axis else p.ratio, p.place.op))
    for verdict in VERDICTS:
        own = [(i, p) for i, p in enumerate(ordered) if p.verdict == verdict]
        if not own:
            continue
        x = [p.place.axes[axis] if axis else i for i, p in own]
        y = [_inside(p.ratio) for _, p in own]
        panel.plot(
            x, y, _MARKERS[verdict], markersize=size, color=_COLOURS[verdict], label=f"{len(own)} {verdict}", zorder=3
        )
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
    """Plain numbers on the logarithmic axis, 1 always among them, at steps that suit its span."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = panel.get_ylim()
    step = next((s for s in _TICK_STEPS if (high - low) / s <= _MOST_TICKS), _TICK_STEPS[-1])
    ticks = [1 + i * step for i in range(-round(1 / step) + 1, round(_RIM / step)) if low <= 1 + i * step <= high]
    panel.yaxis.set_major_locator(FixedLocator(ticks))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
