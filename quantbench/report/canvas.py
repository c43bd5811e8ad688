"""Creates matplotlib figures in a common style, and selects, labels and scales plotted curves.

`figure` writes a figure as PNG. `rate` is the plotted quantity, for the HTML report's charts too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from quantbench.analysis.curves import Curve
from quantbench.analysis.summary import LayerRow, Point, useful_work
from quantbench.errors import StoreError, printable
from quantbench.report.content import PALETTE
from quantbench.units import axis_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_DPI = 130
# Seaborn's "whitegrid" with a paler grid: intervals and edges are thin lines and must stand out
# from the grid.
_STYLE = {"grid.color": "#ebebeb", "axes.edgecolor": "#999999"}
#: colour of a cliff, in every plot
CLIFF_COLOUR = "#c1272d"
MARKERS = ("o", "s", "^", "D", "v", "P")
# Characters per inch of a heading.
_LETTERS_PER_IN = 14
# Characters per inch of a legend.
_LEGEND_LETTERS_PER_IN = 16
# Maximum number of legend entries side by side.
_MOST_BESIDE = 4
# Non-Latin characters that all of matplotlib's fonts have.
_MORE_SIGNS = "–…×·µμ→≥≤±°▼"


@contextmanager
def figure(
    target: Path | BytesIO,
    size_in: tuple[float, float],
    lines: int = 1,
    columns: int = 1,
    *,
    title: str,
    caption: str,
    **options: Any,
) -> Iterator[Any]:
    """Yields the panels of a new figure, (lines, columns), and writes the figure as a PNG on exit.

    target: file or buffer to write to.
    size_in: width and height in inches.
    lines, columns: number of panels down and across.
    caption: line below the title, which names GPU, dtype, library and source of the data.
    options: further keyword arguments of pyplot.subplots.

    Raises StoreError if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns
    from cycler import cycler

    with (
        sns.axes_style("whitegrid", _STYLE),
        plt.rc_context({"axes.prop_cycle": cycler(color=PALETTE)}),
    ):
        drawn, panels = plt.subplots(
            lines, columns, figsize=size_in, squeeze=False, layout="constrained", **options
        )
        try:
            yield panels
            _legend_below(drawn, panels.flat)
            width = int(_LETTERS_PER_IN * size_in[0])
            # The caption has at most about four lines.
            below = wrap(plain(caption, 4 * width), width, break_on_hyphens=False)
            drawn.suptitle("\n".join([plain(title, width), *below]), x=0.01, ha="left", fontsize=9)
            # The file omits matplotlib's version, so that equal data gives equal files.
            drawn.savefig(target, dpi=_DPI, metadata={"Software": None})
        except OSError as error:
            raise StoreError(
                "write picture", f"{target} ({error.strerror})", "a folder that can be written"
            ) from None
        finally:
            plt.close(drawn)


def _legend_below(figure: Figure, panels: Iterable[Axes]) -> None:
    """Adds one legend below all panels, in which each label occurs once."""
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        width = int(_LEGEND_LETTERS_PER_IN * figure.get_figwidth())
        # An entry also has a marker and a gap, together as wide as 8 letters.
        beside = max(1, min(_MOST_BESIDE, width // (max(map(len, entries)) + 8)))
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="outside lower left",
            ncols=beside,
            fontsize=8,
            frameon=False,
        )


def plain(text: str, longest: int = 90) -> str:
    """Returns a text that matplotlib can draw, on one line of at most `longest` characters.

    `$` and characters that fonts may lack become `?`.
    """
    return "".join(
        c if (ord(c) < 0x250 or c in _MORE_SIGNS) and c != "$" else "?"
        for c in printable(text, longest)
    )


def rate(measured: Point | LayerRow) -> float:
    """Returns the rate of a point as plots show it, in the unit that `rate_unit` returns.

    The rate is the share of the device's peak in % if the peak is known. Otherwise the rate is in
    GFLOP/s, or in GB/s for a point without arithmetic.
    """
    if measured.peak_share is not None:
        return 100 * measured.peak_share
    return 1000 * measured.tflops or measured.gb_per_s


def rate_unit(measured: Point | LayerRow) -> str:
    """Returns the unit of `rate` for a point, as the label of the y axis."""
    if measured.peak_share is not None:
        return "share of peak, %"
    return "GFLOP/s" if measured.tflops else "GB/s"


def typical(curves: Sequence[Curve], most: int) -> list[Curve]:
    """Selects at most `most` curves, evenly spread from smaller to larger work.

    If there are at most `most` curves, all are returned. Otherwise, candidates are the curves with
    at least 90 % as many points as the longest curve. The third of the candidates with the least
    work is skipped, or less than a third if fewer than `most` candidates would remain.
    """
    if len(curves) <= most:
        return list(curves)
    longest = max(len(curve.points) for curve in curves)
    full = [curve for curve in curves if len(curve.points) >= 0.9 * longest]
    full.sort(key=lambda curve: useful_work(curve.points[-1].workload))
    if len(full) <= most:
        return full
    last = len(full) - 1
    # The third with the least work is skipped, because small GEMMs are bound by launches and memory
    # and show no steps. The stride is at least one index, so that no curve repeats.
    first = min(last / 3, last - (most - 1))
    return [full[round(first + (last - first) * i / max(1, most - 1))] for i in range(most)]


def curve_names(curves: Sequence[Curve]) -> list[str]:
    """Returns a label for each curve.

    A label has the values of the axes that are constant along the curve. Provider and variant are
    added if the curves differ in them. A label without any of these is the provider.
    """
    names = []
    variants = {curve.variant for curve in curves}
    providers = {curve.provider for curve in curves}
    for curve in curves:
        parts = axis_words(dict(curve.held))
        if len(variants) > 1:
            parts.insert(0, curve.variant)
        if len(providers) > 1:
            parts.insert(0, curve.provider)
        names.append(" ".join(parts) or curve.provider)
    return names
