"""Tests whether the rows that `sweep --for aiconfigurator` measures first are a good selection.

The rows come from the table of a serving engine, at the (n, k) and heads of some models. A table is
exported from the first rows, and another one from equally many random rows. Both are compared with
the engine's remaining rows. Run it as `python -m tools.accuracy.planner_order PAGE`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from quantbench.cli.sweep_for import SIZES, planner_groups, spread
from quantbench.importers import aiconfigurator
from quantbench.profile.exporters import export_profile
from quantbench.profile.exporters.options import ExportOptions
from quantbench.workload import Attention
from quantbench.workload.serving import served
from tools.guide.markers import table as markdown
from tools.guide.markers import write_between
from tools.serving_accuracy import few_rows, profile_with

_SYSTEM, _LIBRARY = "h100_sxm", "vllm"
_OPTIONS = ExportOptions(model="llama-3-8b,llama-3-70b", backend=_LIBRARY)
_KINDS = ("gemm", "context_attention", "generation_attention")
_PRODUCTS = ("bf16", "fp8")
#: number of rows of each dtype of products, and of attention
_ROWS = 200
_SEEDS = range(4)


def line_of(work: Any) -> tuple[Any, ...]:
    """Returns what a planner holds fixed while it interpolates in m, or in the number of keys."""
    if isinstance(work, Attention):
        return work.causal, work.heads, work.kv_heads, work.head_dim, work.batch
    return work.dtype, work.n, work.k


def size_of(work: Any) -> int:
    return work.seq_k if isinstance(work, Attention) else work.m


def group_of(work: Any) -> tuple[Any, ...]:
    """Returns the group of `planner_groups` that a workload belongs to."""
    return line_of(work)[:4]


def name_of(work: Any) -> str:
    if isinstance(work, Attention):
        return "prompts" if work.causal else "decoding"
    return f"products {work.dtype}"


def rows_of_models(seed: int) -> list[Any]:
    """Returns the rows of the engine's tables at the (n, k) and heads of the models, shuffled."""
    groups = planner_groups(served("accuracy", _OPTIONS.model, (), ()), _PRODUCTS)
    wanted = {group_of(group[0]) for group in groups}
    found = []
    for kind in _KINDS:
        rows = few_rows(kind, _SYSTEM, _LIBRARY, seed, sys.maxsize)
        found += [row for row in rows if group_of(row.workload) in wanted]
    return found


def in_order(rows: Iterable[Any]) -> list[Any]:
    """Returns the rows in the order of the sweep, without products at sizes that it leaves out."""
    groups: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for row in rows:
        if isinstance(row.workload, Attention) or row.workload.m in SIZES:
            groups[group_of(row.workload)].append(row)
    size = attrgetter("workload.min_bytes")
    return spread([sorted(group, key=size) for group in groups.values()])


def first(rows: Iterable[Any]) -> list[Any]:
    """Returns the first _ROWS products of each dtype, and half as many prompts and decodings."""
    kept: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        alike = kept[name_of(row.workload)]
        most = _ROWS // 2 if isinstance(row.workload, Attention) else _ROWS
        if len(alike) < most:
            alike.append(row)
    return [*chain.from_iterable(kept.values())]


def errors(chosen: Sequence[Any], held_out: Iterable[Any]) -> dict[str, list[float]]:
    """Returns the errors in percent of the table that is exported from rows, by name of the op.

    The times between its rows are interpolated as a planner does.
    """
    profile = profile_with(chosen, _SYSTEM, _LIBRARY, 0)
    lines: dict[tuple[Any, ...], list[tuple[int, float]]] = defaultdict(list)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        export_profile(profile, "aiconfigurator", root, _OPTIONS)
        tables, _ = aiconfigurator.find_tables(
            _SYSTEM, backend=_LIBRARY, version="quantbench", kinds=_KINDS, root=root
        )
        for table in tables:
            for row in aiconfigurator.read_rows(table).rows:
                lines[line_of(row.workload)].append((size_of(row.workload), row.latency_us))
    found: dict[str, list[float]] = defaultdict(list)
    for row in held_out:
        line = sorted(lines.get(line_of(row.workload), ()))
        if line:
            sizes, us = zip(*line, strict=True)
            expected_us = float(np.interp(size_of(row.workload), sizes, us))
            found[name_of(row.workload)].append(100 * abs(expected_us / row.latency_us - 1))
    return found


def main(page: Path) -> None:
    """Writes the table, of means over the seeds, between the markers `order` of a page."""
    figures: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for seed in _SEEDS:
        rows = rows_of_models(seed)
        selections = {"random": first(rows), "chosen": first(in_order(rows))}
        used = {row.workload for chosen in selections.values() for row in chosen}
        held_out = [row for row in rows if row.workload not in used]
        for way, chosen in selections.items():
            for name, off in errors(chosen, held_out).items():
                figures[name, way].append(np.percentile(off, (50, 95)))
            print(f"seed {seed}, {way} rows are judged", flush=True)
    lines: dict[str, list[str]] = {}
    for (name, _), pairs in figures.items():
        median, high = np.mean(pairs, axis=0)
        lines.setdefault(name, [name]).append(f"{median:.1f} / {high:.1f}")
    write_between(page, "order", markdown(["op", "random rows", "first rows"], lines.values()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
