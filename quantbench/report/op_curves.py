"""The report's section "Efficiency over <axis>": for each op a picture of its curves, numbered cliffs and kernel bands.

`axis_section` makes the section of one axis; `page` calls it for every axis of the run. `draw_op` draws one picture,
`marks_of` turns cliffs into what pictures and tables show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan, log
from pathlib import Path
from typing import Any

from quantbench.analysis.cliffs import Cliff
from quantbench.analysis.curves import Curve, Family
from quantbench.analysis.periods import Period, TileOf, tile_finder
from quantbench.analysis.sawtooth import sawtooth
from quantbench.analysis.summary import Point, op_order
from quantbench.device.spec import DeviceSpec
from quantbench.errors import printable
from quantbench.launch import Launch
from quantbench.report.canvas import (
    CLIFF_COLOUR,
    MARKERS,
    PALETTE,
    canvas,
    curve_names,
    heading,
    is_wide,
    legend_below,
    limit_heights,
    plain,
    save,
    ticks_at,
    typical,
)
from quantbench.report.content import Caption, Gallery, KernelLabel, PictureCard, Section, Table, file_name
from quantbench.units import percent

#: what tells one point of a run from another: its record, its op and its place
PlaceKey = tuple[str, str, tuple[tuple[str, int], ...]]
# What a cause rests on, in words.
_TOLD_BY = {"identity": "by the kernel that ran", "arithmetic": "by arithmetic", "clock": "by the clock"}


@dataclass(frozen=True)
class Mark:
    """A cliff as pictures and tables show it.

    ratio: time after over time before, beyond the trend (1.3: 30 % more).
    low, high: 95 % interval of the ratio.
    cause: in words, with what it rests on.
    """

    axis: str
    before: Point
    after: Point
    ratio: float
    low: float
    high: float
    cause: str

    @property
    def held(self) -> dict[str, int]:
        """The other axes."""
        return {name: value for name, value in self.after.axes.items() if name != self.axis}


def place_key(point: Point) -> PlaceKey:
    """A key of the point, the same whenever the run is read."""
    return (point.key, point.op, tuple(point.axes.items()))


def marks_of(cliffs: Iterable[Cliff]) -> tuple[Mark, ...]:
    """One mark per cliff, in the order given."""
    return tuple(
        Mark(c.axis, c.before, c.after, c.ratio, c.low, c.high, f"{c.cause.words} ({_TOLD_BY[c.cause.evidence]})")
        for c in cliffs
    )


# Curves in one picture, and pictures for one axis (the ops that take most time).
_MOST_CURVES = 4
_MOST_OPS = 12
_MOST_KERNELS = 10
# A sawtooth behind more curves than this is a thicket.
_MOST_SAWTEETH = 2
# Cliffs that are numbered in one picture.
MOST_NUMBERED = 6
# Numbers nearer to each other than this share of the axis stand at different depths, so many of them.
_NUMBER_WIDTH, _MOST_STACKED = 0.045, 3
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
    caption: str,
    tile_of: Callable[[Family], TileOf],
) -> None:
    """Write a PNG of one op along one axis: points with intervals, sawtooth, cliffs, and a band of the kernels that
        ran.

    curves: of one op along one axis.
    numbered: cliffs with their number in the page's table.
    colours: colour of each kernel by name (`kernel_colours`).
    tile_of: the tiles of each family of curves, for the sawtooth.
    title, caption: see `canvas.heading`.
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
        legend_below(figure, [panel])
        if lines:
            _draw_bands(panels[1][0], banded, curve_names(curves), colours)
        panels[-1][0].set_xlabel(plain(axis.replace("_", "-")))
        heading(figure, title, caption)
        save(figure, path)


def kernel_colours(points: Sequence[Point]) -> dict[str, str]:
    """A colour for each kernel, by name, in the order of first appearance."""
    import matplotlib as mpl
    from matplotlib.colors import to_hex

    names = list(dict.fromkeys(p.launch.kernel for p in points if p.launch is not None))
    palette = PALETTE if len(names) <= len(PALETTE) else [to_hex(colour) for colour in mpl.colormaps["tab20"].colors]  # type: ignore[attr-defined]
    return {name: palette[i % len(palette)] for i, name in enumerate(names)}


def kernel_label(launch: Launch) -> str:
    """The kernel's tile where it is known, else its name."""
    return str(launch.tile) if launch.tile is not None else launch.kernel


def efficiency(point: Point) -> float:
    """Height of a point: per cent of peak, else TFLOP/s, else GB/s where there is no arithmetic."""
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
        # Of several curves the largest: small products run other tiles than the one that the steps tell.
        teeth = None
        if len(curves) - i <= _MOST_SAWTEETH:
            teeth = sawtooth(curve.points, curve.axis, spec, tile_of(curve.family))
        if teeth is not None:
            per_tflops = y[-1] / curve.points[-1].tflops
            what = "tiles" if spec.kind == "cpu" else "tiles and waves"
            label = f"{what}, computed ({teeth.tile})" if i == len(curves) - 1 else None
            rates = [per_tflops * rate for rate in teeth.tflops]
            heights += [rate for rate in rates if not isnan(rate)]
            panel.plot(teeth.sizes, rates, "--", color=colour, linewidth=0.8, alpha=0.55, zorder=2, label=label)
    return heights


