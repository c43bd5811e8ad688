"""Shows a comparison of two runs (`analysis.compare`) as text and a table, as JSON, and as JUnit
XML.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from quantbench.analysis.compare import CHANGES, METHOD, Comparison, Matched
from quantbench.analysis.summary import floor_lines
from quantbench.errors import printable
from quantbench.junit import Case, write_suite
from quantbench.report.source import dashed
from quantbench.report.terminal import plain_table
from quantbench.store.record import Failed, Place
from quantbench.units import latency, percent

_STYLE = {"slower": "bold red", "faster": "green", "same": "", "unclear": "yellow"}
# Maximum number of rows per kind of change; --json has them all.
_MOST_SHOWN = {"slower": 30, "faster": 15, "unclear": 8, "same": 0}
_MOST_LOST_SHOWN = 5


def differences_lines(comparison: Comparison) -> list[str]:
    """Lists the differences between the two runs besides the times, obstacles to a comparison
    first.
    """
    origins = {run.info.origin for run in (comparison.a, comparison.b)} - {"measured"}
    lines = [
        f"{origin.upper()} DATA: nothing here was measured on this machine"
        for origin in sorted(origins)
    ]
    lines += [f"compared although they should not be: {text}" for text in comparison.obstacles]
    if not comparison.differences:
        return [*lines, "device, versions, options and environment are the same"]
    return [*lines, *(str(difference) for difference in comparison.differences)]


def method_lines(comparison: Comparison) -> list[str]:
    """Describes the statistical method, the margin and the noise of the reference point."""
    moved = comparison.wander
    lines = [METHOD]
    margin = f"changes within {percent(comparison.tolerance)} do not count"
    noises = " and ".join(
        "unknown" if n is None else percent(n) for n in (moved.noise_a, moved.noise_b)
    )
    wandered = f"the reference point wandered by {noises} ({moved.repeats_a} and {moved.repeats_b} repeats)"
    if moved.noise_a is None and moved.noise_b is None:
        lines.append(
            f"{margin} (--margin); how far the runs wander by themselves is not known: no repeated reference"
        )
    elif comparison.tolerance > comparison.options.margin:
        worst = f"the worst of {len(comparison.points)} points may by chance reach that"
        lines.append(f"{margin}: {wandered}, and {worst}")
    else:
        lines.append(f"{margin} (--margin); {wandered}")
    if moved.shift is not None:
        lines.append(f"the reference point itself: {_ratio_words(moved.shift)}")
    return lines


def result_lines(comparison: Comparison) -> list[str]:
    """Formats the counts, the median ratio, the floor of short times, and the points that could not
    be compared.
    """
    lines = floor_lines(time for point in comparison.points for time in point.times)
    if comparison.points:
        counted = ", ".join(f"{number} {verdict}" for verdict, number in comparison.counts.items())
        middle = _ratio_words(comparison.median_ratio)
        lines.append(f"{len(comparison.points)} points: {counted}; median {middle}")
    if comparison.lost:
        lines.append(f"measured in A and failing in B: {len(comparison.lost)}")
        lines += [
            f"  {place_words(lost.place)}: {printable(_failure(lost))}"
            for lost in comparison.lost[:_MOST_LOST_SHOWN]
        ]
    for number, there, elsewhere in ((comparison.only_a, "A", "B"), (comparison.only_b, "B", "A")):
        if number:
            lines.append(f"of {there}, without a partner in {elsewhere}: {number}")
    return lines


def _failure(lost: Matched) -> str:
    assert isinstance(lost.b.outcome, Failed)
    return f"{lost.b.outcome.kind}: {lost.b.outcome.message}"


def _ratio_words(ratio: float) -> str:
    if abs(ratio - 1) < 0.0005:
        return "B takes as long as A"
    if ratio > 1:
        return f"B takes {percent(ratio - 1)} longer"
    return f"B takes {percent(1 - ratio)} less time"


def place_words(place: Place) -> str:
    """Formats a place: `qkv hidden=4096 tp=8`."""
    return " ".join([place.op, *(f"{dashed(name)}={value}" for name, value in place.axes.items())])


def comparison_table(comparison: Comparison) -> Table | None:
    """Builds the terminal table of the points that changed, worst first; None if there is nothing
    to show.
    """
    by_change = {change: [p for p in comparison.points if p.change == change] for change in CHANGES}
    shown = [point for change, own in by_change.items() for point in own[: _MOST_SHOWN[change]]]
    if not shown:
        return None
    several = any(point.a.provider != point.b.provider for point in shown)
    providers = [Text(printable(f"{point.a.provider} → {point.b.provider}")) for point in shown]
    columns: dict[str, Sequence[str | Text]] = {
        "point": [Text(printable(place_words(point.place))) for point in shown],
        **({"providers": providers} if several else {}),
        ">A": [latency(point.a_us) for point in shown],
        ">B": [latency(point.b_us) for point in shown],
        ">B / A": [f"{point.ratio:.3f}" for point in shown],
        ">95 % interval": [
            "–" if p.low is None or p.high is None else f"{p.low:.3f} … {p.high:.3f}" for p in shown
        ],
        "change": [Text(point.change, style=_STYLE[point.change]) for point in shown],
        "why": [Text(printable(point.why)) for point in shown],
    }
    table = plain_table(columns, fold=("point", "providers"))
    more = {
        change: len(own) - _MOST_SHOWN[change]
        for change, own in by_change.items()
        if _MOST_SHOWN[change]
    }
    left = [f"{number} more {change}" for change, number in more.items() if number > 0]
    if left:
        table.caption_justify = "left"
        table.caption = Text("… and " + ", ".join(left) + " (--json has all)")
    return table


def write_junit(comparison: Comparison, path: Path) -> None:
    """Writes the comparison as JUnit XML, one case per point.

    Slower points and points that now fail are failures; unclear points are skipped, with the
    reason. Raises StoreError if the file cannot be written.
    """
    cases = []
    for point in comparison.points:
        interval = (
            "no interval"
            if point.low is None
            else f"95 % interval {point.low:.4f} to {point.high:.4f}"
        )
        text = f"{point.change}: {latency(point.a_us)} → {latency(point.b_us)}, ratio {point.ratio:.4f}, {interval}"
        text = f"{text}; {point.why}" if point.why else text
        failure, skipped = "slower" if point.change == "slower" else "", point.change == "unclear"
        provider, name = f"quantbench.{point.b.provider}", place_words(point.place)
        cases.append(Case(provider, name, text, point.b_us / 1e6, failure, skipped))
    for lost in comparison.lost:
        text = f"measured before, fails now: {_failure(lost)}"
        provider, name = f"quantbench.{lost.b.provider}", place_words(lost.place)
        cases.append(Case(provider, name, text, failure="lost"))
    properties = [
        ("a", comparison.a.folder),
        ("b", comparison.b.folder),
        ("tolerance", comparison.tolerance),
    ]
    differences = [("difference", difference) for difference in comparison.differences]
    write_suite(
        path,
        f"quantbench compare {comparison.b.info.device.name}",
        cases,
        [*properties, *differences],
    )
