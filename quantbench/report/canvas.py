"""Plotting helpers that the figures of a report share: style, labels, saving, panels, and which curves to plot.

Entry points: `figure` (one PNG), `draw_panels` (one panel per op), `draw_curve`; the axes' helpers `plain`, `position`,
`limit_heights`, `label_sizes`, `is_wide`; `rate` and `rate_unit`; `typical`, `curve_names`; `PALETTE`, `MARKERS`,
`CLIFF_COLOUR`, `WAVE_COLOUR`. Used by every module of this package that plots, and by `tools.guide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import log
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from quantbench.analysis.curves import Curve
from quantbench.analysis.summary import Point, Row, op_order
from quantbench.errors import StoreError, printable
from quantbench.quantization import cdiv
from quantbench.report.source import dashed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_DPI = 130
# Seaborn's "whitegrid" with a paler grid: intervals and edges are thin lines and must stand out from it.
_STYLE = {"grid.color": "#ebebeb", "axes.edgecolor": "#999999"}
#: colours of a predicted wave edge and of a cliff, in every plot
WAVE_COLOUR, CLIFF_COLOUR = "tab:purple", "#c1272d"
#: colours of curves that people with any colour vision can tell apart (Okabe and Ito, "Color Universal Design",
#: https://jfly.uni-koeln.de/color/), without its vermilion, which is too close to CLIFF_COLOUR; and their markers
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P")
# Characters per inch of a heading and of a legend; maximum number of legend entries side by side.
_LETTERS_PER_IN, _LEGEND_LETTERS_PER_IN, _MOST_BESIDE = 14, 16, 4
_MOST_TICKS = 10
# As shares of the highest point: room above it; the lowest point from which the y axis need not start at 0; and the
# smallest span of such an axis.
_ROOM_ABOVE, _IN_THE_UPPER_PART, _LEAST_REACH = 0.14, 0.6, 0.08
# Non-Latin characters that all of matplotlib's fonts have.
_MORE_SIGNS = "–…×·µμ→≥≤±°▼"
# Sizes that span more than this factor are drawn on a logarithmic axis.
_WIDE = 24.0


@contextmanager
def figure(
    path: Path,
    size_in: tuple[float, float],
    lines: int = 1,
    columns: int = 1,
    *,
    title: str = "",
    caption: str = "",
    legend: bool = True,
    **options: Any,
) -> Iterator[Any]:
    """Yields the (lines, columns) array of panels of a new figure and writes it to `path`, a PNG, on exit.

    size_in: width and height, inches.
    caption: line below the title: GPU, dtype, library and source of the data (`source.picture_caption`).
    legend: if true, one legend for all panels is put below them. Equal labels appear once.
    options: passed to pyplot.subplots.
    Raises StoreError if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns
    from cycler import cycler

    with sns.axes_style("whitegrid", _STYLE), plt.rc_context({"axes.prop_cycle": cycler(color=PALETTE)}):
        drawn, panels = plt.subplots(lines, columns, figsize=size_in, squeeze=False, layout="constrained", **options)
        try:
            yield panels
            if legend:
                _legend_below(drawn, panels.flat)
            if title:
                width = int(_LETTERS_PER_IN * size_in[0])
                below = wrap(plain(caption, 4 * width), width, break_on_hyphens=False)
                drawn.suptitle("\n".join([plain(title, width), *below]), x=0.01, ha="left", fontsize=9)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Without matplotlib's version in the file, equal data gives equal files.
            drawn.savefig(path, dpi=_DPI, metadata={"Software": None})
        except OSError as error:
            raise StoreError("write picture", f"{path} ({error.strerror})", "a folder that can be written") from None
        finally:
            plt.close(drawn)


