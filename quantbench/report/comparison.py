"""Presents a comparison of two runs as lines of text and a table for the terminal."""

from __future__ import annotations

from itertools import chain

from rich.table import Table
from rich.text import Text

from quantbench.analysis.compare import METHOD, Compared, Comparison, Matched
from quantbench.analysis.significance import reference_medians
from quantbench.analysis.summary import floor_lines
from quantbench.errors import printable
from quantbench.measurement import Measurement
from quantbench.report.terminal import filled, plain_table, shown
from quantbench.store.record import Failed, GridPosition
from quantbench.units import axis_words, latency, listed, percent

_STYLE = {"slower": "bold red", "faster": "green", "same": "", "unclear": "yellow"}
# Maximum number of rows for each kind of change. --json has all of them.
_MOST_SHOWN = {"slower": 30, "faster": 15, "unclear": 8, "same": 0}
# Maximum number of points shown that failed only in the second run.
_MOST_LOST_SHOWN = 5
# Maximum number of reference points named. A run on several devices has several.
_MOST_REFERENCES_SHOWN = 2


def differences_lines(comparison: Comparison) -> list[str]:
    """Lists imported or simulated data, obstacles, and differences between the runs' metadata.

    Obstacles are reasons against comparing these runs, which the user has overridden.
    """
    origins = {comparison.a.info.origin, comparison.b.info.origin}
    lines = []
    for origin in sorted(origins - {"measured"}):
        lines.append(f"{origin.upper()} DATA: nothing here was measured on this machine")
    for obstacle in comparison.obstacles:
        lines.append(f"compared although they should not be: {obstacle}")
    same = ("device, versions, options and environment are the same",)
    return [*lines, *map(str, comparison.differences or same)]


def method_lines(comparison: Comparison) -> list[str]:
    """Describes the statistical method, the margin and the reference point's noise."""
    moved = comparison.wander
    lines = [METHOD]
    margin = f"changes within {percent(comparison.tolerance)} do not count"
    noise_a = shown(moved.noise_a, percent, "unknown")
    noise_b = shown(moved.noise_b, percent, "unknown")
    noises = f"{noise_a} and {noise_b}"
    repeats = f"{moved.repeats_a} and {moved.repeats_b} repeats"
    wandered = f"the reference point wandered by {noises} ({repeats})"
    if moved.noise_a is None and moved.noise_b is None:
        unknown = "how far the runs wander by themselves is not known: no repeated reference"
        lines.append(f"{margin} (--margin); {unknown}")
    elif comparison.tolerance > comparison.options.margin:
        worst = f"the worst of {len(comparison.points)} points may by chance reach that"
        lines.append(f"{margin}: {wandered}, and {worst}")
    else:
        lines.append(f"{margin} (--margin); {wandered}")
    if moved.shift is not None:
        name = _reference_words(comparison)
        lines.append(f"the reference point itself ({name}): {_ratio_words(moved.shift)}")
    return lines


def _reference_words(comparison: Comparison) -> str:
    """Names the reference points that both runs measured: `torch.mm on gemm 64×64×64 bf16 nn`."""
    of_a = reference_medians(comparison.a.records)
    names: dict[str, None] = {}
    for record in comparison.b.records:
        if record.role == "reference" and record.key in of_a:
            names[f"{record.provider} on {record.workload}"] = None
    return listed(tuple(names), _MOST_REFERENCES_SHOWN)


def result_lines(comparison: Comparison) -> list[str]:
    """Formats the number of points by kind of change, and the median ratio of all points.

    Further lines are about short times near the floor, the time of an empty kernel, and about
    points that could not be compared.
    """
    times: list[tuple[float, Measurement]] = []
    for point in comparison.points:
        times += point.times
    lines = floor_lines(times)
    if comparison.points:
        counted = ", ".join(f"{number} {verdict}" for verdict, number in comparison.counts.items())
        middle = _ratio_words(comparison.median_ratio)
        lines.append(f"{len(comparison.points)} points: {counted}; median {middle}")
        if comparison.counts["unclear"] == len(comparison.points):
            lines.append("nothing could be judged: every point is unclear")
    if comparison.lost:
        lines.append(f"measured in A and failing in B: {len(comparison.lost)}")
        for lost in comparison.lost[:_MOST_LOST_SHOWN]:
            where = f"{grid_position_words(lost.place)} by {_provider_words(lost)}"
            lines.append(printable(f"  {where}: {failure_words(lost)}"))
    for number, there, elsewhere in ((comparison.only_a, "A", "B"), (comparison.only_b, "B", "A")):
        if number:
            lines.append(f"of {there}, without a partner in {elsewhere}: {number}")
    return lines


def failure_words(lost: Matched) -> str:
    """Formats the second run's failure at a point that the first run measured."""
    assert isinstance(lost.b.outcome, Failed)
    return f"{lost.b.outcome.error}: {lost.b.outcome.message}"


def _ratio_words(ratio: float) -> str:
    """Formats a ratio of times (B over A) as a sentence about B."""
    if abs(ratio - 1) < 0.0005:  # would be shown as 0.0 %
        return "B takes as long as A"
    if ratio > 1:
        return f"B takes {percent(ratio - 1)} longer"
    return f"B takes {percent(1 - ratio)} less time"


def grid_position_words(place: GridPosition) -> str:
    """Formats a grid point: `qkv hidden=4096 tp=8`."""
    return " ".join([place.op, *axis_words(place.axes)])


def _provider_words(point: Matched) -> str:
    """Formats the provider of a point, or both if they differ: `torch.mm → mine:Gemm`."""
    return " → ".join(dict.fromkeys(point.providers))


def comparison_table(comparison: Comparison) -> Table | None:
    """Builds the terminal table of the points that changed or are unclear.

    Slower points come first. Returns None if there is nothing to show.
    """
    shown = []
    left = []
    for change, most in _MOST_SHOWN.items():
        own = [point for point in comparison.points if point.change == change]
        shown += own[:most]
        if 0 < most < len(own):
            left.append(f"{len(own) - most} more {change}")
    if not shown:
        return None
    lines = list(map(_cells, shown))
    if len(set(chain.from_iterable(point.providers for point in comparison.points))) == 1:
        for cells in lines:
            del cells["providers"]
    table = plain_table(*filled(lines), fold=("point", "providers"))
    if left:
        table.caption_justify = "left"
        table.caption = Text("… and " + ", ".join(left) + " (--json has all)")
    return table


def _cells(point: Compared) -> dict[str, str | Text]:
    """Returns the cells of one line of the table by column name."""
    interval = "–"
    if point.low is not None and point.high is not None:
        interval = f"{point.low:.3f} … {point.high:.3f}"
    return {
        "point": Text(printable(grid_position_words(point.place))),
        "providers": Text(printable(_provider_words(point))),
        ">A": latency(point.a_us),
        ">B": latency(point.b_us),
        ">B / A": f"{point.ratio:.3f}",
        ">95 % interval": interval,
        "change": Text(point.change, style=_STYLE[point.change]),
        "why": Text(printable(point.why)),
    }
