"""One op along one axis: measured points with intervals, the sawtooth of tiles and waves, cliffs, and which kernel ran
where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from quantbench.analysis.curves import Curve
from quantbench.analysis.sawtooth import sawtooth
from quantbench.analysis.summary import Point
from quantbench.analysis.tiles import Family, TileOf
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Launch
from quantbench.report.canvas import (
    CLIFF_COLOUR,
    MARKERS,
    PALETTE,
    canvas,
    legend_below,
    limit_heights,
    plain,
    save,
    ticks_at,
)
from quantbench.report.marks import Mark, place_key
from quantbench.report.series import curve_names, is_wide

# A sawtooth behind more curves than this is a thicket.
_MOST_SAWTEETH = 2
# Cliffs that are numbered in one picture.
MOST_NUMBERED = 6
# A piece of the kernel band narrower than this share of the axis has no room for its name.
_NAMED_BAND = 0.09


def draw_op(
    curves: Sequence[Curve],
    numbered: Sequence[tuple[int, Mark]],
    colours: dict[str, str],
    spec: DeviceSpec,
    path: Path,
    *,
    title: str,
    tile_of: Callable[[Family], TileOf],
) -> None:
    """Write a PNG.

    curves: of one op along one axis. numbered: cliffs with the number that the page's table gives them. colours: of
    each kernel by its name (see `kernel_colours`). tile_of: of each family of curves, for the sawtooth.
    """
    axis = curves[0].axis
    banded = [curve for curve in curves if any(p.launch is not None for p in curve.points)]
    lines = len(banded)
    ratios = {"height_ratios": (1.0, 0.062 * lines)} if lines else {}
    with canvas(1 + bool(lines), 1, 6.4, 3.9 + 0.24 * lines, sharex=True, **ratios) as (figure, panels):
        panel = panels[0][0]
        heights = _draw_curves(panel, curves, spec, tile_of)
        _draw_marks(panel, curves, numbered)
        sizes = sorted({size for curve in curves for size in curve.sizes})
        if is_wide(sizes):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ticks_at(panels[-1][0], sizes)
        panel.set_xlim(*_limits(sizes))
        limit_heights(panel, heights)
        panel.set_ylabel(_unit(curves[0].points[0]))
        legend_below(figure, panel)
        if lines:
            _draw_bands(panels[1][0], banded, curve_names(curves), colours)
        panels[-1][0].set_xlabel(plain(axis.replace("_", "-")))
        figure.suptitle(plain(title), x=0.01, ha="left", fontsize=10, fontweight="bold")
        save(figure, path)


def kernel_colours(points: Sequence[Point]) -> dict[str, str]:
    """A colour for each kernel that ran, by the kernel's name, in the order of first appearance."""
    import matplotlib as mpl
    from matplotlib.colors import to_hex

    names = list(dict.fromkeys(p.launch.kernel for p in points if p.launch is not None))
    palette = PALETTE if len(names) <= len(PALETTE) else [to_hex(colour) for colour in mpl.colormaps["tab20"].colors]  # type: ignore[attr-defined]
    return {name: palette[i % len(palette)] for i, name in enumerate(names)}


def kernel_label(launch: Launch) -> str:
    """Its tile where that is known, else its name."""
    return str(launch.tile) if launch.tile is not None else launch.kernel


def efficiency(point: Point) -> float:
    """What the curves show: percent of the peak, or TFLOP/s where that is not known (GB/s without arithmetic)."""
    if point.peak_share is not None:
        return 100 * point.peak_share
    return point.tflops if point.workload.flops else point.gb_per_s


def _unit(point: Point) -> str:
    if point.peak_share is not None:
        return "share of peak, %"
    return "TFLOP/s" if point.workload.flops else "GB/s"


