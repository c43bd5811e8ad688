"""Shows imported training logs as a table, a plot and a page: throughput by layout over the number of GPUs.

Entry points: `write_training_report` and `fastest`, used by the command `report`; `draw_throughput`, used by the
command `import`; `training_table`, used by both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table as RichTable

from quantbench.errors import printable
from quantbench.importers.training_run import TrainingSummary, read_training
from quantbench.report.canvas import figure, plain
from quantbench.report.content import Gallery, Section, Table
from quantbench.report.page import Page, Written, write_page
from quantbench.report.terminal import plain_table
from quantbench.units import with_interval

_WIDTH_OF_A_GROUP = 0.8


def _cells(summaries: Sequence[TrainingSummary]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the column names of the table, as of `plain_table`, and its rows."""
    rows = []
    for s in summaries:
        tokens = "–"
        if s.tokens_per_s is not None and s.tokens_per_s_low is not None and s.tokens_per_s_high is not None:
            tokens = with_interval(s.tokens_per_s, (s.tokens_per_s_high - s.tokens_per_s_low) / 2)
        loss = "–" if s.last_loss is None else f"{s.first_loss:.3g} → {s.last_loss:.3g}"
        cells: dict[str, object] = {
            "log": s.name, ">GPUs": s.gpus, ">TP": s.tp, ">PP": s.pp, ">MBS": s.mbs, ">GBS": s.gbs,
            ">iterations": s.iterations, ">restarts": s.restarts, ">sec/it": f"{s.sec_per_it:.4g}",
            ">tokens/s": tokens, ">TFLOPs": None if s.tflops is None else f"{s.tflops:.1f}",
            ">loss": loss + (f" ({s.nan_losses} nan)" if s.nan_losses else ""),
        }  # fmt: skip
        rows.append(tuple("–" if cell is None else str(cell) for cell in cells.values()))
    return tuple(cells), rows


def training_table(summaries: Sequence[TrainingSummary]) -> RichTable:
    """Builds the table for the terminal, one line per log."""
    return plain_table(*_cells(summaries))


def draw_throughput(summaries: Sequence[TrainingSummary], path: Path) -> None:
    """Writes a PNG: tokens per second over the number of GPUs, a bar per layout, a panel per global batch size.

    Bars are medians with 95 % intervals. Logs without number of GPUs or tokens per second are left out.
    """
    drawn = [s for s in summaries if s.gpus is not None and s.tokens_per_s is not None]
    batches = sorted({s.gbs for s in drawn}) or [0]
    layouts = sorted({s.layout for s in drawn})
    width = _WIDTH_OF_A_GROUP / max(1, len(layouts))
    size_in = (1.5 + 4.5 * len(batches), 4.2)
    with figure(path, size_in, columns=len(batches), legend=False, sharey=True) as panels:
        for panel, gbs in zip(panels[0], batches, strict=True):
            mine = [s for s in drawn if s.gbs == gbs]
            gpus = sorted({s.gpus for s in mine if s.gpus is not None})
            for number, layout in enumerate(layouts):
                bars = [s for s in mine if s.layout == layout]
                at = [gpus.index(s.gpus or 0) + (number - (len(layouts) - 1) / 2) * width for s in bars]
                heights = [s.tokens_per_s or 0.0 for s in bars]
                low = [h - (s.tokens_per_s_low or h) for h, s in zip(heights, bars, strict=True)]
                high = [(s.tokens_per_s_high or h) - h for h, s in zip(heights, bars, strict=True)]
                panel.bar(at, heights, width, yerr=(low, high), capsize=2, label=plain(layout), error_kw={"lw": 1})
            panel.set_xticks(range(len(gpus)), [str(g) for g in gpus])
            panel.set_xlabel("GPUs")
            panel.set_title(f"global batch {gbs}", loc="left", fontweight="bold")
        panels[0][0].set_ylabel("tokens per second")
        if layouts:
            panels[0][0].legend(fontsize=8)


def write_training_report(folders: Sequence[Path], output: Path) -> Written:
    """Writes the page of imported training logs.

    folders: one folder per imported log.
    output: see `page.write_page`.
    Raises StoreError if a log cannot be read or the page cannot be written.
    """
    summaries = [read_training(folder) for folder in folders]
    summaries.sort(key=lambda s: (s.gbs, s.gpus or 0, s.layout, s.name))
    return write_page(output, lambda gallery: _page(summaries, folders, gallery))


def fastest(summaries: Sequence[TrainingSummary]) -> str:
    """Returns a message on the layout with most tokens per second per GPU; empty if none is known."""
    known = [(s.tokens_per_s / s.gpus, s) for s in summaries if s.tokens_per_s is not None and s.gpus]
    if not known:
        return ""
    rate, best = max(known, key=lambda pair: pair[0])
    mbs = "" if best.mbs is None else f", MBS {best.mbs}"
    return f"most tokens per GPU: {rate:.0f} a second with {best.layout}{mbs}, GBS {best.gbs} on {best.gpus} GPUs"


def _page(summaries: Sequence[TrainingSummary], folders: Sequence[Path], gallery: Gallery) -> Page:
    sections = []
    if any(s.gpus is not None and s.tokens_per_s is not None for s in summaries):
        path = gallery.path("throughput", "layout")
        draw_throughput(summaries, path)
        note = (
            "Medians with their 95 % intervals, without the first iteration after each start; a panel per batch size."
        )
        alt = "tokens per second over the number of GPUs, a bar per layout of TP and PP"
        card = gallery.card(path, alt, note=note)
        sections.append(Section("throughput", "Throughput by layout", fastest(summaries), (card,)))
    head, rows = _cells(summaries)
    table = Table(head, tuple(tuple(map(printable, row)) for row in rows), whole=frozenset({0}))
    left_out = [
        printable(f"{s.name}: {count} lines left out: {reason}", 300)
        for s in summaries
        for reason, count in s.left_out.items()
    ]
    sections.append(Section("logs", "Logs", table=table, lines=tuple(left_out)))
    names = ", ".join(printable(folder.name) for folder in folders[:3]) + ("" if len(folders) <= 3 else " and more")
    return Page(
        title="Training throughput by layout",
        subtitle=f"{len(summaries)} training logs: {names}",
        banners=[("imported", "IMPORTED", "From training logs; nothing here was measured by quantbench.")],
        facts=[("logs", str(len(summaries))), ("iterations", str(sum(s.iterations for s in summaries)))],
        sections=sections,
    )
