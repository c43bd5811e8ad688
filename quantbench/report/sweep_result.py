"""Presents the result of a sweep as a table, as JSON and as a plot over one axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from quantbench.analysis.check import RunCheck
from quantbench.analysis.curves import Curve, curves_of
from quantbench.analysis.explain import idle_at
from quantbench.analysis.periods import TileOf
from quantbench.analysis.summary import LayerRow, Point, op_order, points_of
from quantbench.errors import printable
from quantbench.quantization import cdiv, credible_waves, quantize
from quantbench.report.canvas import MARKERS, curve_names, figure, plain, rate, rate_unit
from quantbench.report.content import PALETTE, Table
from quantbench.report.source import picture_caption
from quantbench.report.terminal import filled, share_cell, shown
from quantbench.store.folder import Run
from quantbench.units import dashed, latency, percent, with_interval
from quantbench.workload import Gemm

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_GRADE_STYLE = {"A": "green", "B": "", "C": "yellow", "D": "red", "rejected": "bold red"}
# Maximum number of cliffs, jumps in time between neighbouring sizes, that one row shows. The
# command `check` shows all cliffs.
_MOST_CLIFFS_NAMED = 2


def sizes_table(rows: Sequence[LayerRow], check: RunCheck) -> Table:
    """Builds the table of a run, with one line per grid point and provider.

    A line has the time, the rates, the share of peak (not on a CPU), the grade and the causes of
    losses. Low shares of peak and bad grades are coloured on a terminal.

    rows: measured grid points of the run.
    check: analysis of the run, which explains the losses.
    """
    several = len({row.provider for row in rows}) > 1
    on_cpu = check.run.info.device.kind == "cpu"
    best = max((row.peak_share or 0.0 for row in rows if not row.missing), default=0.0)
    axes: dict[str, str] = {}
    for row in rows:
        axes |= dict.fromkeys(row.axes, "")
    lines = []
    for row in rows:
        cells: dict[str, str | Text] = {}
        for name, value in {**axes, **row.axes}.items():
            cells[f">{dashed(name)}"] = str(value)
        cells["provider"] = row.provider if several else ""
        cells |= _figures(row, best, on_cpu=on_cpu)
        cells["trust"] = Text(row.grade.letter, style=_GRADE_STYLE[row.grade.letter])
        cells["cliffs, or what the worst op loses"] = printable(row_words(row, check), 400)
        lines.append(cells)
    return Table(*filled(lines, optional=("provider", ">logits", ">of peak")))


def _figures(row: LayerRow, best: float, *, on_cpu: bool) -> dict[str, str | Text]:
    """Formats the number of ops, the times and the rates of a row as cells by column name.

    If some of the row's ops were not measured, only the number of ops and the time of the logits
    are shown.

    best: best share of peak in the table, 0 to 1.
    """
    count = len(row.points)
    unit = ">GFLOP/s" if on_cpu else ">TFLOP/s"
    flops = row.tflops * (1e3 if on_cpu else 1.0)
    cells: dict[str, str | Text] = {
        ">ops": str(count),
        ">time": latency(row.latency_us),
        ">logits": shown(row.logits_us, latency),
        unit: with_interval(flops, flops * row.half_width),
        ">GB/s": with_interval(row.gb_per_s, row.gb_per_s * row.half_width),
        ">of peak": share_cell(row.peak_share, best),
    }
    if row.missing:
        cells |= dict.fromkeys((">time", unit, ">GB/s"), "-")
        cells |= {">ops": f"{count} of {count + len(row.missing)}", ">of peak": ""}
    return cells


def ops_line(rows: Sequence[LayerRow]) -> str:
    """Returns a message that lists, by provider, the ops whose times a row of the table sums."""
    found: dict[str, dict[str, None]] = {}
    apart = ""
    for row in rows:
        found.setdefault(row.provider, {}).update(dict.fromkeys(row.ops))
        if row.logits:
            apart = "; logits, once per model, are not in it"
    summed = "; ".join(f"{' + '.join(ops)} ({provider})" for provider, ops in found.items())
    every = set().union(*found.values())
    if every == {"gemm"}:
        return f"a row is one product: {summed}"
    whole = "the model" if all(op.startswith("logits") for op in every) else "one layer"
    return f"a row sums, of {whole}, {summed}{apart}"


def row_words(row: LayerRow, check: RunCheck) -> str:
    """Formats the text of a row: its missing ops, and the cliffs whose larger size is this row.

    Without such cliffs, the text has the main reason why the row's worst op runs below peak.
    """
    words = []
    if row.missing:
        words.append(f"no sum, not measured here: {', '.join(row.missing)}")
    cliffs = []
    for cliff in check.cliffs:
        if cliff.after.axes == row.axes and cliff.provider == row.provider:
            slower = f"▼ +{percent(cliff.ratio - 1)} time in {cliff.op}"
            cliffs.append(f"{slower}: {cliff.cause.words}")
    words += cliffs[:_MOST_CLIFFS_NAMED]
    if len(cliffs) > _MOST_CLIFFS_NAMED:
        words.append(f"{len(cliffs) - _MOST_CLIFFS_NAMED} more")
    if not cliffs:
        # check.tile_of gives the tile that ran or was recovered from the steps. It gives the
        # assumed tile only if no steps contradict it.
        for reason in idle_at(row.worst, check.run.info.device, check.tile_of)[:1]:
            words.append(f"{row.worst.op}: {reason.words}")
    return "; ".join(words)


# Fields of a row that are known only if all its ops were measured.
_SUMS = ("latency_us", "floor_us", "tflops", "gb_per_s", "peak_share")


def rows_to_json(rows: Sequence[LayerRow], check: RunCheck) -> list[dict[str, Any]]:
    """Converts the rows of the table to JSON objects. The names of quantities include the unit.

    The summed times and the rates of a row with missing ops are null.
    """
    objects = []
    for row in rows:
        answer: dict[str, Any] = {
            "axes": row.axes,
            "provider": row.provider,
            "ops": list(row.ops),
            "missing_ops": list(row.missing),
            "logits_us": row.logits_us,
            "relative_half_width": None if row.missing else row.half_width,
        }
        for name in _SUMS:
            answer[name] = None if row.missing else getattr(row, name)
        objects.append(answer | {"grade": asdict(row.grade), "words": row_words(row, check)})
    return objects


# Maximum number of wave edges, sizes after which another wave begins, that are drawn for one curve.
# Edges at the smallest sizes are drawn, because another wave increases the time most there.
_MOST_WAVE_EDGES = 40
# Maximum number of curves in a panel with wave edges. The edges of more curves could not be
# distinguished.
_MOST_WITH_EDGES = 2
# Maximum number of panels side by side, size of a panel, and height of the title.
_COLUMNS = 2
_WIDTH_IN = 6.4
_HEIGHT_IN = 3.4
_TITLE_IN = 0.9


def draw_run(run: Run, check: RunCheck, axis: str) -> Path:
    """Draws all points of a run over an axis, with a panel for each op.

    A panel has a curve with 95 % intervals for each provider and each combination of the other
    axes' values. A dashed line in the curve's colour marks a size after which another wave begins.
    The plot is written as a PNG to the run's folder, and the file's path is returned.
    """
    points = points_of(run.records, run.info.device)
    path = run.folder / f"efficiency-{dashed(axis)}.png"
    title = f"efficiency over {dashed(axis)}: {run.info.run_id}"
    caption = picture_caption(run.info, points)
    by_op: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_op[point.op].append(point)
    columns = min(_COLUMNS, len(by_op))
    lines = cdiv(len(by_op), columns)
    size_in = (_WIDTH_IN * columns, _HEIGHT_IN * lines + _TITLE_IN)
    with figure(path, size_in, lines, columns, title=title, caption=caption) as panels:
        for panel in panels.flat[len(by_op) :]:
            panel.set_axis_off()
        for panel, name in zip(panels.flat, sorted(by_op, key=op_order), strict=False):
            _draw_op(panel, curves_of(by_op[name], axis, fewest=1), check.tile_of)
            panel.set_title(name, loc="left", fontweight="bold")
            panel.set_xlabel(dashed(axis))
    return path


def _draw_op(panel: Axes, curves: Sequence[Curve], tile_of: TileOf) -> None:
    """Draws the curves of one op with intervals, and a few curves also with wave edges.

    tile_of: function that returns the tile of a point.
    """
    for i, (curve, name) in enumerate(zip(curves, curve_names(curves), strict=True)):
        colour = PALETTE[i % len(PALETTE)]
        marker = MARKERS[i % len(MARKERS)]
        label = plain(name, 44)
        heights = np.array(list(map(rate, curve.points)))
        times_us = attrgetter("latency_us", "low_us", "high_us")
        us, low_us, high_us = np.array(list(map(times_us, curve.points))).T
        panel.plot(
            curve.sizes,
            heights,
            "-",
            marker=marker,
            color=colour,
            markersize=4,
            linewidth=1.2,
            label=label,
        )
        panel.vlines(
            curve.sizes,
            heights * us / high_us,
            heights * us / low_us,
            color="0.3",
            linewidth=0.9,
            zorder=4,
        )
        if len(curves) > _MOST_WITH_EDGES:
            continue
        legend: str | None = f"wave edge, {label}"
        for edge in wave_edges(curve, tile_of)[:_MOST_WAVE_EDGES]:
            panel.axvline(
                edge,
                color=colour,
                linestyle="--",
                linewidth=0.8,
                alpha=0.7,
                zorder=0,
                label=legend,
            )
            legend = None
    panel.set_ylim(bottom=0)
    panel.set_ylabel(rate_unit(curves[0].points[0]))


def wave_edges(curve: Curve, tile_of: TileOf) -> list[int]:
    """Returns the sizes after which a curve of GEMMs needs more waves.

    Only tiles that were recorded or recovered from the times are used, because an assumed tile has
    no support in the run. An edge is left out if the number of waves at the next size is not
    credible (`quantization.credible_waves`).

    tile_of: function that returns the tile of a point.
    """
    found = []
    for size, (before, after) in zip(curve.sizes, pairwise(curve.points), strict=False):
        used = tile_of(after)
        if used is None or used.source == "assumed" or not used.waves:
            continue
        if not isinstance(before.workload, Gemm) or not isinstance(after.workload, Gemm):
            continue
        waves = credible_waves(
            after.workload, used.tile, used.resident_blocks, used.blocks_per_sm, after.peak_share
        )
        fewer = quantize(before.workload, used.tile, used.resident_blocks)
        if waves is not None and fewer.num_waves < waves.num_waves:
            found.append(size)
    return found
