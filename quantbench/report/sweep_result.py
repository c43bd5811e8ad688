"""Shows the result of `quantbench sweep`: a table of its rows, the same as JSON, and one
picture.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table as RichTable
from rich.text import Text

from quantbench.analysis.check import RunCheck
from quantbench.analysis.curves import Curve, curves_of
from quantbench.analysis.explain import idle_at
from quantbench.analysis.periods import TileOf
from quantbench.analysis.summary import LayerRow, op_order, points_of
from quantbench.errors import printable
from quantbench.measurement import Grade
from quantbench.quantization import cdiv, credible_waves, quantize
from quantbench.report.canvas import MARKERS, curve_names, figure, plain, rate, rate_unit
from quantbench.report.content import PALETTE, Table
from quantbench.report.source import dashed, picture_caption
from quantbench.report.terminal import plain_table, share_cell
from quantbench.store.folder import Run
from quantbench.units import latency, percent, with_interval
from quantbench.workload import Gemm

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_GRADE_STYLE = {"A": "green", "B": "", "C": "yellow", "D": "red", "rejected": "bold red"}
_OF_PEAK, _TRUST = ">of peak", "trust"
# Largest cliffs shown for one row; `check` shows all of them.
_MOST_CLIFFS_SAID = 2
_FIGURES = re.compile(r"[±]?\d")
_TIGHT_PERCENT = re.compile(r"(?<=[0-9])%")


def sizes_table(rows: Sequence[LayerRow], check: RunCheck) -> Table:
    """Builds the table of rows, one line per place and provider: rates, share of peak, trust, and
    causes of losses.
    """
    axes = list(dict.fromkeys(name for row in rows for name in row.axes))
    columns: dict[str, Sequence[str]] = {
        f">{dashed(axis)}": [str(row.axes.get(axis, "")) for row in rows] for axis in axes
    }
    if len({row.provider for row in rows}) > 1:
        columns["provider"] = [row.provider for row in rows]
    columns[">ops"], columns[">time"], tflops, gb_per_s, shares = zip(
        *map(row_figures, rows), strict=True
    )
    if any(row.logits for row in rows):
        columns[">logits"] = [
            "" if row.logits_us is None else latency(row.logits_us) for row in rows
        ]
    columns |= {">TFLOP/s": tflops, ">GB/s": gb_per_s, _OF_PEAK: shares}
    columns[_TRUST] = [row.grade.letter for row in rows]
    columns["cliffs, or what the worst op loses"] = [
        printable(row_words(row, check), 400) for row in rows
    ]
    return Table(tuple(columns), tuple(zip(*columns.values(), strict=True)))


def sweep_table(rows: Sequence[LayerRow], check: RunCheck) -> RichTable:
    """Builds the same for the terminal, where low shares of peak and bad grades stand out.

    Needs about 100 columns; on narrower terminals the last column folds.
    """
    table = sizes_table(rows, check)
    best = max((row.peak_share or 0.0 for row in rows if not row.missing), default=0.0)
    lines = []
    for row, cells in zip(rows, table.rows, strict=True):
        styled = dict(zip(table.head, map(Text, cells), strict=True))
        styled[_TRUST].stylize(_GRADE_STYLE[row.grade.letter])
        if not row.missing:
            styled[_OF_PEAK] = share_cell(row.peak_share, best)
        lines.append(list(styled.values()))
    return plain_table(table.head, lines, narrowest=20)


def row_figures(row: LayerRow) -> tuple[str, str, str, str, str]:
    """Formats ops, time, TFLOP/s, GB/s and share of peak of a row; only ops if the row lacks some
    of them.
    """
    if row.missing:
        return (f"{len(row.points)} of {len(row.points) + len(row.missing)}", *("-",) * 4)
    return (
        str(len(row.points)),
        latency(row.latency_us),
        with_interval(row.tflops, row.tflops * row.half_width),
        with_interval(row.gb_per_s, row.gb_per_s * row.half_width),
        "?" if row.peak_share is None else percent(row.peak_share),
    )


def ops_line(rows: Sequence[LayerRow]) -> str:
    """Returns a message listing the ops that a row of the table sums, by provider."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        found.setdefault(row.provider, {}).update(dict.fromkeys(point.op for point in row.points))
    summed = "; ".join(f"{' + '.join(ops)} ({provider})" for provider, ops in found.items())
    if all(ops.keys() == {"gemm"} for ops in found.values()):
        return f"a row is one product: {summed}"
    layers = max(point.count for row in rows for point in row.points)
    only_logits = all(op.startswith("logits") for ops in found.values() for op in ops)
    whole = "the model" if only_logits else "one layer" if layers == 1 else f"{layers} layers"
    apart = "; logits, once per model, are not in it" if any(row.logits for row in rows) else ""
    return f"a row sums, of {whole}, {summed}{apart}"


def trust_lines(rows: Sequence[LayerRow]) -> list[str]:
    """Lists the reasons why rows are graded below B, one line per kind of reason, the most frequent
    first.
    """
    # Numbers differ from row to row: the text before the first number identifies the kind.
    kinds: dict[str, list[Grade]] = {}
    for row in rows:
        if row.grade.letter not in ("A", "B"):
            kinds.setdefault(_FIGURES.split(row.grade.reasons[0])[0], []).append(row.grade)
    return [
        # Reasons are stored; older runs have "36%" for "36 %".
        f"trust {alike[0].letter}, {len(alike)} of {len(rows)} rows: {_TIGHT_PERCENT.sub(' %', alike[0].reasons[0])}"
        for alike in sorted(kinds.values(), key=len, reverse=True)
    ]


