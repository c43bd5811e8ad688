"""Presents predicted times as a terminal table and as sentences, for `quantbench predict`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from quantbench.analysis.forecast import PredictedPoint
from quantbench.report.terminal import filled, plain_table, share_cell, shown
from quantbench.units import dashed, latency, percent

# Rates below this number of TFLOP/s are shown as "<0.001".
_LEAST_RATE = 0.001
# Maximum number of grid points that a sentence names. Further grid points are only counted.
_MOST_NAMED = 8
# A grid point is named if it is expected to be slower than the cost model's best kernel by at least
# this fraction.
_LEAST_SLOWER = 0.10
# A grid point is named if its time is predicted to rise by more than this fraction from m to m + 1.
_CLIFF = 0.10


def forecast_table(rows: Sequence[PredictedPoint]) -> Table:
    """Builds the terminal table of a prediction, with one line per grid point.

    A line has the time, the rate, the share of peak and details of the worst op. The table is about
    120 characters wide; on a narrower terminal, the last column is folded.
    """
    best = max((row.peak_share or 0.0 for row in rows), default=0.0)
    lines = [_cells(row, best) for row in rows]
    return plain_table(*filled(lines, optional=(">logits", ">of peak")), narrowest=20)


def _cells(row: PredictedPoint, best: float) -> dict[str, str | Text]:
    """Returns the cells of one line by column name.

    best: best share of peak in the table, 0 to 1.
    """
    cells: dict[str, str | Text] = {}
    for name, value in row.axes.items():
        cells[f">{dashed(name)}"] = str(value)
    worst = row.worst.estimate
    tile = None if worst.launch is None else worst.launch.tile
    return cells | {
        ">ops": str(len(row.summed)),
        ">time": latency(row.latency_us),
        ">low – high": f"{latency(row.low_us)} – {latency(row.high_us)}",
        ">logits": shown(row.logits_us, latency),
        ">TFLOP/s": _rate(row.tflops),
        ">of peak": share_cell(row.peak_share, best),
        "worst op": row.worst_op,
        "tile": str(tile or "?"),
        "waves": shown(worst.waves, unknown="–"),
        "bound": worst.bound,
        "what it loses": Text("".join(row.reasons[:1])),
    }


def summed_line(rows: Sequence[PredictedPoint]) -> str:
    """Returns a message that lists the ops whose times a row of the table sums.

    Returns "" if every row is a single GEMM.
    """
    ops: dict[str, None] = {}
    apart = ""
    for row in rows:
        ops.update((one.op.label, None) for one in row.summed)
        if row.logits_us is not None:
            apart = "; logits, once per model, are not in it"
    labels = list(ops)
    if labels == ["gemm"]:
        return ""
    whole = "the model" if labels[0].startswith("logits") else "one layer"
    return f"a row sums {' + '.join(labels)} of {whole}{apart}"


def _rate(tflops: float) -> str:
    """Formats a rate in TFLOP/s."""
    if tflops < _LEAST_RATE:
        return f"<{_LEAST_RATE:g}"
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def rises_in_words(rows: Sequence[PredictedPoint]) -> str:
    """Returns a sentence on the grid points whose time rises by over 10 % from m to m + 1.

    Returns "" if no rise is known.
    """
    known = False
    found = []
    for row in rows:
        rise = row.rise_at_next_m
        known = known or rise is not None
        if rise is not None and rise.share > _CLIFF:
            words = f"{percent(rise.share)}, {percent(rise.low)} to {percent(rise.high)}"
            found.append(_place(row, words))
    if found:
        return f"one row more costs over 10 % (rise, 90 % interval): {_listed(found)}"
    if known:
        return "no cliff is predicted behind these m: one row more costs at most 10 %"
    return ""


def slower_in_words(rows: Sequence[PredictedPoint]) -> str:
    """Returns a sentence on the grid points that a slow kernel makes 10 % or more slower.

    At such a grid point, similar measured GEMMs were slower than the cost model's best kernel
    (`analysis.forecast.slower_than_best_kernel`). The sentence gives likely reasons. Returns "" if
    there is no such grid point.
    """
    found = []
    for row in rows:
        if row.slower_than_best_kernel >= _LEAST_SLOWER:
            found.append(_place(row, percent(row.slower_than_best_kernel)))
    if not found:
        return ""
    words = "measured rows near these are slower than the best kernel of the cost model"
    reasons = "the library ran another or, of long ones, at a lower clock"
    return f"{words} ({reasons}): {_listed(found)}"


def _place(row: PredictedPoint, words: str) -> str:
    """Formats a grid point with words in brackets: `m = 4097 (12 %, 10 % to 14 %)`."""
    sizes = " ".join(f"{name} = {size}" for name, size in row.axes.items())
    return f"{sizes} ({words})"


def _listed(places: Sequence[str]) -> str:
    """Lists the first grid points, and counts the remaining ones."""
    unnamed = len(places) - _MOST_NAMED
    more = f" and {unnamed} more" if unnamed > 0 else ""
    return ", ".join(places[:_MOST_NAMED]) + more
