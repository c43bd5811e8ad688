"""Writes the ranking of layouts as an HTML page: time against memory of all layouts, and the parts of the best five.

Entry point: `write_plan_page`. Used by the command `plan` (`--page`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantbench.planner.memory import GIB
from quantbench.planner.predict import Prediction
from quantbench.report.canvas import PALETTE, figure, plain
from quantbench.report.content import Gallery, Section, Table
from quantbench.report.page import Page, Written, write_page

_BEST = 5
_LISTED = 50
# Slower layouts would squeeze the interesting ones.
_SLOWEST = 4.0


def frontier(ranked: Sequence[Prediction]) -> list[Prediction]:
    """Returns the layouts that no other beats in both time and memory, fastest first. ranked: fastest first."""
    found: list[Prediction] = []
    for p in ranked:
        if not found or p.memory.total < found[-1].memory.total:
            found.append(p)
    return found


def write_plan_page(
    output: Path, title: str, ranked: Sequence[Prediction], limit_bytes: float, lines: Sequence[str]
) -> Written:
    """Writes the page of a ranking that has at least one layout.

    output: see `page.write_page`.
    limit_bytes: usable memory of a GPU.
    lines: model, machines, assumptions and constants, as text.
    """

    def make(gallery: Gallery) -> Page:
        scatter, bars = gallery.path("time", "memory"), gallery.path("parts")
        _draw_memory(ranked, limit_bytes, scatter)
        _draw_parts(ranked[:_BEST], bars)
        best = frontier(ranked)
        cards = (
            gallery.card(scatter, "seconds per iteration over memory, a point per layout"),
            gallery.card(bars, "seconds of each part of an iteration, a bar per layout"),
        )
        return Page(
            title="Layouts of a training job",
            subtitle=title,
            banners=[("warning", "PREDICTED", "Times and memory are predicted; nothing here was measured.")],
            facts=[("layouts that fit", str(len(ranked))), ("on the frontier", str(len(best)))],
            sections=(
                Section("layouts", "Time and memory", "", cards, lines=tuple(lines)),
                Section("frontier", "Layouts on the frontier of time and memory", table=_table(best)),
                Section("fastest", "Fastest layouts", table=_table(ranked[:_LISTED]), folded=True),
            ),
        )

    return write_page(output, make)


def _table(shown: Sequence[Prediction]) -> Table:
    rows = []
    for p in shown:
        sec, warning = p.iteration.sec, "close to the memory limit" if p.tight else ""
        times = (f"{value:.2f}" for value in (sec.mid, sec.low, sec.high))
        rows.append((str(p.layout), *times, f"{100 * p.mfu:.0f}", f"{p.memory.total_gib:.0f}", warning))
    head = ("layout", ">s per iteration", ">from", ">to", ">MFU %", ">GiB", "")
    return Table(head, tuple(rows), whole=frozenset({0}))


def _draw_memory(ranked: Sequence[Prediction], limit_bytes: float, path: Path) -> None:
    shown = [p for p in ranked if p.sec_per_it <= _SLOWEST * ranked[0].sec_per_it]
    best = [p for p in frontier(ranked) if p in shown]
    with figure(path, (9.0, 5.0)) as panels:
        panel = panels[0][0]
        for stage in sorted({p.layout.zero for p in shown}):
            points = [p for p in shown if p.layout.zero == stage]
            panel.scatter(
                [p.memory.total_gib for p in points], [p.sec_per_it for p in points], s=12, alpha=0.6,
                label=f"ZeRO-{stage}",
            )  # fmt: skip
        panel.plot(
            [p.memory.total_gib for p in best], [p.sec_per_it for p in best], color="black", marker="o", lw=1, ms=4,
            label="frontier",
        )  # fmt: skip
        panel.axvline(limit_bytes / GIB, color="black", ls="--", lw=1, label="memory limit")
        panel.set_xlabel("GiB on the fullest GPU")
        panel.set_ylabel("seconds per iteration")
        panel.set_ylim(bottom=0)


def _draw_parts(best: Sequence[Prediction], path: Path) -> None:
    with figure(path, (9.0, 1.5 + 0.6 * len(best))) as panels:
        panel, names = panels[0][0], [plain(f"{n}. {p.layout}") for n, p in enumerate(best, start=1)]
        left = [0.0] * len(best)
        for part in best[0].iteration.parts:
            widths = [p.iteration.parts[part] for p in best]
            if max(w / p.sec_per_it for w, p in zip(widths, best, strict=True)) >= 0.005:
                # Colours repeat after the palette's last, with a hatch.
                hatch = "///" if len(panel.containers) >= len(PALETTE) else None
                panel.barh(names, widths, left=left, label=part.replace("_", " "), hatch=hatch)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        panel.invert_yaxis()
        panel.set_xlabel("seconds per iteration")