def row_words(row: LayerRow, check: RunCheck) -> str:
    """Formats the last cell of a row: its missing ops, then the cliffs that end at it, largest
    first.

    Without a cliff, it gives the main reason why the worst op runs below peak.
    """
    said = [
        f"▼ +{percent(cliff.ratio - 1)} time in {cliff.op}: {cliff.cause.words}"
        for cliff in check.cliffs
        if cliff.after.axes == row.axes and cliff.provider == row.provider
    ]
    if not said:
        # The tile that ran or was recovered from the steps; the assumed one only if no steps
        # contradict it.
        reasons = idle_at(row.worst, check.run.info.device, check.tile_of)
        said = [f"{row.worst.op}: {reason.words}" for reason in reasons[:1]]
    if len(said) > _MOST_CLIFFS_SAID:
        said = [*said[:_MOST_CLIFFS_SAID], f"{len(said) - _MOST_CLIFFS_SAID} more"]
    lacks = [f"no sum, not measured here: {', '.join(row.missing)}"] if row.missing else []
    return "; ".join(lacks + said)


# Of a whole row.
_SUMS = ("latency_us", "floor_us", "tflops", "gb_per_s", "peak_share")


def rows_to_json(rows: Sequence[LayerRow], check: RunCheck) -> list[dict[str, Any]]:
    """Converts the table to JSON objects, with units in the names. A row with missing_ops has null
    times and rates.
    """
    return [
        {
            "axes": row.axes,
            "provider": row.provider,
            "ops": [point.op for point in row.points],
            "missing_ops": list(row.missing),
            "logits_us": row.logits_us,
            "relative_half_width": None if row.missing else row.half_width,
            **{name: None if row.missing else getattr(row, name) for name in _SUMS},
            "grade": asdict(row.grade),
            "words": row_words(row, check),
        }
        for row in rows
    ]


# Maximum number of wave edges per curve (the first ones are the large steps), and of curves drawn
# with edges, because the edges of more curves cannot be told apart.
_MOST_WAVE_EDGES, _MOST_WITH_EDGES = 40, 2
_COLUMNS = 2
_WIDTH_IN, _HEIGHT_IN, _TITLE_IN = 6.4, 3.4, 0.9


def draw_run(run: Run, check: RunCheck, axis: str) -> Path:
    """Draws all points of a run over `axis`: a panel per op. Returns the PNG's path, in the run's
    folder.

    A line per provider and value of the other axes, with 95 % intervals. Sizes after which another
    wave begins are dashed, in the colour of their curve.
    """
    points = points_of(run.records, run.info.device)
    path = run.folder / f"efficiency-{dashed(axis)}.png"
    title = f"efficiency over {dashed(axis)}: {run.info.run_id}"
    names = sorted({point.op for point in points}, key=op_order)
    columns = min(_COLUMNS, len(names))
    lines = cdiv(len(names), columns)
    size_in = (_WIDTH_IN * columns, _HEIGHT_IN * lines + _TITLE_IN)
    with figure(
        path, size_in, lines, columns, title=title, caption=picture_caption(run.info, points)
    ) as panels:
        for panel in panels.flat[len(names) :]:
            panel.set_axis_off()
        for panel, name in zip(panels.flat, names, strict=False):
            curves = curves_of([point for point in points if point.op == name], axis, fewest=1)
            _draw_op(panel, curves, check.tile_of)
            panel.set_title(name, loc="left", fontweight="bold")
            panel.set_xlabel(dashed(axis))
    return path


def _draw_op(panel: Axes, curves: Sequence[Curve], tile_of: TileOf) -> None:
    for i, (curve, name) in enumerate(zip(curves, curve_names(curves), strict=True)):
        colour = PALETTE[i % len(PALETTE)]
        marker = MARKERS[i % len(MARKERS)]
        label = plain(name, 44)
        heights = np.array([rate(point) for point in curve.points])
        us, low_us, high_us = np.array(
            [(p.latency_us, p.low_us, p.high_us) for p in curve.points]
        ).T
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
        edges = (
            wave_edges(curve, tile_of)[:_MOST_WAVE_EDGES] if len(curves) <= _MOST_WITH_EDGES else ()
        )
        for number, edge in enumerate(edges):
            said = f"wave edge, {label}" if number == 0 else None
            panel.axvline(
                edge, color=colour, linestyle="--", linewidth=0.8, alpha=0.7, zorder=0, label=said
            )
    panel.set_ylim(bottom=0)
    panel.set_ylabel(rate_unit(curves[0].points[0]))


def wave_edges(curve: Curve, tile_of: TileOf) -> list[int]:
    """Returns the sizes after which a curve of GEMMs needs another wave of a recorded or recovered
    tile.

    Assumed tiles give no edges, because nothing in the run supports them, and neither do waves that
    are not credible at the size after the edge (`quantization.credible_waves`).
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
        if (
            waves is not None
            and quantize(before.workload, used.tile, used.resident_blocks).num_waves
            < waves.num_waves
        ):
            found.append(size)
    return found
