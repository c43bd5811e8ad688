"""Throughput of training runs by layout, as a picture: groups of TP and PP over the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from quantbench.importers.training_run import TrainingSummary
from quantbench.report.canvas import canvas, plain, save
from quantbench.units import with_interval

_WIDTH_OF_A_GROUP = 0.8


HEAD = (
    "log", "GPUs", "TP", "PP", "MBS", "GBS", "iterations", "restarts", "sec/it", "tokens/s", "TFLOPs", "loss",
)  # fmt: skip


def training_table(summaries: Sequence[TrainingSummary]) -> Table:
    """One line per log."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column(HEAD[0], no_wrap=True)
    for name in HEAD[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(*training_cells(summary))
    return table


def training_cells(summary: TrainingSummary) -> tuple[str, ...]:
    """The cells under HEAD of one log."""
    s = summary
    tokens = "–"
    if s.tokens_per_s is not None and s.tokens_per_s_low is not None and s.tokens_per_s_high is not None:
        tokens = with_interval(s.tokens_per_s, (s.tokens_per_s_high - s.tokens_per_s_low) / 2)
    loss = "–" if s.last_loss is None else f"{s.first_loss:.3g} → {s.last_loss:.3g}"
    return (
        s.name, _or_dash(s.gpus), _or_dash(s.tp), _or_dash(s.pp), _or_dash(s.mbs), str(s.gbs), str(s.iterations),
        str(s.restarts), f"{s.sec_per_it:.4g}", tokens, "–" if s.tflops is None else f"{s.tflops:.1f}",
        loss + (f" ({s.nan_losses} nan)" if s.nan_losses else ""),
    )  # fmt: skip


def draw_throughput(summaries: Sequence[TrainingSummary], path: Path) -> None:
    """Write a PNG: tokens per second over the number of GPUs, a bar per layout, a panel per batch size, with the 95 %
    interval of the median. Logs without a number of GPUs or without tokens are left out."""
    drawn = [s for s in summaries if s.gpus is not None and s.tokens_per_s is not None]
    batches = sorted({s.gbs for s in drawn}) or [0]
    layouts = sorted({s.layout for s in drawn})
    with canvas(1, len(batches), 1.5 + 4.5 * len(batches), 4.2, sharey=True) as (figure, panels):
        for panel, gbs in zip(panels[0], batches, strict=True):
            mine = [s for s in drawn if s.gbs == gbs]
            gpus = sorted({s.gpus for s in mine if s.gpus is not None})
            width = _WIDTH_OF_A_GROUP / max(1, len(layouts))
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
        save(figure, path)


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)
