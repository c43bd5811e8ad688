"""A sweep's result as a table for people and as plain objects for programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from quantbench.analysis.check import Check
from quantbench.analysis.explain import idle_reasons
from quantbench.analysis.summary import Point, Row
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Launch
from quantbench.measurement import Grade
from quantbench.units import latency, percent, with_interval
from quantbench.workload import Gemm

_GRADE_STYLE = {"A": "green", "B": "", "C": "yellow", "D": "red", "rejected": "bold red"}
# Rows this far below the best one of the table stand out.
_STANDS_OUT = 0.8
# Of several cliffs at one place the largest are told; `check` tells them all.
_MOST_CLIFFS_SAID = 2
_FIGURES = re.compile(r"[±]?\d")
_TIGHT_PERCENT = re.compile(r"(?<=[0-9])%")


def sweep_table(rows: Sequence[Row], check: Check, spec: DeviceSpec) -> Table:
    """One line per place and provider: rate, bandwidth, share of peak, trust, and what is lost and why.

    Wants about 100 columns; narrower, the last column folds.
    """
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in rows[0].axes:
        table.add_column(name.replace("_", "-"), justify="right", no_wrap=True)
    several = len({row.provider for row in rows}) > 1
    if several:
        table.add_column("provider", no_wrap=True)
    table.add_column("ops", justify="right", no_wrap=True)
    logits = any(row.logits for row in rows)
    for name in ("time", *(("logits",) if logits else ()), "TFLOP/s", "GB/s", "of peak"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("trust", no_wrap=True)
    table.add_column("cliffs, or what the worst op loses", overflow="fold", min_width=20)
    best = max((row.peak_share or 0.0 for row in rows), default=0.0)
    for row in rows:
        low = row.peak_share is not None and row.peak_share < _STANDS_OUT * best
        table.add_row(
            *(str(value) for value in row.axes.values()),
            *([row.provider] if several else []),
            str(len(row.points)),
            latency(row.latency_us),
            *([latency(row.logits_us) if row.logits_us is not None else ""] if logits else []),
            with_interval(row.tflops, row.tflops * row.half_width),
            with_interval(row.gb_per_s, row.gb_per_s * row.half_width),
            Text("?" if row.peak_share is None else percent(row.peak_share), style="bold red" if low else ""),
            Text(row.grade.letter, style=_GRADE_STYLE[row.grade.letter]),
            Text(row_words(row, check, spec)),
        )
    return table


def ops_line(rows: Sequence[Row]) -> str:
    """What a row of the table sums: the ops of each provider, by name."""
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


def trust_lines(rows: Sequence[Row]) -> list[str]:
    """Why rows below B are there, one line per kind of reason, the most frequent first."""
    # Figures differ from row to row: what stands before the first of them tells the kind.
    kinds: dict[str, list[Grade]] = {}
    for row in rows:
        if row.grade.letter not in ("A", "B"):
            kinds.setdefault(_FIGURES.split(row.grade.reasons[0])[0], []).append(row.grade)
    return [
        # the reasons are stored, in older runs with 36% where it is 36 % everywhere else
        f"trust {alike[0].letter}, {len(alike)} of {len(rows)} rows: {_TIGHT_PERCENT.sub(' %', alike[0].reasons[0])}"
        for alike in sorted(kinds.values(), key=len, reverse=True)
    ]


def row_words(row: Row, check: Check, spec: DeviceSpec) -> str:
    """The cliffs that end at this row (how much longer it takes than the size before it, and why), the largest first;
    without one, why its worst op is below what it could be."""
    said = [
        f"▼ +{percent(cliff.ratio - 1)} time in {cliff.op}: {cliff.cause.words}"
        for cliff in check.cliffs
        if cliff.after.axes == row.axes and cliff.provider == row.provider
    ]
    if not said:
        worst = row.worst
        said = [f"{worst.op}: {reason}" for reason in _idle(worst, check, spec)[:1]]
    if len(said) > _MOST_CLIFFS_SAID:
        said = [*said[:_MOST_CLIFFS_SAID], f"{len(said) - _MOST_CLIFFS_SAID} more"]
    return "; ".join(said)


def _idle(point: Point, check: Check, spec: DeviceSpec) -> tuple[str, ...]:
    """What tiles and waves cost a point, by the tile that ran or that the steps tell; by the one assumed for the device
    only where no steps speak against it."""
    used = check.tile_of(point)
    launch = point.launch
    if used is not None and used.source == "steps" and isinstance(point.workload, Gemm):
        per_sm = max(1, used.resident_blocks // spec.sm_count)
        launch = Launch(used.words, tile=used.tile, blocks_per_sm=per_sm)
    return idle_reasons(point.workload, spec, launch, assume=used is not None)


def rows_to_json(rows: Sequence[Row], check: Check, spec: DeviceSpec) -> list[dict[str, Any]]:
    """The table as JSON objects; names carry their units."""
    return [
        {
            "axes": row.axes,
            "provider": row.provider,
            "ops": [point.op for point in row.points],
            "latency_us": row.latency_us,
            "logits_us": row.logits_us,
            "relative_half_width": row.half_width,
            "tflops": row.tflops,
            "gb_per_s": row.gb_per_s,
            "peak_share": row.peak_share,
            "grade": asdict(row.grade),
            "words": row_words(row, check, spec),
        }
        for row in rows
    ]
