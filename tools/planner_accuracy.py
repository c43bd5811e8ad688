"""Writes the tables of the planner's accuracy into docs/planning.md.

Predictions are compared with published training runs from the BigScience documents, other sites and
Megatron-Bridge. For other sites and Megatron-Bridge, a table or model is predicted with factors
that were fitted without it. Run it as `python -m tools.planner_accuracy tests/data docs`.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

from quantbench.latency.model_times import BestTimes
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import Calibrations, shipped
from quantbench.planner.fitting import FloatArray, Observed, log_errors, observe, op_spreads
from quantbench.planner.layout import Layout
from quantbench.planner.row_results import RowResult, predict_rows, summarize
from quantbench.planner.rows import Case
from quantbench.planner.search import LayoutSpace, search
from tools.guide.markers import fill, table
from tools.planner_bridge import PUBLISHED_LAYOUTS, RELEASE, STACK, bridge_runs
from tools.planner_documents import read_documents
from tools.planner_fit import (
    BRIDGE,
    DOCUMENTS,
    PUBLISHED,
    SITE,
    documents,
    left_out,
    published,
    rest_of,
)

PAGE = "planning.md"
# A job with at least _SWEEP layouts that ran is a sweep. A picked layout is right if it was at most
# the share _NEAR slower than the fastest.
_SWEEP = 3
_NEAR = 0.05
_HEAD = [
    "rows",
    "number",
    "mean error",
    "median",
    "bias",
    "rank correlation",
    "inside the interval",
]
_LEFT_OUT_HEAD = [
    "table",
    "stack",
    "runs",
    "mean error, left out",
    "bias, left out",
    "interval, either way",
    "inside",
    "mean error",
]
_RANKS_HEAD = [
    "model",
    "GPUs",
    "format",
    "published layout",
    "layouts that fit",
    "its rank, behind the first",
    "of these degrees, any MBS and interleave",
]
#: groups of the BigScience rows: (name, function from a result and the fitted row ids to whether
#: the result is in the group)
_DOCUMENTS: tuple[tuple[str, Callable[[RowResult, set[str]], bool]], ...] = (
    ("documents, days fitted to", lambda r, fitted: r.row.row_id in fitted),
    ("documents, 02-25 (nothing fitted)", lambda r, fitted: r.row.date >= "02-25"),
    ("documents, all A100 rows", lambda r, fitted: bool(r.row.date)),
    ("documents, V100", lambda r, fitted: r.row.section.startswith("BNB")),
)


def documents_table(data: Path, times: TimesOf, calibrations: Calibrations) -> str:
    """Formats the errors on the BigScience documents as a Markdown table, one line per group.

    data: folder with the tables of runs.
    times: function from a device to its op times.
    """
    results = predict_rows(read_documents(data / DOCUMENTS), times, calibrations)
    fitted = set()
    for site in calibrations.sites.values():
        fitted.update(site.provenance.get("rows_fitted", ()))
    rows = []
    for name, keep in _DOCUMENTS:
        counted = [r for r in results if keep(r, fitted) and r.error is not None]
        inside = []
        for result in counted:
            assert result.prediction is not None
            span = result.prediction.iteration.sec
            inside.append(span.low <= (result.row.sec_per_it or 0) <= span.high)
        s = summarize(counted)
        errors = [f"{s.mape:.1f} %", f"{s.median:.1f} %", f"{s.bias:+.1f} %"]
        rows.append([name, str(s.rows), *errors, f"{s.spearman:.2f}", f"{np.mean(inside):.0%}"])
    return table(_HEAD, rows)


def left_out_table(data: Path, times: TimesOf, calibrations: Calibrations) -> str:
    """Formats the errors on the published tables of other sites as a Markdown table.

    Each table is predicted with factors that were fitted without it, and with the shipped factors.

    data: folder with the tables of runs.
    """
    observed: list[Observed] = []
    files = {}
    for file in PUBLISHED:
        runs = published(data, times, calibrations, (file,))
        files[file] = {one.table for one in runs}
        observed += runs
    own = [(c, row.sec_per_it or 0.0, SITE) for row, c in documents(data / DOCUMENTS)]
    every = [*observed, *observe(own, times)]
    errors = left_out(every, rest_of(calibrations))[: len(observed)]
    stacks = {one.table: one.case.job.stack for one in observed} | {SITE: "deepspeed"}
    alike = Counter(stacks.values())
    extra = []
    shipped_errors = np.empty(len(observed))
    for i, one in enumerate(observed):
        stack = one.case.job.stack
        known = "megatron" if alike[stack] > 1 else ""
        extra.append(calibrations.of_stack(known, "").scatter)
        factors = calibrations.of_stack(stack, one.group[1])
        shipped_errors[i] = log_errors([one], factors)[0]
    half = np.hypot(op_spreads(observed, errors), extra)
    groups = _by_table(observed)
    for file, tables in files.items():
        groups[f"all of {file}"] = np.logical_or.reduce([groups[name] for name in tables])
    rows = []
    for name, keep in groups.items():
        mean, _, bias, inside = _cells(errors[keep], half[keep])
        interval = f"{np.exp(np.median(half[keep])):.2f}"
        shipped_mean, *_ = _cells(shipped_errors[keep], half[keep])
        count = str(keep.sum())
        rows.append([name, stacks.get(name, ""), count, mean, bias, interval, inside, shipped_mean])
    return table(_LEFT_OUT_HEAD, rows)


def _by_table(observed: Sequence[Observed]) -> dict[str, npt.NDArray[np.bool_]]:
    """Returns the mask of each table's runs, (observed,)."""
    names = np.array([one.table for one in observed])
    return {name: names == name for name in dict.fromkeys(names.tolist())}


