"""The first answer of a report: sizes that are slower than their neighbours, by how much, and the better sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from quantbench.analysis.neighbours import NEAR, BadSize, against_doubles, bad_sizes, curves_of_rows
from quantbench.analysis.summary import Row
from quantbench.report.lead_causes import Causes
from quantbench.report.words import printable
from quantbench.units import latency, percent

# Sizes in the table of the first screen; the rest follows in the table of all sizes.
_MOST_ROWS = 12
# From this many curves on, sizes are told over all of them together.
_MANY_CURVES = 13
# A cause is told for a size over many shapes if it explains at least this share of them.
_COMMON_CAUSE = 0.5


@dataclass(frozen=True)
class LeadRow:
    """A line of the first table, in words. bar: the loss over the worst loss of the table. interval: of the loss, or
    nothing. details: the other axes and the provider, or how many of the shapes."""

    size: str
    loses: str
    interval: str
    bar: float
    instead: str
    why: str
    trust: str
    details: str


@dataclass(frozen=True)
class Lead:
    """axis: the one the table is about. sentence: the answer in one line. rows: the worst sizes, ascending. more: how
    many bad sizes are not in the table. several: the rows are over many shapes each. bad: what the rows were made
    of."""

    axis: str
    sentence: str
    rows: tuple[LeadRow, ...] = ()
    more: int = 0
    several: bool = False
    bad: tuple[BadSize, ...] = ()


def lead_of(rows: Sequence[Row], axes: Sequence[str], why: Causes) -> Lead:
    """The first screen of a run with at least one row."""
    by_axis = {axis: bad_sizes(rows, axis) for axis in axes if any(axis in row.axes for row in rows)}
    axis = max(by_axis, key=lambda a: (sum(bad.loss for bad in by_axis[a]), len({row.axes.get(a) for row in rows})))
    bad = by_axis[axis]
    curves = curves_of_rows(rows, axis)
    name = axis.replace("_", "-")
    sizes = sorted({row.axes[axis] for curve in curves for row in curve})
    if not bad:
        if not any(_close(a, b) for curve in curves for a, b in pairwise(curve)):
            return _of_far_sizes(rows, axis, name, sizes, len(curves), why)
        nothing = f"{name}: none of {len(sizes)} sizes between {sizes[0]} and {sizes[-1]} loses against a smaller one"
        return Lead(axis, f"{nothing} within {percent(NEAR)}")
    if len(curves) >= _MANY_CURVES:
        return _over_shapes(axis, name, bad, len(curves), why)
    worst = bad[0]
    sentence = (
        f"{name}: {len({b.size for b in bad})} of {len(sizes)} sizes lose against a smaller size within "
        f"{percent(NEAR)}; the worst, {worst.size}, loses {percent(worst.loss)} against {worst.better.axes[axis]}"
    )
    stretches = sorted(_stretches(bad, curves), key=lambda s: -max(b.loss for b in s))
    shown = sorted(stretches[:_MOST_ROWS], key=lambda s: s[0].size)
    alone = len({row.provider for row in rows}) == 1
    lines = tuple(_row(s, why, _others(rows, axis), alone, worst.loss) for s in shown)
    return Lead(axis, sentence, lines, len(stretches) - len(shown), bad=bad)


def _stretches(bad: Sequence[BadSize], curves: Sequence[tuple[Row, ...]]) -> list[list[BadSize]]:
    """Bad sizes that follow each other on a curve and lose against the same better one, taken together."""
    of_row = {id(b.row): b for b in bad}
    found: list[list[BadSize]] = []
    for curve in curves:
        last: BadSize | None = None
        for row in curve:
            one = of_row.get(id(row))
            if one is not None and last is not None and one.better is last.better:
                found[-1].append(one)
            elif one is not None:
                found.append([one])
            last = one
    return found


def _of_far_sizes(rows: Sequence[Row], axis: str, name: str, sizes: Sequence[int], curves: int, why: Causes) -> Lead:
    """Sizes without close neighbours are compared with half and twice the size."""
    if len(sizes) == 1:
        only = f"{name}: only {sizes[0]} was measured; a comparison needs a second size"
        return Lead(axis, only)
    bad = against_doubles(rows, axis)
    if not bad:
        return Lead(axis, f"{name}: the {len(sizes)} sizes do not differ by more than their intervals")
    if curves >= _MANY_CURVES:
        return _over_shapes(axis, name, bad, curves, why)
    worst = bad[0]
    sentence = (
        f"{name}: {worst.size} is the worst of {len(sizes)} sizes: it loses {percent(worst.loss)} against "
        f"{worst.better.axes[axis]} (no two sizes are within {percent(NEAR)}; compared with half and twice the size)"
    )
    shown = sorted(bad[:_MOST_ROWS], key=lambda b: (b.size, -b.loss))
    alone = len({row.provider for row in rows}) == 1
    lines = tuple(_row([b], why, _others(rows, axis), alone, worst.loss) for b in shown)
    return Lead(axis, sentence, lines, len(bad) - len(shown), bad=bad)


def _close(a: Row, b: Row) -> bool:
    """Whether the two differ by at most NEAR in the axis that they differ in."""
    return all(b.axes[name] * (1 - NEAR) <= value for name, value in a.axes.items())


def _others(rows: Sequence[Row], axis: str) -> frozenset[str]:
    """The other axes along which the rows differ."""
    names = {name for row in rows for name in row.axes} - {axis}
    return frozenset(name for name in names if len({row.axes.get(name) for row in rows}) > 1)


def _row(stretch: Sequence[BadSize], why: Causes, others: frozenset[str], alone: bool, most: float) -> LeadRow:
    """others: axes whose values are told. alone: no other provider is in the run, so that its name tells nothing. most:
    the largest loss of the table."""
    worst = max(stretch, key=lambda b: b.loss)
    first, last = stretch[0], stretch[-1]
    size = str(first.size) if first is last else f"{first.size} … {last.size}"
    interval = ""
    if worst.low is not None and worst.high is not None:
        interval = f"{percent(max(worst.low, 0.0))} to {percent(worst.high)}"
        if first is not last:
            interval += f" at {worst.size}"
    instead = str(worst.better.axes[worst.axis])
    if last.up_to is not None:
        instead += f", or {last.up_to} for the same {latency(last.row.latency_us)}"
    held = [f"{name.replace('_', '-')} = {value}" for name, value in worst.row.axes.items() if name in others]
    return LeadRow(
        size=size, loses=percent(worst.loss), interval=interval, bar=worst.loss / most, instead=instead,
        why=printable(why.words(worst)), trust=max(max(b.row.grade.letter, b.better.grade.letter) for b in stretch),
        details=", ".join([*([] if alone else [worst.row.provider]), *held]),
    )  # fmt: skip


def _over_shapes(axis: str, name: str, bad: Sequence[BadSize], curves: int, why: Causes) -> Lead:
    """One line per size over all shapes that have it: number of shapes that lose, median and largest loss."""
    by_size: dict[int, list[BadSize]] = {}
    for one in bad:
        by_size.setdefault(one.size, []).append(one)
    ranked = sorted(by_size, key=lambda size: -sum(b.loss for b in by_size[size]))
    shown = sorted(ranked[:_MOST_ROWS])
    first = by_size[ranked[0]]
    sentence = (
        f"{name}: the worst size is {ranked[0]}: {len(first)} of {curves} shapes lose there, "
        f"median {percent(median(b.loss for b in first))}"
    )
    most = max(median(b.loss for b in by_size[size]) for size in shown)
    several_formats = len({b.culprit.workload.dtype for b in bad}) > 1
    rows = tuple(_row_over_shapes(size, by_size[size], curves, why, most, several_formats) for size in shown)
    return Lead(axis, sentence, rows, len(by_size) - len(shown), several=True, bad=tuple(bad))


def _row_over_shapes(
    size: int, bad: Sequence[BadSize], curves: int, causes_of: Causes, most: float, several_formats: bool
) -> LeadRow:
    middle = median(b.loss for b in bad)
    worst = max(bad, key=lambda b: b.loss)
    held = " ".join(f"{name}={value}" for name, value in worst.row.axes.items() if name != worst.axis)
    if several_formats:
        held += f" in {worst.culprit.workload.dtype}"
    instead = Counter(b.better.axes[b.axis] for b in bad).most_common(1)[0][0]
    causes = Counter(causes_of.kind(b) for b in bad)
    cause, times = causes.most_common(1)[0]
    why = cause if times > _COMMON_CAUSE * len(bad) else ", ".join(f"{c} in {n}" for c, n in causes.most_common(2))
    return LeadRow(
        size=str(size), loses=percent(middle), interval="", bar=middle / most, instead=str(instead), why=printable(why),
        trust=max(b.row.grade.letter for b in bad),
        details=f"{len(bad)} of {curves} shapes; worst {percent(worst.loss)} at {held}",
    )  # fmt: skip
