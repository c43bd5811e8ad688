"""Many curves at once: how the time jumps between neighbouring sizes, over all of a table's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from quantbench.analysis.curves import Curve
from quantbench.report.canvas import CLIFF_COLOUR, canvas, heading, legend_below, plain, save

# Sizes further apart than this are no neighbours: between them the work itself grows.
_NEIGHBOURS = 1.1
# Fewer curves than this have no spread worth drawing.
_FEWEST_CURVES = 8
# Of more pairs than this, those that jump most are drawn.
_MOST_PAIRS = 28


@dataclass(frozen=True)
class StepSpread:
    """From `before` to `after` along an axis, over `curves` curves: quantiles of the ratio of the times per unit of
    work (1.3: 30 % longer), and the share of curves that jump by more than 5 %."""

    before: int
    after: int
    curves: int
    low: float
    median: float
    high: float
    share_above: float


def step_spreads(curves: Sequence[Curve], smallest_work: float = 0.0) -> tuple[StepSpread, ...]:
    """Every pair of neighbouring sizes that enough of the curves have, ascending.

    smallest_work: curves whose largest product has fewer FLOPs are left out.
    """
    ratios: dict[tuple[int, int], list[float]] = {}
    for curve in curves:
        if curve.points[-1].workload.flops < smallest_work:
            continue
        for a, b in pairwise(curve.points):
            before, after = a.axes[curve.axis], b.axes[curve.axis]
            if after <= _NEIGHBOURS * before:
                work = b.workload.flops / a.workload.flops if a.workload.flops else 1.0
                ratios.setdefault((before, after), []).append(b.latency_us / a.latency_us / work)
    found = []
    for (before, after), own in sorted(ratios.items()):
        if len(own) >= _FEWEST_CURVES:
            low, middle, high = (float(q) for q in np.quantile(own, (0.1, 0.5, 0.9)))
            found.append(StepSpread(before, after, len(own), low, middle, high, float(np.mean(np.array(own) > 1.05))))
    return tuple(found)


def draw_step_spreads(spreads: Sequence[StepSpread], axis: str, path: Path, caption: str) -> None:
    """Write a PNG: for each pair of neighbours the median jump and the range from 10 to 90 % of the curves. caption:
    see `canvas.heading`."""
    chosen = sorted(spreads, key=lambda s: -s.median)[:_MOST_PAIRS]
    chosen.sort(key=lambda s: s.before)
    with canvas(1, 1, 6.8, 3.9) as (figure, panels):
        panel = panels[0][0]
        places = range(len(chosen))
        panel.axhline(0, color="0.4", linewidth=0.8)
        panel.vlines(
            places, [100 * (s.low - 1) for s in chosen], [100 * (s.high - 1) for s in chosen], color="0.6", linewidth=5,
            label="10 % to 90 % of the shapes",
        )  # fmt: skip
        panel.plot(
            places, [100 * (s.median - 1) for s in chosen], "o", color=CLIFF_COLOUR, markersize=5, label="median"
        )
        panel.set_xticks(list(places), [f"{s.before}→{s.after}" for s in chosen], rotation=90, fontsize=7.5)
        panel.set_ylabel("time per unit of work, change in %")
        panel.set_xlabel(plain(axis.replace("_", "-")))
        panel.grid(visible=False, axis="x")
        legend_below(figure, [panel])
        heading(figure, f"jumps of the time over {axis.replace('_', '-')}", caption)
        save(figure, path)
