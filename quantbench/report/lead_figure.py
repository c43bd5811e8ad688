"""The picture of the first screen: the curve over the sizes, bad stretches in red, the loss of each beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantbench.analysis.neighbours import BadSize, curves_of_rows
from quantbench.analysis.summary import Row
from quantbench.report.canvas import (
    CLIFF_COLOUR,
    MARKERS,
    PALETTE,
    canvas,
    heading,
    legend_below,
    limit_heights,
    plain,
    save,
    ticks_at,
)
from quantbench.report.series import is_wide
from quantbench.units import percent

_MOST_CURVES = 4
# Labels further apart than this share of the axis do not touch.
_LABEL_GAP = 0.1
_NEAR_THE_FOOT = 0.1


def draw_lead(rows: Sequence[Row], bad: Sequence[BadSize], axis: str, path: Path, caption: str) -> None:
    """Write a PNG: all ops of a place together, share of peak over `axis`; of several curves those that lose most.
    caption: see `canvas.heading`."""
    losses: dict[int, float] = {}
    for one in bad:
        losses[id(one.row)] = max(one.loss, losses.get(id(one.row), 0.0))
    curves = [curve for curve in curves_of_rows(rows, axis) if len(curve) > 1]
    curves.sort(key=lambda curve: -sum(losses.get(id(row), 0.0) for row in curve))
    curves = curves[:_MOST_CURVES]
    with canvas(1, 1, 6.4, 4.1) as (figure, panels):
        panel = panels[0][0]
        heights = []
        for i, curve in enumerate(curves):
            x, y = [row.axes[axis] for row in curve], [_height(row) for row in curve]
            heights += y
            name = plain(_name(curve, curves, axis), 44)
            panel.plot(
                x, y, "-", marker=MARKERS[i], color=PALETTE[i], markersize=3.5, linewidth=1.1, label=name, zorder=3
            )
            in_red = [(at, h) for at, h, row in zip(x, y, curve, strict=True) if id(row) in losses]
            panel.plot(*zip(*in_red, strict=True), "o", color=CLIFF_COLOUR, markersize=4, zorder=4) if in_red else None
        sizes = sorted({row.axes[axis] for curve in curves for row in curve})
        if is_wide(sizes):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ticks_at(panel, sizes)
        limit_heights(panel, heights)
        _label_worst(panel, [b for b in bad if any(b.row in curve for curve in curves)], axis, sizes)
        panel.plot([], [], "o", color=CLIFF_COLOUR, markersize=4, label="loses against a size near it")
        panel.set_xlabel(plain(axis.replace("_", "-")))
        panel.set_ylabel("TFLOP/s" if curves[0][0].peak_share is None else "share of peak, %")
        legend_below(figure, [panel])
        ops = ", ".join(dict.fromkeys(point.op for point in curves[0][0].points))
        heading(figure, f"{ops}, together" if "," in ops else ops, caption)
        save(figure, path)


def _height(row: Row) -> float:
    return row.tflops if row.peak_share is None else 100 * row.peak_share


def _name(curve: Sequence[Row], curves: Sequence[Sequence[Row]], axis: str) -> str:
    held = [f"{name.replace('_', '-')}={value}" for name, value in curve[0].axes.items() if name != axis]
    providers = {other[0].provider for other in curves}
    return " ".join([*([curve[0].provider] if len(providers) > 1 or not held else []), *held])


def _label_worst(panel: object, bad: Sequence[BadSize], axis: str, sizes: Sequence[int]) -> None:
    """The loss beside the worst places, as many as have room."""
    from math import log

    from matplotlib.axes import Axes
    from matplotlib.patheffects import withStroke

    assert isinstance(panel, Axes)
    scale = log if is_wide(sizes) else float
    span = scale(sizes[-1]) - scale(sizes[0]) or 1.0
    placed: list[float] = []
    bottom, top = panel.get_ylim()
    floor = bottom + _NEAR_THE_FOOT * (top - bottom)  # below it a label stands above its point
    better: set[int] = set()  # of the sizes that lose against one, the worst is labelled
    for one in sorted(bad, key=lambda b: -b.loss):
        at = (scale(one.size) - scale(sizes[0])) / span
        if id(one.better) in better:
            continue
        better.add(id(one.better))
        if all(abs(at - other) > _LABEL_GAP for other in placed):
            placed.append(at)
            height = _height(one.row)
            offset = (0, -11) if height > floor else (0, 6)
            panel.annotate(
                f"−{percent(one.loss)}", (one.size, height), xytext=offset, textcoords="offset points",
                ha="center", fontsize=8, color=CLIFF_COLOUR, fontweight="bold", zorder=5,
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )  # fmt: skip
