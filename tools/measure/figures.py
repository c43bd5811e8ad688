"""Prints the figures of measured tables and of a sweep over random products as Markdown.

python -m tools.measure.figures timer-truth.json cost.json RUN
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantbench.analysis.summary import points_of
from quantbench.errors import InputError
from quantbench.latency.gemm.model import GemmModel
from quantbench.store.folder import Run, read_run
from quantbench.units import latency
from quantbench.workload import Gemm

Table = dict[str, Any]
# Differences between timers are given in percent from this time on and in microseconds below it.
_SHORT_US = 20.0
_OURS = "quantbench"
#: warm-up of the GPU by mamf-finder before its first shape (stas00/ml-engineering, mamf-finder.py:
#: `warmup` of 30 s)
MAMF_START_S = 30.0
#: number of shapes that this warm-up is shared by
MAMF_SHAPES = 50
# A point should cost at most this fraction of one of mamf-finder's.
_TIMES_CHEAPER = 5.0


def timer_lines(table: Table) -> list[str]:
    """Formats medians per kernel and method, then our difference from each other method and our
    spread over repeats.
    """
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
    spreads = [
        _spread(row["medians_us"][ours]) for row in rows if len(row["medians_us"].get(ours, ())) > 1
    ]
    if spreads:
        said.append(
            f"repeats spread by at most {_percent(max(spreads))} (median {_percent(float(np.median(spreads)))})"
        )
    return said


def cost_lines(table: Table) -> list[str]:
    """Formats seconds on the device and in total per point and the spread over the repeats for each
    method, then whether the target for the cost is met."""
    rows = table["rows"]
    methods = list(dict.fromkeys(name for row in rows for name in row["wall_s"]))
    lines = [
        "| method | device held, s a point | in all, s a point | spread of repeats, median | 95 % of points under |",
        "|---|---:|---:|---:|---:|",
    ]
    prepare_s = float(np.mean([row["prepare_s"] for row in rows]))
    held_s: dict[str, float] = {}
    middle: dict[str, float] = {}
    for name in methods:
        held_s[name] = float(np.mean([np.mean(row["wall_s"][name]) for row in rows]))
        spreads = [
            _spread(row["medians_us"][name])
            for row in rows
            if len(row["medians_us"].get(name, ())) > 1
        ]
        middle[name], high = (
            np.quantile(spreads, (0.5, 0.95)).tolist() if spreads else (np.nan, np.nan)
        )
        cells = f"{held_s[name]:.3f} | {held_s[name] + prepare_s:.3f} | {_percent(middle[name])} | {_percent(high)}"
        lines.append(f"| {name} | {cells} |")
    lines += [
        "",
        f"{len(rows)} shapes, {table['repeats']} repeats each; making the inputs is the same for all.",
    ]
    if "mamf" in methods and _OURS in methods:
        its_s = held_s["mamf"] + MAMF_START_S / MAMF_SHAPES
        ratio = its_s / held_s[_OURS]
        met = ratio >= _TIMES_CHEAPER and middle[_OURS] <= middle["mamf"]
        lines += [
            "",
            f"mamf-finder also heats the card for {MAMF_START_S:g} s first, which is not run here: "
            f"{MAMF_START_S / MAMF_SHAPES:.2f} s for each of {MAMF_SHAPES} points. With it, a point takes "
            f"{its_s:.3f} s, and {held_s[_OURS]:.3f} s with our timer: {ratio:.1f} times cheaper, at a spread of "
            f"{_percent(middle[_OURS])} against {_percent(middle['mamf'])}. "
            f"Target, {_TIMES_CHEAPER:g} times cheaper at no larger a spread: {'met' if met else 'missed'}.",
        ]
    return lines


def _percent(share: float) -> str:
    """Formats a share with two decimals, because the target is half a percent; `–` if it is not
    known.
    """
    return "–" if np.isnan(share) else f"{100 * share:.2f} %"


def _spread(medians_us: Sequence[float]) -> float:
    """Returns the largest over the smallest repeat, minus 1."""
    return max(medians_us) / min(medians_us) - 1


def _median_text(medians_us: Sequence[float] | None) -> str:
    return latency(float(np.median(medians_us))) if medians_us else "–"


FITTED_ROWS = 200


def prediction_lines(run: Run) -> list[str]:
    """Formats |predicted / measured - 1| of a run's products that no fit has seen: by the shipped
    model of their device, and by a model fitted to the first FITTED_ROWS of them, which were
    measured in random order."""
    device = run.info.device
    points = points_of(run.records, device)
    works = [point.workload for point in points if isinstance(point.workload, Gemm)]
    if len(works) < 2 * FITTED_ROWS:
        raise InputError(
            "figures", f"{len(works)} products in {run.folder}", f"at least {2 * FITTED_ROWS}"
        )
    dtype = works[0].dtype
    m, n, k = np.array([(work.m, work.n, work.k) for work in works], dtype=float).T
    measured_us = np.array(
        [point.latency_us for point in points if isinstance(point.workload, Gemm)]
    )
    first = slice(FITTED_ROWS)
    rest = slice(FITTED_ROWS, None)
    fitted = GemmModel.fit(
        device, m[first], n[first], k[first], measured_us[first], dtype=dtype, prior="family-out"
    )
    lines = []
    for name, model in (
        ("shipped", GemmModel.best(device, dtype=dtype)),
        (f"fitted to {FITTED_ROWS}", fitted),
    ):
        predicted_us = model.predict(m[rest], n[rest], k[rest]).latency_us
        errors = np.abs(predicted_us / measured_us[rest] - 1)
        median, high = np.quantile(errors, (0.5, 0.95))
        lines.append(f"| {name} | {len(errors)} | {_percent(median)} | {_percent(high)} |")
    return [
        "| model | products | error, median | error, 95th percentile |",
        "|---|---:|---:|---:|",
        *lines,
    ]


def main() -> None:
    """Prints the figures of each file or run that is named."""
    for path in map(Path, sys.argv[1:]):
        if path.is_dir():
            lines = prediction_lines(read_run(path))
        else:
            table = json.loads(path.read_text(encoding="utf-8"))
            lines = cost_lines(table) if path.stem == "cost" else timer_lines(table)
        print(f"{path}\n", *lines, "", sep="\n")


if __name__ == "__main__":
    main()
