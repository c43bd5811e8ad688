"""Shows a prediction of `quantbench predict` as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from quantbench.analysis.forecast import PredictedPlace, Rise
from quantbench.device.spec import DeviceSpec
from quantbench.latency.op_times import OpEstimate, peak_share
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
    """Builds the terminal table, one line per place: time, rate, share of peak, and details of its worst op.

    Needs about 120 columns; on narrower terminals the last column folds.
    """
    best = max((row.peak_share or 0.0 for row in rows), default=0.0)
    sums, worst = [row.estimate for row in rows], [row.worst.estimate for row in rows]
    tiles = [None if one.launch is None else one.launch.tile for one in worst]
    logits = ["" if row.logits is None else latency(row.logits.latency_us) for row in rows]
    columns: dict[str, Sequence[str | Text]] = {
        **{f">{dashed(name)}": [str(row.axes[name]) for row in rows] for name in rows[0].axes},
        ">ops": [str(len(one.ops)) for one in sums],
        ">time": [latency(one.latency_us) for one in sums],
        ">low – high": [f"{latency(one.low_us)} – {latency(one.high_us)}" for one in sums],
        **({">logits": logits} if any(logits) else {}),
        ">TFLOP/s": [_rate(one.tflops) for one in sums],
        ">of peak": [share_cell(row.peak_share, best) for row in rows],
        "worst op": [row.worst.op.label for row in rows],
        "tile": ["?" if tile is None else str(tile) for tile in tiles],
        "waves": ["–" if one.waves is None else str(one.waves) for one in worst],
        "bound": [one.bound for one in worst],
        "what it loses": [Text(row.reasons[0] if row.reasons else "") for row in rows],
    }
    return plain_table(columns, narrowest=20)


def summed_line(rows: Sequence[PredictedPlace]) -> str:
    """Returns a message listing the ops that a row of the table sums; empty for single GEMMs."""
    labels = list(dict.fromkeys(o.op.label for row in rows for o in row.estimate.ops))
    if labels == ["gemm"]:
        return ""
    apart = "; logits, once per model, are not in it" if any(row.logits is not None for row in rows) else ""
    whole = "the model" if labels[0].startswith("logits") else "one layer"
    return f"a row sums {' + '.join(labels)} of {whole}{apart}"


def _rate(tflops: float) -> str:
    if tflops < _LEAST_RATE:
        return f"<{_LEAST_RATE:g}"
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def rises_in_words(rows: Sequence[PredictedPlace], rises: Sequence[Rise | None]) -> str:
    """Names the places where one more row (m + 1) is predicted to cost over 10 %. rises: of `rises_at_next_m`."""
    if all(rise is None for rise in rises):
        return ""
    found = [
        (row, f"{percent(rise.share)}, {percent(rise.low)} to {percent(rise.high)}")
        for row, rise in zip(rows, rises, strict=True)
        if rise is not None and rise.share > _CLIFF
    ]
    if not found:
        return "no cliff is predicted behind these m: one row more costs at most 10 %"
    return f"one row more costs over 10 % (rise, 90 % interval): {_places(found)}"


def slower_in_words(rows: Sequence[PredictedPlace], slower: Sequence[float]) -> str:
    """Names the places near which products were measured slower than the best kernel would be, with likely reasons.

    slower: as of `analysis.forecast.slower_than_best_kernel`.
    """
    found = [(row, percent(share)) for row, share in zip(rows, slower, strict=True) if share >= _LEAST_SLOWER]
    words = "measured rows near these are slower than the best kernel of the cost model"
    return f"{words} (the library ran another or, of long ones, at a lower clock): {_places(found)}" if found else ""


def _places(found: Sequence[tuple[PredictedPlace, str]]) -> str:
    shown = [f"{' '.join(f'{name} = {size}' for name, size in row.axes.items())} ({words})" for row, words in found]
    unnamed = len(shown) - _MOST_LIKELY
    return ", ".join(shown[:_MOST_LIKELY]) + (f" and {unnamed} more" if unnamed > 0 else "")


def forecast_to_json(
    rows: Sequence[PredictedPlace], spec: DeviceSpec, rises: Sequence[Rise | None], slower: Sequence[float]
) -> list[dict[str, Any]]:
    """Converts the table and its ops to JSON objects, with units in the names. rises, slower: see `rises_in_words` and
    `slower_in_words`."""
    return [
        {
            "axes": row.axes,
            **{name: getattr(row.estimate, name) for name in ("latency_us", "low_us", "high_us", "tflops")},
            "logits_us": None if row.logits is None else row.logits.latency_us,
            "peak_share": row.peak_share,
            "worst_op": row.worst.op.label,
            "reasons": list(row.reasons),
            "rise_at_next_m": None if rise is None else asdict(rise),
            "slower_than_best_kernel": share,
            "ops": [_op_to_json(op, spec) for op in row.ops],
        }
        for row, rise, share in zip(rows, rises, slower, strict=True)
    ]


def _op_to_json(op: OpEstimate, spec: DeviceSpec) -> dict[str, Any]:
    launch = op.estimate.launch
    tile = None if launch is None else launch.tile
    names = ("latency_us", "low_us", "high_us", "source", "bound", "waves")
    return {
        "op": op.op.label,
        "count": op.op.count,
        "workload": str(op.op.workload),
        **{name: getattr(op.estimate, name) for name in names},
        "peak_share": peak_share(op.op.workload, op.estimate.latency_us, spec),
        "tile": None if tile is None else [tile.block_m, tile.block_n],
        "split_k": None if tile is None else tile.split_k,
    }
