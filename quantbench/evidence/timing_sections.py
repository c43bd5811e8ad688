"""The timer's tables as text: how our figures agree with everybody else's, and what they cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quantbench.units import latency

Table = dict[str, Any]
# What one asks of a timer: above this time agreement counts in percent, below it in microseconds.
_SHORT_US = 20.0
_OURS = "quantbench"
#: mamf-finder heats the card up before its first shape (stas00/ml-engineering, mamf-finder.py: `warmup` of 30 s)
MAMF_START_S = 30.0


def timer_section(table: Table) -> list[str]:
    """Medians of each method per kernel, then how far ours are from the profiler's kernel times and from themselves."""
    rows = table["rows"]
    methods = list(dict.fromkeys(name for row in rows for name in row["medians_us"]))
    lines = ["| kernel | " + " | ".join(methods) + " |", "|---|" + "---:|" * len(methods)]
    for row in rows:
        cells = [_median_text(row["medians_us"].get(name)) for name in methods]
        lines.append(f"| {row['workload']} | " + " | ".join(cells) + " |")
    lines.append("")
    lines.append("Medians of one repeat's median each; `–` where a method gave no figure.")
    lines.append("")
    for ours in (name for name in methods if name.startswith(_OURS)):
        lines += [f"- {ours}: {sentence}" for sentence in _agreement(rows, ours, methods)]
    return lines


def _agreement(rows: Sequence[Table], ours: str, methods: Sequence[str]) -> list[str]:
    said = []
    for other in methods:
        if other.startswith(_OURS):
            continue
        pairs = [
            (float(np.median(row["medians_us"][ours])), float(np.median(row["medians_us"][other])))
            for row in rows
            if row["medians_us"].get(ours) and row["medians_us"].get(other)
        ]
        long = [abs(mine / its - 1) for mine, its in pairs if its >= _SHORT_US]
        short_us = [abs(mine - its) for mine, its in pairs if its < _SHORT_US]
        parts = []
        if long:
            parts.append(
                f"at most {_percent(max(long))} (median {_percent(float(np.median(long)))}) from {_SHORT_US:g} µs on"
            )
        if short_us:
            parts.append(f"at most {max(short_us):.2f} µs below")
        if parts:
            said.append(f"differs from {other} by " + ", ".join(parts))
    spreads = [_spread(row["medians_us"][ours]) for row in rows if len(row["medians_us"].get(ours, ())) > 1]
    if spreads:
        said.append(
            f"repeats spread by at most {_percent(max(spreads))} (median {_percent(float(np.median(spreads)))})"
        )
    return said


def cost_section(table: Table) -> list[str]:
    """Seconds on the device and in all per point, and the spread over the repeats, for each method."""
    rows = table["rows"]
    methods = list(dict.fromkeys(name for row in rows for name in row["wall_s"]))
    lines = [
        "| method | device held, s a point | in all, s a point | spread of repeats, median | 95 % of points under |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in methods:
        held = float(np.mean([np.mean(row["wall_s"][name]) for row in rows]))
        prepare = float(np.mean([row["prepare_s"] for row in rows]))
        spreads = [_spread(row["medians_us"][name]) for row in rows if len(row["medians_us"].get(name, ())) > 1]
        middle, high = (_percent(float(x)) for x in np.quantile(spreads, (0.5, 0.95))) if spreads else ("–", "–")
        lines.append(f"| {name} | {held:.3f} | {held + prepare:.3f} | {middle} | {high} |")
    lines += ["", f"{len(rows)} shapes, {table['repeats']} repeats each; making the inputs is the same for all."]
    if "mamf" in methods:
        start = MAMF_START_S / len(rows)
        lines.append(
            f"mamf-finder also heats the card for {MAMF_START_S:g} s first, {start:.2f} s for each of these points:"
            " not run here and not in its row."
        )
    return lines


def _percent(share: float) -> str:
    """With two decimals: half a percent is what is asked for here."""
    return f"{100 * share:.2f} %"


def _spread(medians_us: Sequence[float]) -> float:
    """Largest over smallest of the repeats, less one."""
    return max(medians_us) / min(medians_us) - 1


def _median_text(medians_us: Sequence[float] | None) -> str:
    return latency(float(np.median(medians_us))) if medians_us else "–"
