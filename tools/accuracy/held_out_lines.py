"""Tests how much the rows that `profile blindspots` chooses improve a planner's interpolation.

Of a measured table, only the rows at powers of two in m count as known. Further rows are added, at
random or chosen with a model of the known rows, and the errors on the remaining rows are compared.
Run it as `python -m tools.accuracy.held_out_lines RUN docs/exporting.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits  # comes with scikit-learn, which needs it

from quantbench.cli.profile import profile_of
from quantbench.errors import InputError
from quantbench.importers.aiconfigurator import systems_folder
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.libraries import system_of
from quantbench.profile.exporters.options import Exported, ExportOptions, dtype_of, products
from quantbench.profile.linear_interpolation import Site, interpolated_us, through_rows
from quantbench.profile.profile import Profile
from quantbench.units import percent
from tools.accuracy.aiconfigurator_engine import engine
from tools.accuracy.scoring import BoolArray, FloatArray, IntArray, cliff_pairs, rises
from tools.accuracy.tables import GemmTable
from tools.guide.markers import table as markdown_table
from tools.guide.markers import write_between

#: bound of the expected relative error, above which rows are added
BOUND = 0.05

_MODEL_ROWS = 1000
_FEWEST_MODEL_ROWS = 20
_SEEDS = (0, 1, 2)
_LARGE_M = 128
_LARGE_NK = 1024


def is_thin(table: GemmTable) -> BoolArray:
    """Returns whether m is a power of two in each row, (rows,)."""
    m = table.sizes["m"]
    return np.asarray((m & (m - 1)) == 0, dtype=np.bool_)


def sites_of(table: GemmTable) -> list[IntArray]:
    """Returns the indices of the rows of each pair (n, k).

    table: rows of the same pair must follow each other.
    """
    _, n, k = table.shapes
    ends = np.flatnonzero((np.diff(n) != 0) | (np.diff(k) != 0)) + 1
    return np.split(np.arange(len(table)), ends)


#: function from the rows of a table, and queries, to the times that a planner interpolates for the
#: queries, (queries,) microseconds
Consumer = Callable[[GemmTable, GemmTable], FloatArray]


def straight_lines(rows: GemmTable, queries: GemmTable) -> FloatArray:
    """Interpolates linearly in m at the (n, k) of each query; returns times, (queries,)
    microseconds.

    A query whose (n, k) no row has is nan.
    """
    out = np.full(len(queries), np.nan)
    known_m, known_n, known_k = rows.shapes
    m, n, k = queries.shapes
    for site in sites_of(rows):
        asked = (n == known_n[site[0]]) & (k == known_k[site[0]])
        out[asked] = interpolated_us(m[asked], known_m[site], rows.latency_us[site])
    return out


def consumer_of(device: str, dtype: str) -> tuple[Consumer, str]:
    """Returns the interpolation to test, and its description.

    It is that of aiconfigurator's engine, or `straight_lines` if the engine is not installed or
    lacks the device or dtype. Another system cannot replace a missing one, because the engine
    clamps times to the roofline of its system.

    device: slug of the GPU.
    """
    system = system_of(device)
    if systems_folder() is None or system == device or dtype not in ("bf16", "fp16"):
        words = "straight lines in m at each (n, k), as aiconfigurator's engine draws them"
        return straight_lines, words

    def ask(rows: GemmTable, queries: GemmTable) -> FloatArray:
        return engine((system, "vllm", "quantbench"), rows, queries).latency_us

    package = f"aiconfigurator-core {version('aiconfigurator-core')}"
    return ask, f"{package}, asked through its own engine"


def held_out(table: GemmTable, expected_us: FloatArray, consumer: Consumer) -> list[list[str]]:
    """Returns the rows of the page's table, headings first: one for each way to choose rows.

    table: measured GEMMs, sorted by n, k and m.
    expected_us: (rows,) times that a model of the rows at powers of two predicts, microseconds.
    consumer: interpolation to test.
    Raises InputError if too few rows, or all, are at powers of two in m.
    """
    m, n, k = table.shapes
    thin = is_thin(table)
    if thin.sum() < _FEWEST_MODEL_ROWS or thin.all():
        few = f"{int(thin.sum())} of {len(thin)} rows on powers of two in m"
        raise InputError("held-out lines", few, "some on and some off")
    # Rows from the first to the last row at a power of two of their (n, k).
    inside = np.zeros(len(thin), dtype=np.bool_)
    chosen = thin.copy()
    modelled_us = table.latency_us.copy()
    for rows in sites_of(table):
        seen = np.flatnonzero(thin[rows])
        if len(seen) < 2:
            continue
        rows = rows[seen[0] : seen[-1] + 1]
        inside[rows] = True
        seen_us = table.latency_us[rows][thin[rows]]
        moved = through_rows(m[rows], expected_us[rows], thin[rows], seen_us)
        site = Site(int(n[rows[0]]), int(k[rows[0]]), m[rows], moved, thin[rows])
        added = rows[site.rows_to_add(BOUND)]
        chosen[added] = True
        modelled_us[added] = moved[np.isin(rows, added)]
    extra = int(chosen.sum() - thin.sum())
    drawn = []
    for seed in _SEEDS:
        random = thin.copy()
        others = np.flatnonzero(inside & ~thin)
        random[np.random.default_rng(seed).choice(others, extra, replace=False)] = True
        drawn.append(random)

    unseen = ~np.logical_or.reduce([thin, chosen, *drawn]) & inside
    large = (m >= _LARGE_M) & (n >= _LARGE_NK) & (k >= _LARGE_NK)
    pairs = cliff_pairs(*table.shapes)
    at_cliffs = np.zeros(len(thin), dtype=np.bool_)
    at_cliffs[np.stack(pairs)[:, rises(table.latency_us, pairs)]] = True
    at_cliffs &= ~thin & inside
    parts = {
        "rows in none of the tables": unseen,
        "of them m ≥ 128 and n, k ≥ 1024": unseen & large,
        "both sides of measured cliffs": at_cliffs,
    }

    def line(
        name: str, rows_of: Sequence[BoolArray], times_us: FloatArray = table.latency_us
    ) -> list[str]:
        """Returns one row of the page's table: the errors, averaged over several sets of rows.

        rows_of: masks of the rows that each set has.
        times_us: times of all rows, which the interpolation takes as measured.
        """
        timed = replace(table, latency_us=times_us)
        predicted_us = np.stack([consumer(timed.take(rows), table) for rows in rows_of])
        errors = np.abs(predicted_us / table.latency_us - 1.0)
        cells = []
        for part in parts.values():
            if not part.any():
                cells.append("–")
                continue
            median, high = np.percentile(errors[:, part], (50, 95), axis=1).mean(axis=1)
            cells.append(f"{100 * median:.1f} / {100 * high:.1f}")
        return [name, f"{int(rows_of[0].sum()):,}", *cells]

    name = f"and {extra:,} rows"
    counts = [f"{words} ({int(part.sum()):,})" for words, part in parts.items()]
    return [
        ["rows of the table", "rows", *counts],
        line("powers of two in m", [thin]),
        line(f"{name} at random", drawn),
        line(f"{name} chosen", [chosen]),
        line(f"{name} chosen, modelled, not measured", [chosen], modelled_us),
    ]


def measured_products(profile: Profile) -> GemmTable:
    """Returns the GEMMs of a profile's most frequent dtype, sorted by n, k and m."""
    dtype = dtype_of(profile, ExportOptions())
    table = products(profile, ExportOptions(dtype=dtype), Exported())
    order = np.lexsort((table["m"], table["k"], table["n"]))
    sizes = {name: table[name][order] for name in "mnk"}
    return GemmTable(profile.device.name, dtype, sizes, table["latency_us"][order])


