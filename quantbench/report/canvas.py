"""What all pictures share: style, labels, saving, panels side by side, and which of many curves are drawn.

`canvas` opens a figure without a display, `heading` and `legend_below` label it, `save` writes the PNG. `draw_panels`
draws one panel per op. `typical` selects curves and `curve_names` names them. Used by every module here that draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from quantbench.analysis.curves import Curve
from quantbench.analysis.summary import op_order
from quantbench.errors import StoreError, printable
from quantbench.quantization import cdiv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_DPI = 130
# Seaborn's "whitegrid" with a paler grid: intervals and edges are drawn as thin lines and must not drown in it.
_STYLE = {"grid.color": "#ebebeb", "axes.edgecolor": "#999999"}
#: what a predicted wave edge, a cliff and an interval are drawn in, in every picture
WAVE_COLOUR, CLIFF_COLOUR, INTERVAL_COLOUR = "tab:purple", "#c1272d", "0.3"
#: curves, in an order that people with any colour vision can tell apart (Okabe and Ito, "Color Universal Design",
#: https://jfly.uni-koeln.de/color/), without its vermilion, which is too near to what marks a loss; and their markers
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P")
# Letters of a heading and of a legend that fit into an inch; entries of a legend that stand beside each other.
_LETTERS_PER_IN, _LEGEND_LETTERS_PER_IN, _MOST_BESIDE = 14, 16, 4
_MOST_TICKS = 10
# Room above the highest point; when an axis need not begin at nothing, and what it then spans at least.
_ROOM_ABOVE, _IN_THE_UPPER_PART, _LEAST_REACH = 0.14, 0.6, 0.08
# What every font of matplotlib has beside Latin letters.
_MORE_SIGNS = "–…×·µμ→≥≤±°▼"


@contextmanager
def canvas(lines: int, columns: int, width_in: float, height_in: float, **options: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure of `lines` × `columns` panels, closed at the end.

    Yields the figure and the two-dimensional array of panels. options: as of pyplot.subplots.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns
    from cycler import cycler

    with sns.axes_style("whitegrid", _STYLE), plt.rc_context({"axes.prop_cycle": cycler(color=PALETTE)}):
        figure, panels = plt.subplots(
            lines, columns, figsize=(width_in, height_in), squeeze=False, layout="constrained", **options
        )
        try:
            yield figure, panels
        finally:
            plt.close(figure)


def heading(figure: Figure, title: str, caption: str) -> None:
    """Title of a picture, with the caption below it.

    caption: GPU, dtype, library and source of the figures (`source.picture_caption`).
    """
    width = int(_LETTERS_PER_IN * figure.get_figwidth())
    lines = [plain(title, width), *wrap(plain(caption, 4 * width), width, break_on_hyphens=False)]
    figure.suptitle("\n".join(filter(None, lines)), x=0.01, ha="left", fontsize=9)


def legend_below(figure: Figure, panels: Sequence[Any]) -> None:
    """One legend for all panels, below the picture so that it covers no curve. Equal labels appear once."""
    entries: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            entries.setdefault(label, handle)
    width = _LEGEND_LETTERS_PER_IN * figure.get_figwidth()
    beside = max(1, min(_MOST_BESIDE, int(width) // (max(map(len, entries), default=0) + 8)))
    if entries:
        handles = list(entries.values())
        figure.legend(handles, list(entries), loc="outside lower left", ncols=beside, fontsize=8, frameon=False)


def limit_heights(panel: Any, heights: Sequence[float]) -> None:
    """Limits of the y axis: from 0 up, with room above.

    Where all points lie in the upper part, the axis begins somewhat below the lowest, so that teeth of a few per cent
    are
    visible.
    """
    low, high = min(heights), max(heights)
    room = _ROOM_ABOVE * high
    if low < _IN_THE_UPPER_PART * high:
        panel.set_ylim(0, high + room)
    else:
        reach = max(high - low, _LEAST_REACH * high)
        panel.set_ylim(max(0.0, low - 0.6 * reach), high + 0.25 * reach)


def ticks_at(panel: Any, sizes: Sequence[int]) -> None:
    """A tick at each size along x where there are few sizes."""
    if len(sizes) <= _MOST_TICKS:
        panel.set_xticks(list(sizes), [str(size) for size in sizes])
        panel.minorticks_off()


def save(figure: Figure, path: Path) -> None:
    """Write a PNG. Raises StoreError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without matplotlib's version in it, the same figures give the same file.
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    except OSError as error:
        raise StoreError("write picture", f"{path} ({error.strerror})", "a folder that can be written") from None


def plain(text: str, longest: int = 90) -> str:
    """Text for a picture: on one line, without dollar signs (formulas) and without signs that the font may lack."""
    return "".join(c if (ord(c) < 0x250 or c in _MORE_SIGNS) and c != "$" else "?" for c in printable(text, longest))


_COLUMNS = 2
_WIDTH_IN, _HEIGHT_IN, _TITLE_IN = 6.4, 3.4, 0.9


def draw_panels(
    ops: Iterable[str], draw: Callable[[Axes, str], None], axis: str, path: Path, *, title: str, caption: str
) -> None:
    """Write a PNG with a panel per op, in the usual order of ops.

    draw: fills the panel of an op.
    axis: name of the x axis of all panels.
    title, caption: see `heading`.
    Raises StoreError where the file cannot be written.
    """
    names = sorted(set(ops), key=op_order)
    columns = min(_COLUMNS, len(names))
    lines = cdiv(len(names), columns)
    with canvas(lines, columns, _WIDTH_IN * columns, _HEIGHT_IN * lines + _TITLE_IN, sharex=True) as (figure, panels):
        for panel in panels.flat[len(names) :]:
            panel.set_axis_off()
        for panel, name in zip(panels.flat, names, strict=False):
            draw(panel, name)
            panel.set_title(name, loc="left", fontweight="bold")
        for panel in panels.flat[len(names) - columns : len(names)]:  # the lowest of each column
            panel.set_xlabel(axis.replace("_", "-"))
            panel.tick_params(labelbottom=True)
        legend_below(figure, panels.flat[: len(names)])
        heading(figure, title, caption)
        save(figure, path)


# Sizes that span more than this factor are drawn on a logarithmic axis.
_WIDE = 24.0


def typical(curves: Sequence[Curve], most: int) -> list[Curve]:
    """At most `most` of the curves.

    Where there are more, as many evenly spaced ones from smaller to larger work, out of those with most points.
    """
    if len(curves) <= most:
        return list(curves)
    longest = max(len(curve.points) for curve in curves)
    full = [curve for curve in curves if len(curve.points) >= 0.9 * longest]
    full.sort(key=lambda curve: curve.points[-1].workload.flops or curve.points[-1].workload.min_bytes)
    last = len(full) - 1
    # Small products wait for launches and memory and have no teeth to show: the lower third is left out.
    return [full[round(last * (1 / 3 + 2 / 3 * i / (most - 1)))] for i in range(most)]


def curve_names(curves: Sequence[Curve]) -> list[str]:
    """A label for each curve: what differs between the curves; the provider where there is only one curve."""
    names = []
    for curve in curves:
        parts = [f"{name.replace('_', '-')}={value}" for name, value in curve.held]
        if len({c.variant for c in curves}) > 1:
            parts.insert(0, curve.variant)
        if len({c.provider for c in curves}) > 1:
            parts.insert(0, curve.provider)
        names.append(" ".join(parts) or curve.provider)
    return names


def is_wide(sizes: Sequence[int]) -> bool:
    """Whether the sizes need a logarithmic axis."""
    return min(sizes) > 0 and max(sizes) / min(sizes) > _WIDE
