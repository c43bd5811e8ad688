"""Shows a prediction of `quantbench predict` as a table and in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from quantbench.analysis.forecast import PredictedPlace
from quantbench.report.source import dashed
from quantbench.report.terminal import plain_table, share_cell
from quantbench.units import latency, percent

# TFLOP/s below which only "<0.001" is shown.
_LEAST_RATE = 0.001
# Maximum number of places named; the rest is counted.
_MOST_LIKELY = 8
# Smallest share by which a place is named as measured slower.
_LEAST_SLOWER = 0.10
# Smallest predicted rise from m to m + 1 that is named.
_CLIFF = 0.10


def forecast_table(rows: Sequence[PredictedPlace]) -> Table:
    """Builds the terminal table, one line per place: time, rate, share of peak, and details of its
    worst op.

    Needs about 120 columns; on narrower terminals the last column folds.
    """
    best = max((row.peak_share or 0.0 for row in rows), default=0.0)
    worst = [next(op for op in row.ops if op.op == row.worst_op) for row in rows]
    logits = ["" if row.logits_us is None else latency(row.logits_us) for row in rows]
    columns: dict[str, Sequence[str | Text]] = {
        **{f">{dashed(name)}": [str(row.axes[name]) for row in rows] for name in rows[0].axes},
        ">ops": [str(len(row.summed)) for row in rows],
        ">time": [latency(row.latency_us) for row in rows],
        ">low – high": [f"{latency(row.low_us)} – {latency(row.high_us)}" for row in rows],
        **({">logits": logits} if any(logits) else {}),
        ">TFLOP/s": [_rate(row.tflops) for row in rows],
        ">of peak": [share_cell(row.peak_share, best) for row in rows],
        "worst op": [row.worst_op for row in rows],
        "tile": ["?" if one.tile is None else str(one.tile) for one in worst],
        "waves": ["–" if one.waves is None else str(one.waves) for one in worst],
        "bound": [one.bound for one in worst],
        "what it loses": [Text(row.reasons[0] if row.reasons else "") for row in rows],
    }
    return plain_table(columns, narrowest=20)


def summed_line(rows: Sequence[PredictedPlace]) -> str:
    """Returns a message listing the ops that a row of the table sums; empty for single GEMMs."""
    labels = list(dict.fromkeys(one.op.label for row in rows for one in row.summed))
    if labels == ["gemm"]:
        return ""
    apart = (
        "; logits, once per model, are not in it"
        if any(row.logits_us is not None for row in rows)
        else ""
    )
    whole = "the model" if labels[0].startswith("logits") else "one layer"
    return f"a row sums {' + '.join(labels)} of {whole}{apart}"


def _rate(tflops: float) -> str:
    if tflops < _LEAST_RATE:
        return f"<{_LEAST_RATE:g}"
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def rises_in_words(rows: Sequence[PredictedPlace]) -> str:
    """Names the places where one more row (m + 1) is predicted to cost over 10 %."""
    known = [(row, row.rise_at_next_m) for row in rows if row.rise_at_next_m is not None]
    if not known:
        return ""
    found = [
        (row, f"{percent(rise.share)}, {percent(rise.low)} to {percent(rise.high)}")
        for row, rise in known
        if rise.share > _CLIFF
    ]
    if not found:
        return "no cliff is predicted behind these m: one row more costs at most 10 %"
    return f"one row more costs over 10 % (rise, 90 % interval): {_places(found)}"


def slower_in_words(rows: Sequence[PredictedPlace]) -> str:
    """Names the places near which products were measured slower than the best kernel would be, with
    likely reasons.
    """
    shares = ((row, row.slower_than_best_kernel) for row in rows)
    found = [(row, percent(share)) for row, share in shares if share >= _LEAST_SLOWER]
    words = "measured rows near these are slower than the best kernel of the cost model"
    return (
        f"{words} (the library ran another or, of long ones, at a lower clock): {_places(found)}"
        if found
        else ""
    )


def _places(found: Sequence[tuple[PredictedPlace, str]]) -> str:
    shown = [
        f"{' '.join(f'{name} = {size}' for name, size in row.axes.items())} ({words})"
        for row, words in found
    ]
    unnamed = len(shown) - _MOST_LIKELY
    return ", ".join(shown[:_MOST_LIKELY]) + (f" and {unnamed} more" if unnamed > 0 else "")