def thin_model(table: GemmTable) -> GemmModel:
    """Fits a model to at most _MODEL_ROWS of the rows at powers of two in m.

    The model's prior excludes this GPU's family.
    """
    thin = np.flatnonzero(is_thin(table))
    if len(thin) > _MODEL_ROWS:
        drawn = np.random.default_rng(0).choice(len(thin), _MODEL_ROWS, replace=False)
        thin = thin[np.sort(drawn)]
    return table.take(thin).fit("family-out")


def main(run: Path, page: Path) -> None:
    """Runs the experiment, and writes its table between the markers `blindspots` of a page.

    run: folder of the run with the measured GEMMs.
    page: Markdown file.
    """
    profile = profile_of([run], fit=False)
    table = measured_products(profile)
    consumer, who = consumer_of(table.gpu, table.dtype)
    model = thin_model(table)
    head, *rows = held_out(table, table.ask(model).latency_us, consumer)
    fitted = f"model fitted to {model.rows:,} rows of the powers of two"
    origins = "; ".join(run.source or run.run_id for run in profile.provenance.runs)
    notes = [
        f"- Interpolated by {who}.",
        f"- Bound for the expected error: {percent(BOUND)}; {fitted}, started from other GPU "
        "families.",
        f"- {table.gpu}: {len(table):,} products of {table.dtype} from {origins}.",
    ]
    write_between(page, "blindspots", "\n".join([markdown_table(head, rows), *notes, ""]))


if __name__ == "__main__":
    with threadpool_limits(1):
        main(*map(Path, sys.argv[1:]))