def _draw_curves(
    panel: Any, curves: Sequence[Curve], spec: DeviceSpec, tile_of: Callable[[Family], TileOf]
) -> list[float]:
    """Draw them; the heights that must fit."""
    heights = []
    for i, (curve, name) in enumerate(zip(curves, curve_names(curves), strict=True)):
        colour, marker = PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)]
        x, y = curve.sizes, [efficiency(p) for p in curve.points]
        heights += y
        panel.plot(
            x, y, "-", marker=marker, color=colour, markersize=3.4, linewidth=1.1, label=plain(name, 44), zorder=3
        )
        panel.vlines(
            x,
            [h * p.latency_us / p.high_us for h, p in zip(y, curve.points, strict=True)],
            [h * p.latency_us / p.low_us for h, p in zip(y, curve.points, strict=True)],
            color="0.25", linewidth=1.0, zorder=4,
        )  # fmt: skip
        # Of several curves the largest: small products run other tiles than the one that is assumed for them.
        teeth = None
        if len(curves) - i <= _MOST_SAWTEETH:
            teeth = sawtooth(curve.points, curve.axis, spec, tile_of(curve.family))
        if teeth is not None and not teeth.guess:
            per_tflops = y[-1] / curve.points[-1].tflops
            label = f"tiles and waves ({teeth.tile})" if i == len(curves) - 1 else None
            rates = [per_tflops * rate for rate in teeth.tflops]
            panel.plot(teeth.sizes, rates, "--", color=colour, linewidth=0.8, alpha=0.55, zorder=2, label=label)
    return heights


def _draw_marks(panel: Any, curves: Sequence[Curve], numbered: Sequence[tuple[int, Mark]]) -> None:
    there = {place_key(point) for curve in curves for point in curve.points}
    for number, mark in numbered:
        if place_key(mark.after) not in there:
            continue
        x, y = mark.after.axes[mark.axis], efficiency(mark.after)
        panel.annotate(
            f"{number}", (x, y), xytext=(0, -17), textcoords="offset points", ha="center", va="center", fontsize=8,
            color="white", zorder=6,
            bbox={"boxstyle": "circle,pad=0.22", "facecolor": CLIFF_COLOUR, "edgecolor": "white"},
            arrowprops={"arrowstyle": "-", "color": CLIFF_COLOUR, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 1},
        )  # fmt: skip
        panel.plot([x], [y], "o", color=CLIFF_COLOUR, markersize=4.5, zorder=5)


def _limits(sizes: Sequence[int]) -> tuple[float, float]:
    low, high = sizes[0], sizes[-1]
    if is_wide(sizes):
        return low / 1.1, high * 1.1
    margin = 0.03 * (high - low) or 0.5
    return low - margin, high + margin


def _draw_bands(strip: Any, curves: Sequence[Curve], names: Sequence[str], colours: dict[str, str]) -> None:
    """A line in the strip for each curve whose kernels are known: one colour a kernel, its tile written in it."""
    strip.set_ylim(len(curves), 0)
    labels = [plain(name, 12) for name in names] if len(curves) == len(names) > 1 else ["kernel"] * len(curves)
    strip.set_yticks([line + 0.5 for line in range(len(curves))], labels, fontsize=7)
    strip.grid(visible=False)
    strip.tick_params(axis="x", which="both", bottom=True)
    for line, curve in enumerate(curves):
        for start, stop, launch in _pieces(curve, strip.get_xlim()):
            if launch is None:
                continue
            colour = colours[launch.kernel]
            strip.fill_between([start, stop], line + 0.06, line + 0.94, color=colour, alpha=0.6, linewidth=0)
            left, right = (strip.transData.transform((x, 0))[0] for x in (start, stop))
            if (right - left) / strip.bbox.width > _NAMED_BAND:
                middle = strip.transData.inverted().transform(((left + right) / 2, 0))[0]
                strip.text(middle, line + 0.5, plain(kernel_label(launch), 20), ha="center", va="center", fontsize=7)


def _pieces(curve: Curve, limits: tuple[float, float]) -> list[tuple[float, float, Launch | None]]:
    """Stretches of the axis that one kernel ran on, from halfway to halfway between sizes."""
    sizes = [float(size) for size in curve.sizes]
    borders = [limits[0], *((a * b) ** 0.5 if a > 0 else (a + b) / 2 for a, b in pairwise(sizes)), limits[1]]
    pieces: list[tuple[float, float, Launch | None]] = []
    for (start, stop), point in zip(pairwise(borders), curve.points, strict=True):
        last = pieces[-1] if pieces else None
        if last is not None and _name(last[2]) == _name(point.launch):
            pieces[-1] = (last[0], stop, last[2])
        else:
            pieces.append((start, stop, point.launch))
    return pieces


def _name(launch: Launch | None) -> str | None:
    return None if launch is None else launch.kernel
