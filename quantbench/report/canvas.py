"""What all pictures share: no display, one look, one way to disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantbench.errors import StoreError
from quantbench.report.words import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 130
# Seaborn's "whitegrid" with a paler grid: intervals and edges are drawn as thin lines and must not drown in it.
_STYLE = {"grid.color": "#ebebeb", "axes.edgecolor": "#999999"}
#: what a tile edge, a wave edge, a cliff and an interval are drawn in, in every picture (Tableau's colours)
TILE_COLOUR, WAVE_COLOUR, CLIFF_COLOUR, INTERVAL_COLOUR = "tab:red", "tab:purple", "#c1272d", "0.3"
# What every font of matplotlib has beside Latin letters.
_MORE_SIGNS = "–…×·µμ→≥≤±°▼"


@contextmanager
def canvas(lines: int, columns: int, width_in: float, height_in: float, **options: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure of `lines` × `columns` panels, closed at the end. options: as of pyplot.subplots.

    Yields the figure and the array of panels (two-dimensional).
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import seaborn as sns

    with sns.axes_style("whitegrid", _STYLE):
        figure, panels = plt.subplots(
            lines, columns, figsize=(width_in, height_in), squeeze=False, layout="constrained", **options
        )
        try:
            yield figure, panels
        finally:
            plt.close(figure)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG. Raises StoreError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without matplotlib's version in it, the same figures give the same file.
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})
    except OSError as error:
        raise StoreError("write picture", f"{path} ({error.strerror})", "a folder that can be written") from None


def plain(text: str, longest: int = 90) -> str:
    """Text for a picture: on one line, without formulas (dollar signs) and without signs that the font may lack."""
    return "".join(c if (ord(c) < 0x250 or c in _MORE_SIGNS) and c != "$" else "?" for c in printable(text, longest))
