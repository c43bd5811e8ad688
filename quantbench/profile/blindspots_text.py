"""Blind spots as objects, as lines for people and as the table of docs/exporting.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quantbench.profile.blindspots import FloatArray
from quantbench.profile.blindspots_replay import Errors, Line, Replay
from quantbench.profile.blindspots_table import Blindspots, Spot
from quantbench.units import latency, percent

_COLUMNS = ("rows of the table", "rows", "rows in none of the tables", "of them m ≥ 128 and n, k ≥ 1024",
            "both sides of measured cliffs")  # fmt: skip


def summary(errors: FloatArray) -> dict[str, float]:
    """Median, 95th percentile and largest of |error|, as ratios; zeros where there is no place to be wrong."""
    if not len(errors):
        return {"median": 0.0, "p95": 0.0, "max": 0.0}
    middle, p95 = np.percentile(errors, [50, 95])
    return {"median": float(middle), "p95": float(p95), "max": float(errors.max())}


def found_to_json(found: Blindspots, bound: float, target: str, most_spots: int) -> dict[str, Any]:
    """What was found in a table, and what to add."""
    return {
        "dtype": found.dtype,
        "rows": found.num_rows,
        "places": len(found.choice.before),
        "model_rows": found.model_rows,
        "bound": bound,
        "target": target,
        "before": summary(found.choice.before),
        "after": summary(found.choice.after),
        "add": [{"m": m, "n": n, "k": k} for m, n, k in found.choice.rows],
        "spots": [
            {"m": s.m, "n": s.n, "k": s.k, "between": [s.low, s.high], "interpolated_us": s.interpolated_us,
             "expected_us": s.expected_us, "error": s.error}
            for s in found.spots[:most_spots]
        ],
    }  # fmt: skip


def spot_line(spot: Spot) -> str:
    """One blind spot in words."""
    off = f"{percent(abs(spot.error))} too {'low' if spot.error < 0 else 'high'}"
    said = f"{latency(spot.interpolated_us)} between m = {spot.low} and {spot.high}"
    return f"m = {spot.m}, n = {spot.n}, k = {spot.k}: {said}, expected {latency(spot.expected_us)}: {off}"


def replay_to_json(found: Replay, consumer: str) -> dict[str, Any]:
    """The experiment's figures, errors in percent."""
    return {
        "consumer": consumer,
        "bound_pct": 100 * found.bound,
        "rows": found.total_rows,
        "added": found.added,
        "model_rows": found.model_rows,
        "tables": [
            {"name": line.name, "rows": line.rows,
             **{part: vars(getattr(line, part)) for part in ("unseen", "large", "at_cliffs")}}
            for line in found.lines
        ],
    }  # fmt: skip


def replay_cells(line: Line) -> tuple[str, ...]:
    """A line of the experiment, in the order of the columns; errors are median / p95 in percent."""
    return (line.name, f"{line.rows:,}", _errors(line.unseen), _errors(line.large), _errors(line.at_cliffs))


def replay_columns(line: Line) -> tuple[str, ...]:
    """The columns' names, with how many rows the errors are of."""
    counts = ("", "", f" ({line.unseen.rows:,})", f" ({line.large.rows:,})", f" ({line.at_cliffs.rows:,})")
    return tuple(name + count for name, count in zip(_COLUMNS, counts, strict=True))


def replay_markdown(found: Replay, consumer: str, origins: Sequence[str]) -> str:
    """The experiment as a Markdown table, then what it was made from."""
    names = replay_columns(found.lines[0])
    lines = ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    lines += ["| " + " | ".join(replay_cells(line)) + " |" for line in found.lines]
    lines += ["", f"- Interpolated by {consumer}."]
    lines += [
        f"- Bound for the expected error: {percent(found.bound)}; model fitted to {found.model_rows:,} rows of the "
        "powers of two, started from other GPU families."
    ]
    lines += [f"- {origin}." for origin in origins]
    return "\n".join(lines) + "\n"


def _errors(errors: Errors) -> str:
    return "–" if not errors.rows else f"{errors.median_pct:.1f} / {errors.p95_pct:.1f}"
