"""Writes the accuracy tables of docs/planning.md: `python -m tools.planner_accuracy tests/data
docs`.

First table: the BigScience documents, with the constants of their site, split by whether these were
fitted to a row. Second table: published runs of other sites, each table predicted with factors
fitted without it (`left out`) and with the shipped ones. Third table: Megatron-Bridge's runs, each
model predicted with factors fitted without it. Fourth
table: ranks of its layouts. Fifth table: what is picked among layouts that ran, what is said to
    fit, and which ZeRO
stages searches over all layouts pick. Run by maintainers after `tools.planner_fit`.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from quantbench.latency.model_times import BestTimes
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import Calibrations, shipped
from quantbench.planner.fitting import log_errors, observe, op_spreads
from quantbench.planner.layout import Layout
from quantbench.planner.row_results import RowResult, predict_rows, summarize
from quantbench.planner.search import LayoutSpace, search
from tools.guide.markers import fill, table
from tools.planner_bridge import PUBLISHED_LAYOUTS, RELEASE, STACK, bridge_runs
from tools.planner_documents import read_documents
from tools.planner_fit import (
    BRIDGE,
    DOCUMENTS,
    LAST_DAY,
    PUBLISHED,
    SITE,
    documents,
    left_out,
    published,
    rest_of,
)

PAGE = "planning.md"
# Layouts of one job that make a sweep, and the share by which a pick may be slower than the
# fastest.
_SWEEP, _NEAR = 3, 0.05
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
#: groups of the BigScience rows: (name, predicate of a result and the fitted row ids)
_DOCUMENTS: tuple[tuple[str, Callable[[RowResult, set[str]], bool]], ...] = (
    ("documents, days fitted to", lambda r, fitted: r.row.row_id in fitted),
    ("documents, 02-25 (nothing fitted)", lambda r, fitted: r.row.date >= "02-25"),
    ("documents, all A100 rows", lambda r, fitted: bool(r.row.date)),
    ("documents, V100", lambda r, fitted: r.row.section.startswith("BNB")),
)


def documents_table(data: Path, times: TimesOf, calibrations: Calibrations) -> str:
    """Formats the accuracy on the BigScience documents as a Markdown table."""
    results = predict_rows(read_documents(data / DOCUMENTS), times, calibrations)
    fitted = {
        row_id
        for site in calibrations.sites.values()
        for row_id in site.provenance.get("rows_fitted", ())
    }
    rows = []
    for name, keep in _DOCUMENTS:
        counted = [r for r in results if keep(r, fitted) and r.error is not None]
        spans = [
            (r.prediction.iteration.sec, r.row.sec_per_it or 0) for r in counted if r.prediction
        ]
        inside = sum(span.low <= measured <= span.high for span, measured in spans) / max(
            1, len(spans)
        )
        s = summarize(counted)
        errors = [f"{s.mape:.1f} %", f"{s.median:.1f} %", f"{s.bias:+.1f} %"]
        rows.append([name, str(s.rows), *errors, f"{s.spearman:.2f}", f"{inside:.0%}"])
    return table(_HEAD, rows)


def left_out_table(data: Path, times: TimesOf, calibrations: Calibrations) -> str:
    """Formats the errors on published tables, each predicted with factors fitted without it, as a
    Markdown table.
    """
    by_file = {name: published(data, times, calibrations, (name,)) for name in PUBLISHED}
    observed = [one for runs in by_file.values() for one in runs]
    own = [(c, row.sec_per_it or 0.0, SITE) for row, c in documents(data / DOCUMENTS, LAST_DAY)]
    errors = left_out(
        [*observed, *observe(own, times)], rest_of(calibrations), lambda one: one.table
    )[: len(observed)]
    stacks = {one.table: one.case.job.stack for one in observed} | {SITE: "deepspeed"}
    alike = Counter(stacks.values())
    known, unknown = (calibrations.of_stack(stack, "").scatter for stack in ("megatron", ""))
    extra = [known if alike[one.case.job.stack] > 1 else unknown for one in observed]
    half = np.hypot(op_spreads(observed, errors), extra)
    shipped_errors = np.array(
        [log_errors([o], calibrations.of_stack(o.case.job.stack, o.group[1]))[0] for o in observed]
    )
    names = np.array([one.table for one in observed])
    groups = [(name, stacks[name], names == name) for name in dict.fromkeys(names.tolist())]
    groups += [
        (f"all of {f}", "", np.isin(names, [o.table for o in runs])) for f, runs in by_file.items()
    ]
    rows = []
    for name, stack, keep in groups:
        off, inside = np.expm1(errors[keep]), (np.abs(errors) <= half)[keep].mean()
        cells = [f"{100 * np.abs(off).mean():.1f} %", f"{100 * off.mean():+.1f} %"]
        cells += [f"{np.exp(np.median(half[keep])):.2f}", f"{inside:.0%}"]
        rows.append(
            [
                name,
                stack,
                str(keep.sum()),
                *cells,
                f"{100 * np.abs(np.expm1(shipped_errors[keep])).mean():.1f} %",
            ]
        )
    return table(_LEFT_OUT_HEAD, rows)


def bridge_table(path: Path, times: TimesOf, calibrations: Calibrations) -> str:
    """Formats the errors on Megatron-Bridge's runs, each model predicted with factors fitted
    without it, as a Markdown table, and says which runs cannot be expressed."""
    observed, refused = bridge_runs(path, times)
    errors = left_out(observed, rest_of(calibrations), lambda one: one.table)
    half = np.hypot(op_spreads(observed, errors), calibrations.of_stack(STACK, "").scatter)
    off, names = np.expm1(errors), np.array([one.table for one in observed])
    experts = np.array([one.case.job.shape.experts > 0 for one in observed])
    measured = np.array([one.measured_s for one in observed])
    groups = [(name, names == name) for name in dict.fromkeys(names.tolist())]
    rows = []
    for name, keep in (*groups, ("all dense", ~experts), ("all with experts", experts)):
        several = keep.sum() > 1
        rank = (
            f"{spearmanr(measured[keep], (measured * np.exp(errors))[keep]).statistic:.2f}"
            if several
            else "–"
        )
        inside = (np.abs(errors) <= half)[keep].mean()
        cells = [
            f"{100 * np.abs(off[keep]).mean():.1f} %",
            f"{100 * np.median(np.abs(off[keep])):.1f} %",
        ]
        cells += [f"{100 * off[keep].mean():+.1f} %", rank, f"{inside:.0%}"]
        rows.append([name, str(keep.sum()), *cells])
    left = "; ".join(f"{count} of {why}" for why, count in sorted(refused.items()))
    said = f"Factors of release {RELEASE}. Not expressible: {left}."
    return f"{table(_HEAD, rows)}\n\n{said}"


def ranks_table(times: TimesOf, calibrations: Calibrations) -> str:
    """Formats the ranks of published layouts among all that fit into memory as a Markdown table."""
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
        rows.append(
            [
                one.model,
                f"{one.gpus} × {one.gpu}",
                one.recipe or "bf16",
                layout,
                f"{len(ranked):,}",
                *found,
            ]
        )
    return table(_RANKS_HEAD, rows)


def picks_table(data: Path, times: TimesOf, calibrations: Calibrations) -> str:
    """Formats how well layouts that ran are ranked and said to fit, and which ZeRO stages a search
    picks for their jobs, as a Markdown table."""
    results = [
        r
        for name in (DOCUMENTS, *PUBLISHED)
        for r in predict_rows(read_documents(data / name), times, calibrations)
    ]
    sweeps: dict[tuple[object, ...], dict[Layout, list[RowResult]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for r in results:
        if r.error is not None and r.case is not None:
            sweeps[r.case.job.key][r.case.layout].append(r)
    losses = [_loss(layouts) for layouts in sweeps.values() if len(layouts) >= _SWEEP]
    fits = [
        r.prediction.fits
        for r in results
        if r.prediction and r.row.status != "fail" and r.row.sec_per_it
    ]
    ran_out = [not r.prediction.fits for r in results if r.prediction and r.row.status == "oom"]
    jobs = {
        (r.case.job.key, r.case.layout.cp): r.case
        for r in results
        if r.case is not None and r.prediction is not None
    }
    picked: dict[str, list[float]] = defaultdict(list)
    for case in jobs.values():
        job = case.job
        constants = calibrations.of(job.cluster, job.stack)
        found = search(
            job, times(job.cluster.device), constants, LayoutSpace(cp=(case.layout.cp,))
        ).ranked
        if not found:
            continue
        best = found[0]
        where = (
            "in one node"
            if best.layout.replicas * best.layout.tp <= job.cluster.gpus_per_node
            else "over nodes"
        )
        lower = next((p.sec_per_it for p in found if p.layout.zero <= 1), float("nan"))
        picked[f"ZeRO-{best.layout.zero} {where}" if best.layout.zero > 1 else "other"].append(
            100 * (lower / best.sec_per_it - 1)
        )
    searched, near = sum(map(len, picked.values())), [loss <= _NEAR for loss in losses]
    rows = [
        [
            f"the fastest of {_SWEEP} or more layouts that ran, within 5 %",
            str(len(losses)),
            str(sum(near)),
        ],
        ["runs out of memory, predicted to be", str(len(ran_out)), str(sum(ran_out))],
        ["runs that fit, predicted to", str(len(fits)), str(sum(fits))],
        *(
            [
                f"searches that pick {name}; gain over ZeRO-0 and 1 {np.nanmin(gains):.1f} to {np.nanmax(gains):.1f} %",
                str(searched),
                str(len(gains)),
            ]
            for name, gains in sorted(picked.items())
            if name != "other"
        ),
    ]
    return table(["check", "of", "found"], rows)


def _loss(layouts: dict[Layout, list[RowResult]]) -> float:
    """Returns the share by which the layout with the shortest predicted time was slower than the
    fastest that ran.
    """
    measured = {
        layout: float(np.mean([r.row.sec_per_it or 0 for r in runs]))
        for layout, runs in layouts.items()
    }
    pick = min(
        layouts, key=lambda layout: p.sec_per_it if (p := layouts[layout][0].prediction) else np.inf
    )
    return measured[pick] / min(measured.values()) - 1


def main() -> None:
    """Writes the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "data", type=Path, help=f"folder with {', '.join((DOCUMENTS, *PUBLISHED, BRIDGE))}"
    )
    parser.add_argument("docs", type=Path, help=f"folder with {PAGE}")
    arguments = parser.parse_args()
    page, times = arguments.docs / PAGE, BestTimes()
    found = {
        "accuracy": documents_table(arguments.data, times, shipped()),
        "left-out": left_out_table(arguments.data, times, shipped()),
        "bridge": bridge_table(arguments.data / BRIDGE, times, shipped()),
        "ranks": ranks_table(times, shipped()),
        "picks": picks_table(arguments.data, times, shipped()),
    }
    page.write_text(fill(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(*found.values(), sep="\n")


if __name__ == "__main__":
    main()
