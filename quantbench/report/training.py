"""Shows imported training logs as a table and a page: throughput of each layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table as RichTable

from quantbench.errors import printable
from quantbench.importers.training_run import TrainingSummary, read_training
from quantbench.report.content import Section, Table
from quantbench.report.page import Page, Written, write_page
from quantbench.report.terminal import plain_table
from quantbench.units import with_interval


def _cells(summaries: Sequence[TrainingSummary]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the column names of the table, as of `plain_table`, and its rows."""
    rows = []
    for s in summaries:
        tokens = "–"
        if (
            s.tokens_per_s is not None
            and s.tokens_per_s_low is not None
            and s.tokens_per_s_high is not None
        ):
            tokens = with_interval(s.tokens_per_s, (s.tokens_per_s_high - s.tokens_per_s_low) / 2)
        loss = "–" if s.last_loss is None else f"{s.first_loss:.3g} → {s.last_loss:.3g}"
        cells: dict[str, object] = {
            "log": s.name,
            ">GPUs": s.gpus,
            ">TP": s.tp,
            ">PP": s.pp,
            ">MBS": s.mbs,
            ">GBS": s.gbs,
            ">iterations": s.iterations,
            ">restarts": s.restarts,
            ">sec/it": f"{s.sec_per_it:.4g}",
            ">tokens/s": tokens,
            ">hardware TFLOP/s": None if s.tflops is None else f"{s.tflops:.1f}",
            ">loss": loss + (f" ({s.nan_losses} nan)" if s.nan_losses else ""),
        }
        rows.append(tuple("–" if cell is None else str(cell) for cell in cells.values()))
    return tuple(cells), rows


def training_table(summaries: Sequence[TrainingSummary]) -> RichTable:
    """Builds the table for the terminal, one line per log."""
    return plain_table(*_cells(summaries))


def write_training_report(folders: Sequence[Path], output: Path) -> Written:
    """Writes the page of imported training logs.

    folders: one folder per imported log.
    output: see `page.write_page`.
    Raises StoreError if a log cannot be read or the page cannot be written.
    """
    summaries = [read_training(folder) for folder in folders]
    summaries.sort(key=lambda s: (s.gbs, s.gpus or 0, s.layout, s.name))
    return write_page(output, _page(summaries, folders))


def fastest(summaries: Sequence[TrainingSummary]) -> str:
    """Returns a message on the layout with most tokens per second per GPU; empty if none is
    known.
    """
    known = [
        (s.tokens_per_s / s.gpus, s) for s in summaries if s.tokens_per_s is not None and s.gpus
    ]
    if not known:
        return ""
    rate, best = max(known, key=lambda pair: pair[0])
    mbs = "" if best.mbs is None else f", MBS {best.mbs}"
    return f"most tokens per GPU: {rate:.0f} a second with {best.layout}{mbs}, GBS {best.gbs} on {best.gpus} GPUs"


def _page(summaries: Sequence[TrainingSummary], folders: Sequence[Path]) -> Page:
    head, rows = _cells(summaries)
    table = Table(head, tuple(tuple(map(printable, row)) for row in rows), whole=frozenset({0}))
    left_out = [
        printable(f"{s.name}: {count} lines left out: {reason}", 300)
        for s in summaries
        for reason, count in s.left_out.items()
    ]
    note = "Medians with their 95 % intervals, without the first iteration after each start."
    best = fastest(summaries)
    logs = Section(
        "logs",
        "Throughput by layout",
        f"{best}. {note}" if best else note,
        table=table,
        lines=tuple(left_out),
    )
    names = ", ".join(printable(folder.name) for folder in folders[:3]) + (
        "" if len(folders) <= 3 else " and more"
    )
    return Page(
        title="Training throughput by layout",
        subtitle=f"{len(summaries)} training logs: {names}",
        banners=[
            ("imported", "IMPORTED", "From training logs; nothing here was measured by quantbench.")
        ],
        facts=[
            ("logs", str(len(summaries))),
            ("iterations", str(sum(s.iterations for s in summaries))),
        ],
        sections=[logs],
    )
