"""Writes the accuracy table of docs/planning.md: `python -m tools.planner_accuracy tests/data docs`.

Rows of the BigScience documents are split by whether the constants were fitted to them. No constant was fitted to the
published runs. Run by maintainers after `tools.planner_fit`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quantbench.latency.model_times import BestTimes
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import Calibrations, shipped
from quantbench.planner.row_results import RowResult, Summary, predict_rows, summarize
from quantbench.planner.rows import read_table
from tools.guide.markers import fill, table

TABLES = ("bloom_tables.csv", "published_layouts.csv")
PAGE = "planning.md"
_HEAD = ["rows", "number", "mean error", "median", "bias", "rank correlation", "inside the interval"]
#: groups of the BigScience rows: (name, predicate of a result and the fitted row ids)
_DOCUMENTS: tuple[tuple[str, Callable[[RowResult, set[str]], bool]], ...] = (
    ("documents, days fitted to", lambda r, fitted: r.row.row_id in fitted),
    ("documents, 02-25 (nothing fitted)", lambda r, fitted: r.row.date >= "02-25"),
    ("documents, all A100 rows", lambda r, fitted: bool(r.row.date)),
    ("documents, V100", lambda r, fitted: r.row.section.startswith("BNB")),
)
#: groups of published runs: (name, prefix of the section, GPU)
_PUBLISHED = (
    ("Megatron-LM 22 B to 1 T, A100", "Megatron-LM", "A100-80GB"),
    ("MT-NLG 530 B, DeepSpeed, A100", "MT-NLG", "A100-80GB"),
    ("MPT, FSDP, A100 80 GB", "MPT", "A100-80GB"),
    ("MPT, FSDP, A100 40 GB", "MPT", "A100-40GB"),
    ("MPT, FSDP, H100", "MPT", "H100"),
)


@dataclass(frozen=True)
class Group:
    """Accuracy of a group of rows. inside: share of measured times within the predicted interval."""

    name: str
    summary: Summary
    inside: float


def groups(data: Path, times: TimesOf, calibrations: Calibrations) -> Iterator[Group]:
    """Yields the groups of both tables in the folder `data`."""
    documents, published = (predict_rows(read_table(data / name), times, calibrations) for name in TABLES)
    fitted = {row_id for site in calibrations.sites.values() for row_id in site.provenance.get("rows_fitted", ())}
    for name, keep in _DOCUMENTS:
        yield _group(name, [r for r in documents if keep(r, fitted)])
    for name, begins, gpu in _PUBLISHED:
        yield _group(name, [r for r in published if r.row.section.startswith(begins) and r.row.gpu == gpu])


def _group(name: str, results: list[RowResult]) -> Group:
    counted = [r for r in results if r.error is not None]
    spans = [(r.prediction.iteration.sec, r.row.sec_per_it or 0) for r in counted if r.prediction]
    inside = [span.low <= measured <= span.high for span, measured in spans]
    return Group(name, summarize(results), sum(inside) / len(inside) if inside else float("nan"))


def accuracy_table(found: list[Group]) -> str:
    """Formats the groups as a Markdown table."""
    rows = []
    for group in found:
        s = group.summary
        errors = [f"{s.mape:.1f} %", f"{s.median:.1f} %", f"{s.bias:+.1f} %"]
        rows.append([group.name, str(s.rows), *errors, f"{s.spearman:.2f}", f"{group.inside:.0%}"])
    return table(_HEAD, rows)


def main() -> None:
    """Writes the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help=f"folder with {' and '.join(TABLES)}")
    parser.add_argument("docs", type=Path, help=f"folder with {PAGE}")
    arguments = parser.parse_args()
    page = arguments.docs / PAGE
    found = accuracy_table(list(groups(arguments.data, BestTimes(), shipped())))
    page.write_text(fill(page.read_text(encoding="utf-8"), {"accuracy": found}), encoding="utf-8")
    print(found, end="")


if __name__ == "__main__":
    main()