def _cells(errors: FloatArray, half: FloatArray) -> tuple[str, str, str, str]:
    """Formats the mean and median error, the bias, and the share inside the intervals.

    errors: (runs,) ln(predicted / measured).
    half: (runs,) half-widths of the intervals in ln time.
    """
    off_pct = 100 * np.expm1(errors)
    size_pct = np.abs(off_pct)
    inside = (np.abs(errors) <= half).mean()
    middle = (f"{np.median(size_pct):.1f} %", f"{off_pct.mean():+.1f} %")
    return f"{size_pct.mean():.1f} %", *middle, f"{inside:.0%}"


def bridge_table(path: Path, times: TimesOf, calibrations: Calibrations) -> str:
    """Formats the errors on Megatron-Bridge's runs as a Markdown table.

    Each model is predicted with factors that were fitted without it. A note below the table counts
    the runs that the planner cannot express.

    path: CSV file of the runs.
    """
    observed, refused = bridge_runs(path, times)
    errors = left_out(observed, rest_of(calibrations))
    half = np.hypot(op_spreads(observed, errors), calibrations.of_stack(STACK, "").scatter)
    groups = _by_table(observed)
    experts = np.array([one.case.job.shape.experts > 0 for one in observed])
    groups |= {"all dense": ~experts, "all with experts": experts}
    measured_s = np.array([one.measured_s for one in observed])
    rows = []
    for name, keep in groups.items():
        rank = "–"
        if keep.sum() > 1:
            predicted_s = measured_s * np.exp(errors)
            rank = f"{spearmanr(measured_s[keep], predicted_s[keep]).statistic:.2f}"
        *figures, inside = _cells(errors[keep], half[keep])
        rows.append([name, str(keep.sum()), *figures, rank, inside])
    left = "; ".join(f"{count} of {why}" for why, count in sorted(refused.items()))
    note = f"Factors of release {RELEASE}. Not expressible: {left}."
    return f"{table(_HEAD, rows)}\n\n{note}"


