"""Small pictures of one axis beside each other: a panel for each op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.analysis.summary import op_order
from quantbench.quantization import cdiv
from quantbench.report.canvas import canvas, heading, legend_below, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 2
_WIDTH_IN, _HEIGHT_IN, _TITLE_IN = 6.4, 3.4, 0.9


def draw_panels(
    ops: Iterable[str], draw: Callable[[Axes, str], None], axis: str, path: Path, *, title: str, caption: str
) -> None:
    """Write a PNG with a panel per op, in the usual order of ops. draw: fills the panel of an op; axis: along x in all.
    title, caption: see `canvas.heading`.

    Raises StoreError where it cannot be written.
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
