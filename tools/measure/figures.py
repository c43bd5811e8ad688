"""Prints the results of timer comparisons, and of a sweep over random GEMMs, as Markdown.

Run it as `python -m tools.measure.figures cost.json RUN`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from quantbench.analysis.summary import points_of
from quantbench.errors import InputError
from quantbench.files import read_json
from quantbench.latency.gemm.model import GemmModel
from quantbench.store.folder import Run, read_run
from quantbench.units import percent
from quantbench.workload import Gemm
from tools.accuracy.scoring import FloatArray

Table = dict[str, Any]
_LEAST_US = 20.0
_OURS = "quantbench"
#: seconds for which mamf-finder warms up the GPU before its first shape (stas00/ml-engineering,
#: mamf-finder.py: `warmup` of 30 s)
MAMF_START_S = 30.0
#: number of shapes that share this warm-up
MAMF_SHAPES = 50
# Target: a point of mamf-finder takes at least this many times as long as one of our timer.
_TIMES_CHEAPER = 5.0


def timer_lines(table: Table) -> list[str]:
    """Lists how our timer differs from each other method, and its spread over repeats.

    Kernels under _LEAST_US are left out, because events and graphs differ there by launch overhead.
    """
    rows = table["rows"]
    lines = []
    for other in _methods(rows, "medians_us"):
        differences = []
        for row in rows:
            medians_us = row["medians_us"]
            ours_us = np.median(medians_us.get(_OURS) or np.nan)
            other_us = np.median(medians_us.get(other) or np.nan)
            if other != _OURS and ours_us >= _LEAST_US and other_us >= _LEAST_US:
                differences.append(abs(ours_us / other_us - 1))
        if differences:
            lines.append(f"- differs from {other} by {_most_and_median(differences)}")
    spreads = _spreads(rows, _OURS)
    if spreads:
        lines.append(f"- repeats spread by {_most_and_median(spreads)}")
    return lines


def _methods(rows: Sequence[Table], column: str) -> list[str]:
    """Returns the names of the methods in a column of the rows, in order of appearance.

    column: medians_us or wall_s.
    """
    return list(dict.fromkeys(chain.from_iterable(row[column] for row in rows)))


def _most_and_median(shares: Sequence[float]) -> str:
    return f"at most {_percent(max(shares))} (median {_percent(float(np.median(shares)))})"


def cost_lines(table: Table) -> list[str]:
    """Formats the cost per point of each method as a Markdown table, and whether our target is met.

    The columns are the seconds on the device, the seconds in all, and the spread over the repeats.
    """
    rows = table["rows"]
    methods = _methods(rows, "wall_s")
    lines = [
        "| method | device held, s a point | in all, s a point | spread of repeats, median "
        "| 95 % of points under |",
        "|---|---:|---:|---:|---:|",
    ]
    prepare_s = float(np.mean([row["prepare_s"] for row in rows]))
    held_s: dict[str, float] = {}
    middle: dict[str, float] = {}
    for name in methods:
        held_s[name] = float(np.mean([np.mean(row["wall_s"][name]) for row in rows]))
        spreads = _spreads(rows, name) or [np.nan]
        middle[name], high = np.quantile(spreads, (0.5, 0.95)).tolist()
        seconds = f"{held_s[name]:.3f} | {held_s[name] + prepare_s:.3f}"
        lines.append(f"| {name} | {seconds} | {_percent(middle[name])} | {_percent(high)} |")
    shapes = f"{len(rows)} shapes, {table['repeats']} repeats each"
    lines += ["", f"{shapes}; making the inputs is the same for all."]
    if "mamf" in methods and _OURS in methods:
        start_s = MAMF_START_S / MAMF_SHAPES
        mamf_s = held_s["mamf"] + start_s
        ratio = mamf_s / held_s[_OURS]
        met = ratio >= _TIMES_CHEAPER and middle[_OURS] <= middle["mamf"]
        spread = f"{_percent(middle[_OURS])} against {_percent(middle['mamf'])}"
        lines += [
            "",
            f"mamf-finder also heats the card for {MAMF_START_S:g} s first, which is not run here: "
            f"{start_s:.2f} s for each of {MAMF_SHAPES} points. With it, a point takes "
            f"{mamf_s:.3f} s, and {held_s[_OURS]:.3f} s with our timer: {ratio:.1f} times cheaper, "
            f"at a spread of {spread}. Target, {_TIMES_CHEAPER:g} times cheaper at no larger a "
            f"spread: {'met' if met else 'missed'}.",
        ]
    return lines


def _percent(share: float) -> str:
    """Formats a share in percent with two decimals, because the target is half a percent; nan
    becomes `–`.
    """
    return "–" if np.isnan(share) else f"{100 * share:.2f} %"


def _spreads(rows: Sequence[Table], method: str) -> list[float]:
    """Returns the largest over the smallest repeat, minus 1, for each row with several repeats."""
    spreads = []
    for row in rows:
        repeats_us = row["medians_us"].get(method, ())
        if len(repeats_us) > 1:
            spreads.append(max(repeats_us) / min(repeats_us) - 1)
    return spreads


#: number of products to which a model is fitted
FITTED_ROWS = 200


def prediction_lines(run: Run, others: Mapping[str, Run] | None = None) -> list[str]:
    """Formats the errors of models on products as a Markdown table.

    One model is the shipped one of the device. The others are fitted to FITTED_ROWS products of
    `run`, drawn at random, with and without the shipped model as a reference. The errors
    |predicted / measured - 1| are over the remaining products of `run`, and over those of `others`
    that cuBLAS computed.

    others: runs by name.
    Raises InputError if `run` has no products beyond FITTED_ROWS.
    """
    device = run.info.device
    sizes, measured_us, dtype = _products(run)
    if len(measured_us) <= FITTED_ROWS:
        few = f"{len(measured_us)} products in {run.folder}"
        raise InputError("figures", few, f"more than {FITTED_ROWS}")
    order = np.random.default_rng(0).permutation(len(measured_us))
    first = order[:FITTED_ROWS]
    rest = order[FITTED_ROWS:]
    tests = {"random": (sizes[:, rest], measured_us[rest])}
    for name, other in (others or {}).items():
        tests[name] = _products(other)[:2]
    models = {"shipped": GemmModel.best(device, dtype=dtype)}
    for name, prior in (("shipped and", "auto"), ("other GPUs' and", "family-out")):
        m, n, k = sizes[:, first]
        models[f"{name} {FITTED_ROWS} rows"] = GemmModel.fit(
            device, m, n, k, measured_us[first], dtype=dtype, prior=prior
        )
    counts = [f"{name} ({len(times)})" for name, (_, times) in tests.items()]
    lines = ["| model | " + " | ".join(counts) + " |", "|---|" + "---:|" * len(tests)]
    for name, model in models.items():
        cells = []
        for of, times_us in tests.values():
            errors = np.abs(model.predict(*of).latency_us / times_us - 1)
            cells.append(" / ".join(map(percent, np.quantile(errors, (0.5, 0.95)))))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _products(run: Run) -> tuple[FloatArray, FloatArray, str]:
    """Returns m, n and k, (3, products), and times in µs of torch's products, and their dtype."""
    points = [
        point
        for point in points_of(run.records, run.info.device)
        if isinstance(point.workload, Gemm) and point.provider.startswith("torch")
    ]
    figures = attrgetter("workload.m", "workload.n", "workload.k", "latency_us")
    rows = np.array(list(map(figures, points)), dtype=float).T
    return rows[:3], rows[3], points[0].workload.dtype


def main() -> None:
    """Prints the figures of each file and run on the command line."""
    for path in map(Path, sys.argv[1:]):
        if path.is_dir():
            lines = prediction_lines(read_run(path))
        else:
            table = read_json(path)
            lines = [*timer_lines(table), "", *cost_lines(table)]
        print(f"{path}\n", *lines, "", sep="\n")


if __name__ == "__main__":
    main()
