"""`quantbench report` for imported training logs: one page with throughput by layout over the number of GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from quantbench import __version__
from quantbench.importers.training_run import TrainingSummary, read_training
from quantbench.report.cards import Gallery
from quantbench.report.content import Banner, Card, Page, Section, Table
from quantbench.report.page import Written, page_place, write_page
from quantbench.report.training import HEAD, draw_throughput, training_cells
from quantbench.report.words import printable


def write_training_report(folders: Sequence[Path], output: Path) -> Written:
    """Write the page and its picture into the folder `output`, which is made if need be; or, where that is a name that
    ends in .html, the page alone. folders: of imported training logs.

    Raises StoreError where one cannot be read or the page cannot be written."""
    summaries = sorted((read_training(folder) for folder in folders), key=_order)
    with page_place(output) as (path, gallery):
        write_page(path, _page(summaries, folders, gallery))
    return Written(path, tuple(file for file in gallery.files if os.path.exists(file)), None)


def fastest(summaries: Sequence[TrainingSummary]) -> str:
    """The layout with most tokens per second and GPU, in a sentence; nothing where none is known."""
    known = [(s.tokens_per_s / s.gpus, s) for s in summaries if s.tokens_per_s is not None and s.gpus]
    if not known:
        return ""
    rate, best = max(known, key=lambda pair: pair[0])
    mbs = "" if best.mbs is None else f", MBS {best.mbs}"
    return f"most tokens per GPU: {rate:.0f} a second with {best.layout}{mbs}, GBS {best.gbs} on {best.gpus} GPUs"


def _order(summary: TrainingSummary) -> tuple[int, int, str, str]:
    return (summary.gbs, summary.gpus or 0, summary.layout, summary.name)


def _page(summaries: Sequence[TrainingSummary], folders: Sequence[Path], gallery: Gallery) -> Page:
    sections = []
    if any(s.gpus is not None and s.tokens_per_s is not None for s in summaries):
        path = gallery.path("throughput", "layout")
        draw_throughput(summaries, path)
        alt = "tokens per second over the number of GPUs, a bar per layout of TP and PP"
        note = (
            "Medians with their 95 % intervals, without the first iteration after each start; a panel per batch size."
        )
        card = Card("", gallery.picture(path, alt), note)
        sections.append(Section("throughput", "Throughput by layout", fastest(summaries), (card,)))
    rows = tuple(tuple(map(printable, training_cells(s))) for s in summaries)
    table = Table(HEAD, rows, frozenset(range(1, len(HEAD))), frozenset({0}))
    left_out = tuple(
        printable(f"{s.name}: {count} lines left out: {reason}", 300)
        for s in summaries for reason, count in s.left_out.items()
    )  # fmt: skip
    sections.append(Section("logs", "Logs", table=table, lines=left_out))
    names = ", ".join(printable(folder.name) for folder in folders[:3]) + ("" if len(folders) <= 3 else " and more")
    return Page(
        title="Training throughput by layout",
        subtitle=f"{len(summaries)} training logs: {names}",
        banners=(Banner("imported", "IMPORTED", "From training logs; nothing here was measured by quantbench."),),
        facts=(("logs", str(len(summaries))), ("iterations", str(sum(s.iterations for s in summaries)))),
        lead=None, explanation="", lead_picture=None, sections=tuple(sections),
        made_by=f"Made by quantbench {__version__}. Nothing on this page is loaded from anywhere else.",
    )  # fmt: skip
