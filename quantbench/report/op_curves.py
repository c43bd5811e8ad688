"""Builds the report's sections "Efficiency over <axis>": per op a plot of curves, numbered cliffs and kernel bands.

Entry points: `axis_section`, used by `page` for every axis of the run; `cost_words`, used by `sections`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle, groupby, pairwise
from math import isnan
from typing import TYPE_CHECKING, Any

from quantbench.analysis.check import Check
from quantbench.analysis.cliffs import Cliff, CommonCliff
from quantbench.analysis.curves import Curve
from quantbench.analysis.sawtooth import sawtooth
from quantbench.analysis.summary import Point, op_order
from quantbench.errors import printable
from quantbench.launch import Launch
from quantbench.report import canvas
from quantbench.report.content import Caption, Gallery, PictureCard, Section, Table, file_name
from quantbench.report.source import dashed
from quantbench.units import latency, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Evidence for a cause, as shown in the table.
_TOLD_BY = {"identity": "by the kernel that ran", "arithmetic": "by arithmetic", "clock": "by the clock"}
# Maximum numbers of curves in one plot, of plots per axis (the ops that take most time), and of kernels in a legend.
_MOST_CURVES = 4
_MOST_OPS = 12
_MOST_KERNELS = 10
# Maximum number of curves drawn with their sawtooth: more cannot be told apart.
_MOST_SAWTEETH = 2
# Maximum number of numbered cliffs in one plot.
_MOST_NUMBERED = 6
# Numbers closer than this share of the axis are placed at different depths; number of depths.
_NUMBER_WIDTH, _MOST_STACKED = 0.045, 3
# A piece of the kernel band narrower than this share of the axis has no room for its name.
_NAMED_BAND = 0.09


def axis_section(axis: str, every: Sequence[Curve], check: Check, gallery: Gallery, caption: Caption) -> Section | None:
    """Builds an axis's section: a card for each of the 12 ops taking most time; None if `every` is empty.

    every: all curves along the axis.
    check: results of the whole run; its cliffs are numbered.
    """
    if not every:
        return None
    curves, still = _that_vary(every)
    spent: dict[str, float] = defaultdict(float)
    for curve in curves:
        spent[curve.op] += sum(p.latency_us * p.count for p in curve.points)
    ops = sorted(sorted(spent, key=lambda op: -spent[op])[:_MOST_OPS], key=op_order)
    notes = []
    if len(spent) > len(ops):
        notes.append(f"the {len(ops)} of {len(spent)} ops that take most time")
    if still:
        notes.append(f"{', '.join(still)}: the same product at every {dashed(axis)}")
    cards = [_op_card(op, [c for c in curves if c.op == op], check, gallery, caption) for op in ops]
    return Section(f"axis-{file_name(axis)}", f"Efficiency over {dashed(axis)}", "; ".join(notes), tuple(cards))


def _that_vary(curves: Sequence[Curve]) -> tuple[list[Curve], list[str]]:
    """Returns the curves along which the workload changes, without duplicates, and the ops that have none."""
    found: dict[tuple[str, ...], Curve] = {}
    for curve in curves:
        keys = tuple(point.key for point in curve.points)
        if len(set(keys)) > 1:
            found.setdefault((curve.op, *keys), curve)
    vary = {curve.op for curve in found.values()}
    return list(found.values()), sorted({curve.op for curve in curves} - vary, key=op_order)


def _op_card(op: str, curves: Sequence[Curve], check: Check, gallery: Gallery, caption: Caption) -> PictureCard:
    """Plots one op along one axis: points with intervals, sawtooth, numbered cliffs, and kernels as a band."""
    axis = curves[0].axis
    drawn = canvas.typical(curves, _MOST_CURVES)
    points = [point for curve in drawn for point in curve.points]
    there = set(map(_place_key, points))
    own = sorted((c for c in check.cliffs if c.axis == axis and _place_key(c.after) in there), key=lambda c: -c.ratio)
    numbered = sorted(own[:_MOST_NUMBERED], key=lambda cliff: cliff.next)
    launches = {p.launch.kernel: p.launch for p in points if p.launch is not None}
    colours = dict(zip(launches, cycle(_kernel_palette(len(launches))), strict=False))
    path = gallery.path(axis, op)
    banded = [curve for curve in drawn if any(p.launch is not None for p in curve.points)]
    size_in, title = (6.4, 3.9 + 0.24 * len(banded)), f"{op} over {dashed(axis)}"
    options: dict[str, Any] = {"sharex": True, "height_ratios": (1.0, 0.062 * len(banded))} if banded else {}
    with canvas.figure(path, size_in, 1 + bool(banded), title=title, caption=caption(points), **options) as panels:
        panel, lowest = panels[0][0], panels[-1][0]
        heights = _draw_curves(panel, drawn, check)
        sizes = sorted({size for curve in drawn for size in curve.sizes})
        _draw_numbers(panel, numbered, sizes)
        canvas.label_sizes(lowest, axis, sizes)
        margin = 0.03 * (sizes[-1] - sizes[0]) or 0.5
        limits = (sizes[0] / 1.1, sizes[-1] * 1.1) if canvas.is_wide(sizes) else (sizes[0] - margin, sizes[-1] + margin)
        panel.set_xlim(*limits)
        canvas.limit_heights(panel, heights)
        panel.set_ylabel(canvas.rate_unit(points[0]))
        if banded:
            _draw_bands(lowest, banded, canvas.curve_names(drawn), colours)
    notes = []
    if len(drawn) < len(curves):
        notes.append(f"{len(drawn)} of {len(curves)} curves, from smaller to larger work")
    if len(own) > len(numbered):
        notes.append(f"the {len(numbered)} largest of {len(own)} cliffs are numbered")
    kernels = [
        (colours[name], printable(_kernel_label(launch), 40), printable(name, 120)) for name, launch in launches.items()
    ]
    if len(kernels) > _MOST_KERNELS:
        more = f"{len(kernels) - _MOST_KERNELS} more kernels"
        kernels[_MOST_KERNELS:] = [("transparent", more, more)]
    return gallery.card(
        path, f"share of peak of {op} over {axis}, measured, with {len(own)} cliffs", note="; ".join(notes),
        cliffs=_cliffs_table(numbered, axis), kernels=tuple(kernels), chart=_chart(drawn, numbered),
    )  # fmt: skip


def _chart(curves: Sequence[Curve], numbered: Sequence[Cliff]) -> str:

    def row(point: Point, size: int) -> list[Any]:
        height = canvas.rate(point)
        ends = (height * point.latency_us / us for us in (point.high_us, point.low_us))
        words = [f"{dashed(curves[0].axis)} {size}: {point.workload}", latency(point.latency_us)]
        words += [f"{height:.1f} {canvas.rate_unit(point)}", point.launch.kernel if point.launch else "kernel unknown"]
        grade = point.grade
        words.append(f"grade {grade.letter}" + (f" ({grade.reasons[0]})" if grade.reasons else ""))
        return [size, height, *ends, printable(", ".join(words), 300)]

    return json.dumps(
        {
            "axis": dashed(curves[0].axis),
            "unit": canvas.rate_unit(curves[0].points[0]),
            "colours": canvas.PALETTE,
            "curves": [
                {"name": printable(name, 80), "points": list(map(row, curve.points, curve.sizes))}
                for curve, name in zip(curves, canvas.curve_names(curves), strict=True)
            ],
            "cliffs": [[cliff.next, canvas.rate(cliff.after)] for cliff in numbered],
        }
    )


def _place_key(point: Point) -> tuple[object, ...]:
    """Returns a key of the point that is the same whenever the run is read."""
    return (point.key, point.op, *point.axes.items())


def _kernel_palette(kernels: int) -> Sequence[str]:
    import matplotlib as mpl
    from matplotlib.colors import to_hex

    if kernels <= len(canvas.PALETTE):
        return canvas.PALETTE
    return [to_hex(colour) for colour in mpl.colormaps["tab20"].colors]  # type: ignore[attr-defined]


def _kernel_label(launch: Launch) -> str:
    return str(launch.tile) if launch.tile is not None else launch.kernel


def _cliffs_table(numbered: Sequence[Cliff], axis: str) -> Table | None:
    rows = []
    for number, cliff in enumerate(numbered, start=1):
        place = " ".join([f"{cliff.at} → {cliff.next}", *(f"{name}={value}" for name, value in cliff.held.items())])
        cause = f"{cliff.cause.words} ({_TOLD_BY[cliff.cause.evidence]})"
        rows.append((str(number), place, cost_words(cliff), printable(cause)))
    return Table(("#", dashed(axis), "time", "cause"), tuple(rows)) if rows else None


def cost_words(cliff: Cliff | CommonCliff) -> str:
    """Formats the extra time of a cliff with its interval: `+31 % (30 % to 32 %)`."""
    return f"+{percent(cliff.ratio - 1)} ({percent(cliff.low - 1)} to {percent(cliff.high - 1)})"


def _draw_curves(panel: Axes, curves: Sequence[Curve], check: Check) -> list[float]:
    """Draws the curves and their sawteeth. Returns the y values that must be inside the panel."""
    heights = []
    spec = check.run.info.device
    line, interval = {"markersize": 3.4, "linewidth": 1.1, "zorder": 3}, {"color": "0.25", "linewidth": 1.0}
    for i, (curve, name) in enumerate(zip(curves, canvas.curve_names(curves), strict=True)):
        y = canvas.draw_curve(panel, curve, i, name, line, interval)
        heights += y
        # Only for the last curves: small GEMMs run other tiles than the one recovered from the steps.
        teeth = None
        if len(curves) - i <= _MOST_SAWTEETH:
            teeth = sawtooth(curve.points, curve.axis, spec, check.tile_of)
        if teeth is not None:
            per_tflops = y[-1] / curve.points[-1].tflops
            what = "tiles" if spec.kind == "cpu" else "tiles and waves"
            label = f"{what}, computed ({teeth.tile})" if i == len(curves) - 1 else None
            rates = [per_tflops * tflops for tflops in teeth.tflops]
            heights += [height for height in rates if not isnan(height)]
            colour = canvas.PALETTE[i % len(canvas.PALETTE)]
            panel.plot(teeth.sizes, rates, "--", color=colour, linewidth=0.8, alpha=0.55, zorder=2, label=label)
    return heights


def _draw_numbers(panel: Axes, numbered: Sequence[Cliff], sizes: Sequence[int]) -> None:
    """Draws the number of each cliff below the point after it."""
    last, depth = -1.0, 0
    for number, cliff in enumerate(numbered, start=1):
        x, y = cliff.next, canvas.rate(cliff.after)
        at = canvas.position(x, sizes)
        depth = (depth + 1) % _MOST_STACKED if at - last < _NUMBER_WIDTH else 0
        last = at
        panel.annotate(
            f"{number}", (x, y), xytext=(0, -17 * (1 + depth)), textcoords="offset points", ha="center", va="center",
            fontsize=8, color="white", zorder=6,
            bbox={"boxstyle": "circle,pad=0.22", "facecolor": canvas.CLIFF_COLOUR, "edgecolor": "white"},
            arrowprops={"arrowstyle": "-", "color": canvas.CLIFF_COLOUR, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 1},
        )  # fmt: skip
        panel.plot([x], [y], "o", color=canvas.CLIFF_COLOUR, markersize=4.5, zorder=5)


def _draw_bands(strip: Any, curves: Sequence[Curve], names: Sequence[str], colours: dict[str, str]) -> None:
    """Draws a line in the strip for each curve: one colour per kernel, labelled with its tile or name."""
    strip.set_ylim(len(curves), 0)
    labels = [canvas.plain(name, 12) for name in names] if len(curves) == len(names) > 1 else ["kernel"] * len(curves)
    strip.set_yticks([line + 0.5 for line in range(len(curves))], labels, fontsize=7)
    strip.grid(visible=False)
    strip.tick_params(axis="x", which="both", bottom=True)
    for line, curve in enumerate(curves):
        for start, stop, launch in _pieces(curve, strip.get_xlim()):
            strip.fill_between(
                [start, stop], line + 0.06, line + 0.94, color=colours[launch.kernel], alpha=0.6, linewidth=0
            )
            left, right = (strip.transData.transform((x, 0))[0] for x in (start, stop))
            if (right - left) / strip.bbox.width > _NAMED_BAND:
                middle = strip.transData.inverted().transform(((left + right) / 2, 0))[0]
                label = canvas.plain(_kernel_label(launch), 20)
                strip.text(middle, line + 0.5, label, ha="center", va="center", fontsize=7)


def _pieces(curve: Curve, limits: tuple[float, float]) -> list[tuple[float, float, Launch]]:
    """Returns (start, stop, launch) per stretch of the axis with one kernel; borders are halfway between sizes."""
    sizes = [float(size) for size in curve.sizes]
    borders = [limits[0], *((a * b) ** 0.5 if a > 0 else (a + b) / 2 for a, b in pairwise(sizes)), limits[1]]
    pieces = []
    stretches = zip(pairwise(borders), (point.launch for point in curve.points), strict=True)
    for _, same in groupby(stretches, key=lambda stretch: stretch[1] and stretch[1].kernel):
        ((start, stop), launch), *more = same
        if launch is not None:
            pieces.append((start, more[-1][0][1] if more else stop, launch))
    return pieces
