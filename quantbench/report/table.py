"""A sweep's result as a table for people and as plain objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from quantbench.analysis.explain import idle_reasons
from quantbench.analysis.steps import Step
from quantbench.analysis.summary import Row
from quantbench.device.spec import DeviceSpec
from quantbench.units import latency, percent, with_interval

_GRADE_STYLE = {"A": "green", "B": "", "C": "yellow", "D": "red", "rejected": "bold red"}
# Rows this far below the best one of the table stand out.
_STANDS_OUT = 0.8


def sweep_table(rows: Sequence[Row], steps: Sequence[Step], spec: DeviceSpec) -> Table:
    """One line per place and provider: rate, bandwidth, share of peak, trust, and what is lost and why."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    axes = list(rows[0].axes) if rows else []
    for name in axes:
        table.add_column(name.replace("_", "-"), justify="right")
    for name in ("provider", "ops"):
        table.add_column(name)
    for name in ("time", "TFLOP/s", "GB/s", "of peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("trust", no_wrap=True)
    table.add_column("steps and reasons", overflow="fold")
    best = max((row.peak_share or 0.0 for row in rows), default=0.0)
    for row in rows:
        low = row.peak_share is not None and row.peak_share < _STANDS_OUT * best
        table.add_row(
            *(str(value) for value in row.axes.values()),
            row.provider,
            " ".join(point.op for point in row.points),
            latency(row.latency_us),
            with_interval(row.tflops, row.tflops * row.half_width),
            with_interval(row.gb_per_s, row.gb_per_s * row.half_width),
            Text("?" if row.peak_share is None else percent(row.peak_share), style="bold red" if low else ""),
            Text(row.grade.letter, style=_GRADE_STYLE[row.grade.letter]),
            row_words(row, steps, spec),
        )
    return table


def row_words(row: Row, steps: Sequence[Step], spec: DeviceSpec) -> str:
    """The steps that begin at this row; without one, why its worst op is below what it could be, and its distrust."""
    said = [
        f"▼ {percent(step.drop)} in {step.after.op}: {step.cause}"
        for step in steps
        if step.after.axes == row.axes and step.after.provider == row.provider
    ]
    if not said:
        worst = row.worst
        said = [f"{worst.op}: {reason}" for reason in idle_reasons(worst.workload, spec, worst.launch)[:1]]
    if row.grade.letter not in ("A", "B"):
        said.append(row.grade.reasons[0])
    return "; ".join(said)


def rows_to_json(rows: Sequence[Row], steps: Sequence[Step], spec: DeviceSpec) -> list[dict[str, Any]]:
    """The table as JSON objects; names carry their units."""
    return [
        {
            "axes": row.axes,
            "provider": row.provider,
            "ops": [point.op for point in row.points],
            "latency_us": row.latency_us,
            "relative_half_width": row.half_width,
            "tflops": row.tflops,
            "gb_per_s": row.gb_per_s,
            "peak_share": row.peak_share,
            "grade": asdict(row.grade),
            "words": row_words(row, steps, spec),
        }
        for row in rows
    ]


def steps_to_json(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The steps as JSON objects."""
    return [
        {
            "axis": step.axis,
            "op": step.after.op,
            "provider": step.after.provider,
            "before": step.before.axes,
            "after": step.after.axes,
            "drop": step.drop,
            "low": step.low,
            "high": step.high,
            "cause": step.cause,
            "keys": [step.before.key, step.after.key],
        }
        for step in steps
    ]
