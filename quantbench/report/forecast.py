"""Presents the predicted times of sizes as a table and in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from quantbench.analysis.forecast import PredictedPlace
from quantbench.report.terminal import filled, plain_table, share_cell, shown
from quantbench.units import dashed, latency, percent

# Rates below this number of TFLOP/s are shown as "<0.001".
_LEAST_RATE = 0.001
# Maximum number of places that a sentence names. Further places are only counted.
_MOST_NAMED = 8
# A place is named if it is expected to lose at least this fraction of its time against the best
# kernel.
_LEAST_SLOWER = 0.10
# A place is named if its time is predicted to rise by more than this fraction from m to m + 1.
_CLIFF = 0.10


def forecast_table(rows: Sequence[PredictedPlace]) -> Table:
    """Builds the terminal table of a prediction, with one line per place.

    A line has the time, the rate, the share of peak and details of the worst op. The table needs
    about 120 columns; on a narrower terminal the last column is folded.
    """
    best = max((row.peak_share or 0.0 for row in rows), default=0.0)
    lines = [_cells(row, best) for row in rows]
    return plain_table(*filled(lines, optional=(">logits", ">of peak")), narrowest=20)


def _cells(row: PredictedPlace, best: float) -> dict[str, str | Text]:
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


def summed_line(rows: Sequence[PredictedPlace]) -> str:
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


def rises_in_words(rows: Sequence[PredictedPlace]) -> str:
    """Returns a sentence on the places where one more row (m + 1) is predicted to cost over 10 %.

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


def slower_in_words(rows: Sequence[PredictedPlace]) -> str:
    """Returns a sentence on the places that lose 10 % or more of their time to a slow kernel.

    At such a place, similar measured GEMMs were slower than the best kernel of the cost model (see
    `analysis.forecast.slower_than_best_kernel`). The sentence states likely reasons. Returns "" if
    there is no such place.
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


def _place(row: PredictedPlace, words: str) -> str:
    """Formats a place with words in brackets: `m = 4097 (12 %, 10 % to 14 %)`."""
    sizes = " ".join(f"{name} = {size}" for name, size in row.axes.items())
    return f"{sizes} ({words})"


def _listed(places: Sequence[str]) -> str:
    """Lists the first places, and counts the others."""
    unnamed = len(places) - _MOST_NAMED
    more = f" and {unnamed} more" if unnamed > 0 else ""
    return ", ".join(places[:_MOST_NAMED]) + more
