"""A sweep's result as a table for people and as plain objects for programs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from quantbench.analysis.check import Check
from quantbench.analysis.cliffs import Cliff
from quantbench.analysis.explain import idle_reasons
from quantbench.analysis.summary import Point, Row
from quantbench.device.spec import DeviceSpec
from quantbench.measurement import Grade
from quantbench.units import latency, percent, with_interval

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
    best = max((row.peak_share or 0.0 for row in rows if not row.missing), default=0.0)
    for row in rows:
        low = row.peak_share is not None and not row.missing and row.peak_share < _STANDS_OUT * best
        *figures, share = row_figures(row)
        table.add_row(
            *(str(value) for value in row.axes.values()),
            *([row.provider] if several else []),
            *figures[:2],
            *([latency(row.logits_us) if row.logits_us is not None else ""] if logits else []),
            *figures[2:],
            Text(share, style="bold red" if low else ""),
            Text(row.grade.letter, style=_GRADE_STYLE[row.grade.letter]),
            Text(row_words(row, check, spec)),
        )
    return table


def row_figures(row: Row) -> tuple[str, str, str, str, str]:
    """Ops, time, TFLOP/s, GB/s and share of peak of a row, as the tables show them. A row that lacks ops has no sum."""
    if row.missing:
        return (f"{len(row.points)} of {len(row.points) + len(row.missing)}", *("-",) * 4)
    return (
        str(len(row.points)),
        latency(row.latency_us),
        with_interval(row.tflops, row.tflops * row.half_width),
        with_interval(row.gb_per_s, row.gb_per_s * row.half_width),
        "?" if row.peak_share is None else percent(row.peak_share),
    )


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
    without one, why its worst op is below what it could be. First of all, which ops it lacks."""
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
    lacks = [f"no sum, not measured here: {', '.join(row.missing)}"] if row.missing else []
    return "; ".join(lacks + said)


def _idle(point: Point, check: Check, spec: DeviceSpec) -> tuple[str, ...]:
    """What tiles and waves cost a point, by the tile that ran or that the steps tell; by the one assumed for the device
    only where no steps speak against it."""
    return idle_reasons(point.workload, spec, check.tile_of(point), point.peak_share)


def rows_to_json(rows: Sequence[Row], check: Check, spec: DeviceSpec) -> list[dict[str, Any]]:
    """The table as JSON objects; names carry their units. A row that lacks ops (missing_ops) has no figures."""
    return [
        {
            "axes": row.axes,
            "provider": row.provider,
            "ops": [point.op for point in row.points],
            "missing_ops": list(row.missing),
            "latency_us": None if row.missing else row.latency_us,
            "logits_us": row.logits_us,
            "relative_half_width": None if row.missing else row.half_width,
            "tflops": None if row.missing else row.tflops,
            "gb_per_s": None if row.missing else row.gb_per_s,
            "peak_share": None if row.missing else row.peak_share,
            "grade": asdict(row.grade),
            "words": row_words(row, check, spec),
        }
        for row in rows
    ]


def cliff_to_json(cliff: Cliff) -> dict[str, Any]:
    """One jump of the time; `ratio` with the trend taken out, `rate_ratio` as a person sees it."""
    return {
        "axis": cliff.axis, "at": cliff.at, "next": cliff.next, "ratio": cliff.ratio, "low": cliff.low,
        "high": cliff.high, "cause": cliff.cause.kind, "why": cliff.cause.words, "evidence": cliff.cause.evidence,
        "op": cliff.op, "provider": cliff.provider, "variant": cliff.variant, "held": dict(cliff.held),
        "first": cliff.first, "last": cliff.last, "rate_ratio": cliff.rate_ratio,
        "keys": [cliff.before.key, cliff.after.key],
    }  # fmt: skip