def _legend_below(figure: Figure, panels: Iterable[Axes]) -> None:
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        width = int(_LEGEND_LETTERS_PER_IN * figure.get_figwidth())
        beside = max(1, min(_MOST_BESIDE, width // (max(map(len, entries)) + 8)))
        handles = list(entries.values())
        figure.legend(handles, list(entries), loc="outside lower left", ncols=beside, fontsize=8, frameon=False)


def plain(text: str, longest: int = 90) -> str:
    """Returns the text on one line of at most `longest` characters, with `?` for `$` and signs that fonts may lack."""
    return "".join(c if (ord(c) < 0x250 or c in _MORE_SIGNS) and c != "$" else "?" for c in printable(text, longest))


def rate(measured: Point | Row) -> float:
    """Returns the y value of a point: percent of peak if known, else TFLOP/s, else GB/s if it has no arithmetic."""
    if measured.peak_share is not None:
        return 100 * measured.peak_share
    return measured.tflops or measured.gb_per_s


def rate_unit(measured: Point | Row) -> str:
    """Returns the unit of `rate`, as a y label."""
    if measured.peak_share is not None:
        return "share of peak, %"
    return "TFLOP/s" if measured.tflops else "GB/s"


def draw_curve(
    panel: Axes, curve: Curve, number: int, name: str, line: dict[str, Any], interval: dict[str, Any]
) -> list[float]:
    """Draws the points of a curve with their 95 % intervals. Returns the y values of the points.

    number: index of the curve in its panel; selects colour and marker.
    line, interval: further matplotlib options for the curve and for its intervals.
    """
    heights = [rate(point) for point in curve.points]
    colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
    panel.plot(curve.sizes, heights, "-", marker=marker, color=colour, label=plain(name, 44), **line)
    pairs = list(zip(heights, curve.points, strict=True))
    low, high = [h * p.latency_us / p.high_us for h, p in pairs], [h * p.latency_us / p.low_us for h, p in pairs]
    panel.vlines(curve.sizes, low, high, zorder=4, **interval)
    return heights


def limit_heights(panel: Axes, heights: Sequence[float]) -> None:
    """Sets the limits of the y axis: from 0 up, with room above.

    If the lowest point is above 60 % of the highest, the axis starts a little below it, so that steps of a few percent
    are visible.
    """
    low, high = min(heights), max(heights)
    if low < _IN_THE_UPPER_PART * high:
        panel.set_ylim(0, high + _ROOM_ABOVE * high)
    else:
        reach = max(high - low, _LEAST_REACH * high)
        panel.set_ylim(max(0.0, low - 0.6 * reach), high + 0.25 * reach)


def is_wide(sizes: Sequence[int]) -> bool:
    """Returns whether the sizes need a logarithmic axis: all above 0, and spanning more than a factor of 24."""
    return min(sizes) > 0 and max(sizes) / min(sizes) > _WIDE


def label_sizes(panel: Axes, axis: str, sizes: Sequence[int]) -> None:
    """Sets name and scale of the x axis, with a tick at each size if there are at most ten."""
    if is_wide(sizes):
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if len(sizes) <= _MOST_TICKS:
        panel.set_xticks(list(sizes), [str(size) for size in sizes])
        panel.minorticks_off()
    panel.set_xlabel(plain(dashed(axis)))


def position(size: int, sizes: Sequence[int]) -> float:
    """Returns the normalized x position of `size`, 0 to 1, log-scaled if the axis is. sizes: ascending."""
    scale = log if is_wide(sizes) else float
    return (scale(size) - scale(sizes[0])) / (scale(sizes[-1]) - scale(sizes[0]) or 1.0)


_COLUMNS = 2
_WIDTH_IN, _HEIGHT_IN, _TITLE_IN = 6.4, 3.4, 0.9


def draw_panels(
    ops: Iterable[str], draw: Callable[[Axes, str], None], axis: str, path: Path, *, title: str, caption: str
) -> None:
    """Writes a PNG with one panel per op, in the usual order of ops.

    Raises StoreError if the file cannot be written.
    """
    names = sorted(set(ops), key=op_order)
    columns = min(_COLUMNS, len(names))
    lines = cdiv(len(names), columns)
    size_in = (_WIDTH_IN * columns, _HEIGHT_IN * lines + _TITLE_IN)
    with figure(path, size_in, lines, columns, title=title, caption=caption, sharex=True) as panels:
        for panel in panels.flat[len(names) :]:
            panel.set_axis_off()
        for panel, name in zip(panels.flat, names, strict=False):
            draw(panel, name)
            panel.set_title(name, loc="left", fontweight="bold")
        for panel in panels.flat[len(names) - columns : len(names)]:  # the lowest panel of each column
            panel.set_xlabel(dashed(axis))
            panel.tick_params(labelbottom=True)


def typical(curves: Sequence[Curve], most: int) -> list[Curve]:
    """Selects at most `most` curves, evenly spread from smaller to larger work.

    Curves with less than 90 % of the most points are dropped, and of the rest the smallest third by work, as far as
    `most` remain.
    """
    if len(curves) <= most:
        return list(curves)
    longest = max(len(curve.points) for curve in curves)
    full = [curve for curve in curves if len(curve.points) >= 0.9 * longest]
    full.sort(key=lambda curve: curve.points[-1].workload.flops or curve.points[-1].workload.min_bytes)
    if len(full) <= most:
        return full
    last = len(full) - 1
    # Small GEMMs are bound by launches and memory and show no steps. The step is at least 1, so that none repeats.
    first = min(last / 3, last - (most - 1))
    return [full[round(first + (last - first) * i / max(1, most - 1))] for i in range(most)]


def curve_names(curves: Sequence[Curve]) -> list[str]:
    """Returns a label per curve: its other axes, with variant and provider if they differ; else the provider."""
    names = []
    for curve in curves:
        parts = [f"{dashed(name)}={value}" for name, value in curve.held]
        if len({c.variant for c in curves}) > 1:
            parts.insert(0, curve.variant)
        if len({c.provider for c in curves}) > 1:
            parts.insert(0, curve.provider)
        names.append(" ".join(parts) or curve.provider)
    return names
