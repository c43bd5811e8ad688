"""A comparison as sentences and a table for people, and as plain objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from quantbench.analysis.compare import FIGURES_METHOD, METHOD, VERDICTS, Compared, Comparison
from quantbench.report.words import printable
from quantbench.store.record import Place
from quantbench.units import latency, percent

_STYLE = {"slower": "bold red", "faster": "green", "same": "", "unclear": "yellow"}
# Rows shown of each verdict; --json has them all.
_MOST_SHOWN = {"slower": 30, "faster": 15, "unclear": 8, "same": 0}
_MOST_LOST_SHOWN = 5


def differences_lines(comparison: Comparison) -> list[str]:
    """What is not the same in the two runs, the obstacles first."""
    origins = {run.info.origin for run in (comparison.a, comparison.b)} - {"measured"}
    lines = [f"{origin.upper()} DATA: nothing here was measured on this machine" for origin in sorted(origins)]
    lines += [f"compared although they should not be: {text}" for text in comparison.obstacles]
    if not comparison.differences:
        return [*lines, "device, versions, options and environment are the same"]
    return [*lines, *(str(difference) for difference in comparison.differences)]


def method_lines(comparison: Comparison) -> list[str]:
    """How the verdicts were reached, and what bounds them."""
    moved = comparison.wander
    lines = [METHOD if comparison.options.noise is None else FIGURES_METHOD]
    margin = f"changes within {percent(comparison.tolerance)} do not count"
    known = [noise for noise in (moved.noise_a, moved.noise_b) if noise is not None]
    if not known:
        lines.append(f"{margin} (--margin); how far the runs wander by themselves is not known: no repeated reference")
    else:
        noises = " and ".join("unknown" if n is None else percent(n) for n in (moved.noise_a, moved.noise_b))
        repeats = f"{moved.repeats_a} and {moved.repeats_b} repeats"
        wandered = f"the reference point wandered by {noises} ({repeats})"
        if comparison.tolerance > comparison.options.margin:
            lines.append(
                f"{margin}: {wandered}, and the worst of {len(comparison.points)} points may by chance reach that"
            )
        else:
            lines.append(f"{margin} (--margin); {wandered}")
    if moved.shift is not None:
        lines.append(f"the reference point itself: {_ratio_words(moved.shift)}")
    return lines


def result_lines(comparison: Comparison) -> list[str]:
    """Counts, the middle of all, and what could not be compared."""
    lines = []
    if comparison.points:
        counted = ", ".join(f"{number} {verdict}" for verdict, number in comparison.counts.items())
        middle = _ratio_words(comparison.median_ratio)
        lines.append(f"{len(comparison.points)} points: {counted}; median {middle}")
    if comparison.lost:
        lines.append(f"measured in A and failing in B: {len(comparison.lost)}")
        lines += [
            f"  {place_words(lost.place)}: {lost.kind}: {printable(lost.message)}" for lost in comparison.lost[:5]
        ]
    for number, there, elsewhere in ((comparison.only_a, "A", "B"), (comparison.only_b, "B", "A")):
        if number:
            lines.append(f"of {there}, without a partner in {elsewhere}: {number}")
    return lines


def _ratio_words(ratio: float) -> str:
    if abs(ratio - 1) < 0.0005:
        return "B takes as long as A"
    if ratio > 1:
        return f"B takes {percent(ratio - 1)} longer"
    return f"B takes {percent(1 - ratio)} less time"


def place_words(place: Place) -> str:
    """`qkv hidden=4096 tp=8`."""
    return " ".join([place.op, *(f"{name.replace('_', '-')}={value}" for name, value in place.axes.items())])


def comparison_table(comparison: Comparison) -> Table | None:
    """The points that changed, the worst first; None when there is nothing to show."""
    shown: list[Compared] = []
    left: list[str] = []
    for verdict in VERDICTS:
        own = [point for point in comparison.points if point.verdict == verdict]
        shown += own[: _MOST_SHOWN[verdict]]
        if len(own) > _MOST_SHOWN[verdict] > 0:
            left.append(f"{len(own) - _MOST_SHOWN[verdict]} more {verdict}")
    if not shown:
        return None
    table = Table(header_style="bold", box=None, pad_edge=False, caption_justify="left")
    table.add_column("point", overflow="fold")
    several = any(point.a.provider != point.b.provider for point in shown)
    if several:
        table.add_column("providers", overflow="fold")
    for name in ("A", "B", "B / A", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("why", overflow="fold")
    for point in shown:
        table.add_row(
            Text(printable(place_words(point.place))),
            *([Text(printable(f"{point.a.provider} → {point.b.provider}"))] if several else []),
            latency(point.a_us),
            latency(point.b_us),
            f"{point.ratio:.3f}",
            _interval(point),
            Text(point.verdict, style=_STYLE[point.verdict]),
            Text(printable(point.why)),
        )
    if left:
        table.caption = Text("… and " + ", ".join(left) + " (--json has all)")
    return table


def _interval(point: Compared) -> str:
    return "–" if point.low is None or point.high is None else f"{point.low:.3f} … {point.high:.3f}"


def comparison_to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, with units in the names."""
    moved = comparison.wander
    return {
        "a": str(comparison.a.folder),
        "b": str(comparison.b.folder),
        "device": comparison.b.info.device.name,
        "obstacles": list(comparison.obstacles),
        "differences": [asdict(difference) for difference in comparison.differences],
        "method": METHOD if comparison.options.noise is None else FIGURES_METHOD,
        "margin": comparison.options.margin,
        "tolerance": comparison.tolerance,
        "reference": {**asdict(moved)},
        "counts": comparison.counts,
        "regressions": comparison.regressions,
        "median_ratio": comparison.median_ratio if comparison.points else None,
        "only_a": comparison.only_a,
        "only_b": comparison.only_b,
        "points": _points_to_json(comparison.points),
        "lost": [
            {
                "op": lost.place.op, "axes": lost.place.axes, "key": lost.record.key,
                "provider": lost.record.provider, "kind": lost.kind, "message": lost.message,
            }
            for lost in comparison.lost
        ],
    }  # fmt: skip


def _points_to_json(points: Sequence[Compared]) -> list[dict[str, Any]]:
    return [
        {
            "op": point.place.op, "axes": point.place.axes, "workload": str(point.b.workload),
            "key_a": point.a.key, "key_b": point.b.key, "provider_a": point.a.provider, "provider_b": point.b.provider,
            "a_us": point.a_us, "b_us": point.b_us, "ratio": point.ratio, "low": point.low, "high": point.high,
            "p": point.p, "verdict": point.verdict, "why": point.why,
        }
        for point in points
    ]  # fmt: skip
