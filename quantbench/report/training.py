"""Shows imported training logs as a table and a page: throughput of each layout."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path

from rich.table import Table as RichTable

from quantbench.errors import printable
from quantbench.importers.training_run import TrainingSummary, read_training
from quantbench.report.content import Section, Table
from quantbench.report.page import Page, Written, write_page
from quantbench.report.terminal import filled, plain_table, shown
from quantbench.units import with_interval


def _cells(log: TrainingSummary) -> dict[str, str]:
    """Returns the cells of one log by column name; `–` is what is not known."""
    tokens = None
    low = log.tokens_per_s_low
    high = log.tokens_per_s_high
    if log.tokens_per_s is not None and low is not None and high is not None:
        tokens = with_interval(log.tokens_per_s, (high - low) / 2)
    loss = "–"
    if log.last_loss is not None:
        loss = f"{log.first_loss:.3g} → {log.last_loss:.3g}"
    if log.nan_losses:
        loss += f" ({log.nan_losses} nan)"
    cells = {
        "log": log.name,
        ">GPUs": log.gpus,
        ">TP": log.tp,
        ">PP": log.pp,
        ">MBS": log.mbs,
        ">GBS": log.gbs,
        ">iterations": log.iterations,
        ">restarts": log.restarts,
        ">sec/it": f"{log.sec_per_it:.4g}",
        ">tokens/s": tokens,
        ">hardware TFLOP/s": shown(log.tflops, "{:.1f}".format, "–"),
        ">loss": loss,
    }
    return {name: shown(cell, unknown="–") for name, cell in cells.items()}


def training_table(summaries: Sequence[TrainingSummary]) -> RichTable:
    """Builds the table for the terminal, one line per log."""
    return plain_table(*filled(list(map(_cells, summaries))))


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
    highest = -inf
    words = ""
    for one in summaries:
        if one.tokens_per_s is None or not one.gpus or one.tokens_per_s / one.gpus <= highest:
            continue
        highest = one.tokens_per_s / one.gpus
        mbs = "" if one.mbs is None else f", MBS {one.mbs}"
        layout = f"{one.layout}{mbs}, GBS {one.gbs} on {one.gpus} GPUs"
        words = f"most tokens per GPU: {highest:.0f} a second with {layout}"
    return words


def _page(summaries: Sequence[TrainingSummary], folders: Sequence[Path]) -> Page:
    head, rows = filled(list(map(_cells, summaries)))
    table = Table(head, tuple(tuple(map(printable, row)) for row in rows), whole=frozenset({0}))
    left_out = []
    for log in summaries:
        for reason, count in log.left_out.items():
            left_out.append(printable(f"{log.name}: {count} lines left out: {reason}", 300))
    note = "Medians with their 95 % intervals, without the first iteration after each start."
    best = fastest(summaries)
    logs = Section(
        "logs",
        "Throughput by layout",
        f"{best}. {note}" if best else note,
        table=table,
        lines=tuple(left_out),
    )
    names = ", ".join(printable(folder.name) for folder in folders[:3])
    if len(folders) > 3:
        names += " and more"
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
