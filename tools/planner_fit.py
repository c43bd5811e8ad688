"""Fits the planner's factors to published training runs, and writes the package's planner.json.

The factors of software stacks are fitted to all published tables together. Their intervals come
from predicting each table, and each stack, with factors that were fitted without it. The site Jean
Zay has separate factors, fitted to the rows of BigScience's documents before `LAST_DAY`.
docs/planning.md explains why GEMM times have no factor at that site. Run it as
`python -m tools.planner_fit tests/data`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

import quantbench.planner
from quantbench.importers.runs import digest
from quantbench.latency.interconnect import same_site
from quantbench.latency.model_times import BestTimes
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import (
    RANGES,
    STACKS,
    Calibration,
    Calibrations,
    architecture,
    shipped,
)
from quantbench.planner.constraints import is_possible
from quantbench.planner.fitting import FloatArray, Observed, log_errors, observe, scatter_beyond
from quantbench.planner.memory import memory
from quantbench.planner.row_results import predict_rows
from quantbench.planner.rows import Case, TableRow, case_of
from tools.planner_bridge import RELEASE, STACK, bridge_runs
from tools.planner_documents import document_of, read_documents
from tools.planner_pooling import Pooled, fit_pooled

#: files of published runs in the data folder: BigScience's, those of other sites, Megatron-Bridge's
DOCUMENTS = "bloom_tables.csv"
PUBLISHED = ("published_training.csv", "published_layouts.csv")
BRIDGE = "megatron_bridge.csv"
SITE_FACTORS = {
    "tensor_factor": (1.0, 10.0),
    "layer_overhead_ms": (0.0, 50.0),
    "data_parallel_share": (0.01, 1.0),
}
#: Memory constants of all sites but the documents'. They are estimates, because no table of other
#: sites states its memory. CUDA's context, NCCL's buffers and cuBLAS's workspaces take 2 to 4 GiB.
#: Allocators keep 5 to 20 % more than the activations need.
MEMORY_OF_OTHERS = {"base_gib": 3.0, "activation_slack": 0.1, "memory_scatter": 0.12}
_MEMORY_RANGES = {name: RANGES[name] for name in ("base_gib", "activation_slack")}
# Repeated runs of one layout differ by this share, as rows of the documents that were run twice
# show.
_NOISE = 0.005
#: start of the site's fit: 5 ms of overhead per layer and micro-batch, about 300 launches of 15 µs,
#: and half of the network's rate
_START = Calibration(1.5, 5.0, 0.5, base_gib=4.0, activation_slack=0.1)
SITE = "jean-zay-a100"
#: rows of the documents dated from this day on are kept for the test
LAST_DAY = "02-25"


def table_of(row: TableRow) -> str:
    """Returns the name of the published table that a row belongs to.

    This is the name that the row states, else its document and GPU.
    """
    return row.table or f"{row.section.split(' ')[0]} {row.gpu}"


def published(
    data: Path, times: TimesOf, constants: Calibrations, names: Sequence[str] = PUBLISHED
) -> list[Observed]:
    """Reads the timed runs of other sites.

    data: folder with the tables of runs.
    times: function from a device to its op times.
    constants: constants of the planner, by which a missing micro-batch size is taken as the
        fastest that fits.
    names: names of the files to read.
    """
    rows = [*chain.from_iterable(read_documents(data / name) for name in names)]
    runs = []
    for one in predict_rows(rows, times, constants):
        if one.error is not None and one.case is not None:
            runs.append((one.case, one.row.sec_per_it or 0.0, table_of(one.row)))
    return observe(runs, times)


def documents(path: Path) -> list[tuple[TableRow, Case]]:
    """Returns the timed A100 rows of the BigScience documents dated before LAST_DAY, with their
    cases.
    """
    found = []
    for row in read_documents(path):
        if not row.date or row.date >= LAST_DAY or row.gpu not in ("", "A100-80GB"):
            continue
        if row.sec_per_it is None or row.duplicate_of_line is not None:
            continue
        case = case_of(row)
        if is_possible(case.job, case.layout):
            found.append((row, case))
    return found


def left_out(
    observed: Sequence[Observed],
    rest: dict[str, float],
    key: Callable[[Observed], str] = attrgetter("table"),
) -> FloatArray:
    """Returns ln(predicted / measured) of each run, (observed,), from factors fitted without it.

    key: function from a run to its group, by default its table. The runs of a group are left out of
        the fit together.
    """
    errors = np.empty(len(observed))
    keys = list(map(key, observed))
    for name in sorted(set(keys)):
        pooled = fit_pooled([one for one in observed if key(one) != name], rest)
        for i, one in enumerate(observed):
            if keys[i] == name:
                job = one.case.job
                factors = pooled.of(job.stack, architecture(job.cluster.device))
                errors[i] = log_errors([one], factors)[0]
    return errors


def fit_stacks(observed: Sequence[Observed], rest: dict[str, float]) -> Pooled:
    """Fits the effects of stacks, and the scatter of their times, for known and unknown stacks.

    rest: constants that do not differ between stacks, by name.
    """
    pooled = fit_pooled(observed, rest)
    outside = [one for one in observed if one.table != SITE]
    by_table = left_out(observed, rest)
    by_stack = left_out(observed, rest, attrgetter("case.job.stack"))
    known = scatter_beyond(outside, by_table[: len(outside)])
    unknown = scatter_beyond(outside, by_stack[: len(outside)])
    return replace(pooled, scatter=known, unknown_scatter=max(known, unknown))


def fit_bridge(path: Path, times: TimesOf, rest: dict[str, float]) -> Pooled:
    """Fits the effects of Megatron-Bridge's release to its published runs.

    The scatter of its times comes from predicting each model with factors fitted without it.

    path: CSV file of the runs.
    rest: constants that do not differ between stacks, by name.
    """
    observed, _ = bridge_runs(path, times)
    scatter = scatter_beyond(observed, left_out(observed, rest))
    provenance = {"release": RELEASE, **_origin(observed, [path])}
    return replace(
        fit_pooled(observed, rest), scatter=scatter, unknown_scatter=scatter, provenance=provenance
    )


def fit_site(
    cases: Sequence[tuple[TableRow, Case]],
    observed: Sequence[Observed],
    times: TimesOf,
    folder: Path,
) -> Calibration:
    """Fits the factors of the documents' site to its runs, by robust least squares of log errors.

    The constants of memory are fitted after that, to the rows that state their memory.

    cases: rows of the documents, with the job and layout of each.
    observed: the same runs, prepared for the fit.
    folder: folder with the tables and contexts.toml.
    """

    def errors(found: Calibration) -> FloatArray:
        return log_errors(observed, found)

    found = _least(errors, _START, SITE_FACTORS)
    stated = [(case, row.mem_gb) for row, case in cases if row.mem_gb]

    def memory_errors(found: Calibration) -> FloatArray:
        predicted = [memory(case.job, case.layout, found).total_gib for case, _ in stated]
        return np.asarray(np.log(predicted) - np.log([gb for _, gb in stated]))

    found = _least(memory_errors, found, _MEMORY_RANGES)
    scatter = float(np.quantile(np.abs(log_errors(observed, found)), 0.9))
    return replace(
        found,
        scatter=scatter,
        memory_scatter=float(np.quantile(np.abs(memory_errors(found)), 0.9)),
        provenance={
            "documents": sorted({document_of(row, folder) for row, _ in cases}),
            "stack": "deepspeed",
            "fitted": [*SITE_FACTORS, *_MEMORY_RANGES],
            "rows_fitted": [row.row_id for row, _ in cases],
        },
    )


def _least(
    errors: Callable[[Calibration], FloatArray],
    start: Calibration,
    ranges: dict[str, tuple[float, float]],
) -> Calibration:
    """Returns the constants that minimize the errors; those not in `ranges` stay as in `start`.

    errors: function from constants to the log error of each run.
    ranges: smallest and largest value of each fitted constant, by name.
    """
    from scipy.optimize import least_squares

    def with_constants(x: FloatArray) -> Calibration:
        clipped = np.clip(np.exp(x), *np.transpose(list(ranges.values()))).tolist()
        return replace(start, **dict(zip(ranges, clipped, strict=True)))

    first = np.log([getattr(start, name) for name in ranges])
    found = least_squares(
        lambda x: errors(with_constants(x)), first, loss="soft_l1", f_scale=_NOISE, diff_step=1e-4
    )
    return with_constants(found.x)


def fit(data: Path, start: Calibrations, times: TimesOf) -> Calibrations:
    """Fits the constants of all stacks and of the site to the tables in the folder `data`.

    start: constants by which missing micro-batch sizes are chosen.
    """
    cases = documents(data / DOCUMENTS)
    own = observe([(case, row.sec_per_it or 0.0, SITE) for row, case in cases], times)
    site = fit_site(cases, own, times, data)
    rest = MEMORY_OF_OTHERS
    observed = [*published(data, times, start), *own]
    origin = _origin(observed, [data / name for name in (DOCUMENTS, *PUBLISHED)])
    provenance = {"script": f"python -m tools.planner_fit {data}", **origin}
    pooled = replace(fit_stacks(observed, rest), provenance=provenance)
    rule = f"as at {SITE}: the same centre and software, nothing fitted to its own rows"
    kin = replace(site, scatter=pooled.unknown_scatter, provenance={"rule": rule})
    bridge = fit_bridge(data / BRIDGE, times, rest)
    stacks = dict.fromkeys(("", *STACKS, *sorted(stack for stack, _ in pooled.groups)))
    return Calibrations(
        {SITE: site, **dict.fromkeys(same_site(SITE), kin)},
        {**pooled.of_every(stacks), **bridge.of_every([STACK])},
        {"": pooled.provenance, STACK: bridge.provenance},
    )


def rest_of(constants: Calibrations) -> dict[str, float]:
    """Returns the constants that do not differ between stacks."""
    return {name: getattr(constants.of_stack("", ""), name) for name in MEMORY_OF_OTHERS}


def _origin(observed: Sequence[Observed], paths: Sequence[Path]) -> dict[str, Any]:
    """Returns the provenance of runs: their tables, their number, and the digests of files."""
    return {
        "tables": sorted({one.table for one in observed}),
        "runs": len(observed),
        "files": {path.name: digest(path) for path in paths},
    }


def write(found: dict[str, Any]) -> Path:
    target = Path(quantbench.planner.__path__[0]) / "planner.json"
    text = json.dumps(found, indent=1, ensure_ascii=False)
    # Lists and objects of plain values take one line each.
    text = re.sub(r"[\[{]\n[^\[\]{}]*[\]}]", lambda leaf: re.sub(r"\s*\n\s*", " ", leaf[0]), text)
    target.write_text(text + "\n", encoding="utf-8")
    return target


if __name__ == "__main__":
    print(f"wrote {write(fit(Path(sys.argv[1]), shipped(), BestTimes()).to_json())}")