def ranks_table(times: TimesOf, calibrations: Calibrations) -> str:
    """Formats the ranks of published layouts among all layouts that fit as a Markdown table."""
    rows = []
    for one in PUBLISHED_LAYOUTS:
        ranked, alike = one.rank(times, calibrations)
        found = []
        for p in (alike[0], min(alike, key=ranked.index)):
            behind = p.sec_per_it / ranked[0].sec_per_it - 1
            found.append(f"{ranked.index(p) + 1}, {100 * behind:+.1f} %")
        wanted = one.layout
        degrees = f"TP{wanted.tp} PP{wanted.pp} CP{wanted.cp} EP{wanted.ep}"
        layout = f"{degrees}, MBS {wanted.mbs}, interleave {wanted.interleave}"
        gpus = f"{one.gpus} × {one.gpu}"
        rows.append([one.model, gpus, one.recipe or "bf16", layout, f"{len(ranked):,}", *found])
    return table(_RANKS_HEAD, rows)


def picks_table(data: Path, times: TimesOf, calibrations: Calibrations) -> str:
    """Formats checks of the planner's choices on the published runs as a Markdown table.

    The checks are whether the fastest of several layouts that ran is picked, whether memory is
    predicted to suffice, and which ZeRO stages a search picks for the jobs of the runs.

    data: folder with the tables of runs.
    """
    results: list[RowResult] = []
    for name in (DOCUMENTS, *PUBLISHED):
        results += predict_rows(read_documents(data / name), times, calibrations)
    sweeps: dict[object, dict[Layout, list[Any]]] = defaultdict(lambda: defaultdict(list))
    jobs: dict[object, Case] = {}
    fits = []
    ran_out = []
    for one in results:
        row = one.row
        case = one.case
        predicted = one.prediction
        if predicted is None or case is None:
            continue
        if one.error is not None:
            sweeps[case.job.key][case.layout].append((predicted.sec_per_it, row.sec_per_it))
        if row.status != "fail" and row.sec_per_it:
            fits.append(predicted.fits)
        if row.status == "oom":
            ran_out.append(not predicted.fits)
        jobs[case.job.key, case.layout.cp] = case
    near = []
    for layouts in sweeps.values():
        if len(layouts) >= _SWEEP:
            means_s = np.array([np.mean(runs, axis=0) for runs in layouts.values()])
            predicted_s, measured_s = means_s.T
            near.append(measured_s[predicted_s.argmin()] <= (1 + _NEAR) * measured_s.min())
    searched = 0
    picked: dict[str, list[float]] = defaultdict(list)
    for case in jobs.values():
        job = case.job
        constants = calibrations.of(job.cluster, job.stack)
        space = LayoutSpace(cp=(case.layout.cp,))
        found = search(job, times(job.cluster.device), constants, space).ranked
        if not found:
            continue
        searched += 1
        best = found[0]
        if best.layout.zero <= 1:
            continue
        inside = best.layout.replicas * best.layout.tp <= job.cluster.gpus_per_node
        pick = f"ZeRO-{best.layout.zero} {'in one node' if inside else 'over nodes'}"
        lower = next((p.sec_per_it for p in found if p.layout.zero <= 1), nan)
        gain = 100 * (lower / best.sec_per_it - 1)
        picked[pick].append(gain)
    checks = {
        f"the fastest of {_SWEEP} or more layouts that ran, within 5 %": near,
        "runs out of memory, predicted to be": ran_out,
        "runs that fit, predicted to": fits,
    }
    rows = [[check, str(len(right)), str(sum(right))] for check, right in checks.items()]
    for name, gains in sorted(picked.items()):
        words = f"gain over ZeRO-0 and 1 {np.nanmin(gains):.1f} to {np.nanmax(gains):.1f} %"
        rows.append([f"searches that pick {name}; {words}", str(searched), str(len(gains))])
    return table(["check", "of", "found"], rows)


def main(data: Path, docs: Path) -> None:
    """Writes the tables into the page.

    data: folder with the tables of runs.
    docs: folder with PAGE.
    """
    page = docs / PAGE
    times = BestTimes()
    found = {
        "accuracy": documents_table(data, times, shipped()),
        "left-out": left_out_table(data, times, shipped()),
        "bridge": bridge_table(data / BRIDGE, times, shipped()),
        "ranks": ranks_table(times, shipped()),
        "picks": picks_table(data, times, shipped()),
    }
    page.write_text(fill(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(*found.values(), sep="\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