def _draw_marks(panel: Any, curves: Sequence[Curve], numbered: Sequence[tuple[int, Mark]]) -> None:
    there = {place_key(point) for curve in curves for point in curve.points}
    sizes = sorted({size for curve in curves for size in curve.sizes})
    scale = log if is_wide(sizes) else float
    span = scale(sizes[-1]) - scale(sizes[0]) or 1.0
    last, depth = -1.0, 0
    for number, mark in numbered:
        if place_key(mark.after) not in there:
            continue
        x, y = mark.after.axes[mark.axis], efficiency(mark.after)
        at = (scale(x) - scale(sizes[0])) / span
        depth = (depth + 1) % _MOST_STACKED if at - last < _NUMBER_WIDTH else 0
        last = at
        panel.annotate(
            f"{number}", (x, y), xytext=(0, -17 * (1 + depth)), textcoords="offset points", ha="center", va="center",
            fontsize=8, color="white", zorder=6,
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


def axis_section(
    axis: str,
    every: Sequence[Curve],
    marks: Sequence[Mark],
    spec: DeviceSpec,
    periods: Sequence[Period],
    gallery: Gallery,
    caption: Caption,
) -> Section | None:
    """The section of one axis: a card per op, those that take most time; None where nothing varies along it.

    every: all curves along the axis.
    """
    if not every:
        return None
    name = axis.replace("_", "-")
    curves, still = _that_vary(every)
    spent: dict[str, float] = {}
    for curve in curves:
        spent[curve.op] = spent.get(curve.op, 0.0) + sum(p.latency_us * p.count for p in curve.points)
    ops = sorted(sorted(spent, key=lambda op: -spent[op])[:_MOST_OPS], key=op_order)
    note = f"the {len(ops)} of {len(spent)} ops that take most time" if len(spent) > len(ops) else ""
    if still:
        note += f"{'; ' if note else ''}{', '.join(still)}: the same product at every {name}"
    cards = [
        _op_card(axis, op, [c for c in curves if c.op == op], marks, spec, tile_finder(spec, periods), gallery, caption)
        for op in ops
    ]
    return Section(f"axis-{file_name(axis)}", f"Efficiency over {name}", note, tuple(cards))


def _that_vary(curves: Sequence[Curve]) -> tuple[list[Curve], list[str]]:
    """Curves of several products, each once where another axis makes no difference to them; and the ops that are one
    product all along the axis."""
    found: dict[tuple[str, ...], Curve] = {}
    for curve in curves:
        keys = tuple(point.key for point in curve.points)
        if len(set(keys)) > 1:
            found.setdefault((curve.op, *keys), curve)
    vary = {curve.op for curve in found.values()}
    return list(found.values()), sorted({curve.op for curve in curves} - vary, key=op_order)


def _op_card(
    axis: str,
    op: str,
    curves: Sequence[Curve],
    marks: Sequence[Mark],
    spec: DeviceSpec,
    tile_of: Callable[[Family], TileOf],
    gallery: Gallery,
    caption: Caption,
) -> PictureCard:
    drawn = typical(curves, _MOST_CURVES)
    points = [point for curve in drawn for point in curve.points]
    there = {place_key(point) for point in points}
    own = sorted((m for m in marks if m.axis == axis and place_key(m.after) in there), key=lambda m: -m.ratio)
    chosen = sorted(own[:MOST_NUMBERED], key=lambda m: m.after.axes[axis])
    numbered = list(enumerate(chosen, start=1))
    colours = kernel_colours(points)
    path = gallery.path(axis, op)
    title = f"{op} over {axis.replace('_', '-')}"
    draw_op(drawn, numbered, colours, spec, path, title=title, caption=caption(points), tile_of=tile_of)
    note = "" if len(drawn) == len(curves) else f"{len(drawn)} of {len(curves)} curves, from smaller to larger work"
    if len(own) > len(chosen):
        note += f"{'; ' if note else ''}the {len(chosen)} largest of {len(own)} cliffs are numbered"
    return PictureCard(
        "", gallery.picture(path, f"share of peak of {op} over {axis}, measured, with {len(own)} cliffs"), note,
        cliffs_table(numbered, axis), _kernels(points, colours),
    )  # fmt: skip


def cliffs_table(numbered: Sequence[tuple[int, Mark]], axis: str) -> Table | None:
    """The table that explains the numbers in a picture."""
    if not numbered:
        return None
    rows = []
    for number, mark in numbered:
        place = f"{mark.before.axes[axis]} → {mark.after.axes[axis]}"
        held = " ".join(f"{name}={value}" for name, value in mark.held.items())
        rows.append((str(number), f"{place} {held}".strip(), _cost(mark), printable(mark.cause)))
    return Table(("#", axis.replace("_", "-"), "time", "cause"), tuple(rows))


def _cost(mark: Mark) -> str:
    """`+31 % (30 % to 32 %)`."""
    return f"+{percent(mark.ratio - 1)} ({percent(mark.low - 1)} to {percent(mark.high - 1)})"


def _kernels(points: Sequence[Point], colours: dict[str, str]) -> tuple[KernelLabel, ...]:
    found = {p.launch.kernel: p.launch for p in points if p.launch is not None}
    labels = [KernelLabel(colours[name], printable(kernel_label(launch), 40), printable(name, 120))
              for name, launch in found.items()]  # fmt: skip
    if len(labels) > _MOST_KERNELS:
        more = f"{len(labels) - _MOST_KERNELS} more kernels"
        return (*labels[:_MOST_KERNELS], KernelLabel("transparent", more, more))
    return tuple(labels)
