"""Builds the first screen of a report: sizes with a lower rate than a smaller one nearby, why, and
the better sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from quantbench.analysis.check import RunCheck
from quantbench.analysis.neighbours import NEAR, BadSize, bad_sizes_on, curves_of_rows
from quantbench.analysis.summary import LayerRow
from quantbench.errors import printable
from quantbench.report.source import dashed
from quantbench.units import latency, percent

# Maximum number of rows in the table of the first screen; the table of all sizes has the rest.
_MOST_ROWS = 12
# From this many curves on, each row summarizes one size over all curves.
_MANY_CURVES = 13
# Share of the shapes above which the cause of a size over many shapes is given alone.
_COMMON_CAUSE = 0.5


@dataclass(frozen=True)
class SlowSize:
    """A formatted row of the first table.

    size, loses, instead, why, trust: cells of the row.
    interval: interval of the loss, or "".
    bar: loss over the largest loss in the table, 0 to 1, for the bar behind the cell.
    details: provider and other axes, or the number of shapes that lose.
    """

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
    """Content of the first screen.

    sentence: result in one line.
    rows: the worst sizes, ascending.
    more: number of further rows that are not shown.
    ops: what a row sums.
    """

    axis: str
    sentence: str
    rows: tuple[SlowSize, ...] = ()
    more: int = 0
    several: bool = False
    bad: tuple[BadSize, ...] = ()
    ops: str = ""


def lead_of(rows: Sequence[LayerRow], axes: Sequence[str], check: RunCheck) -> Lead:
    """Builds the first screen of a run. If no two sizes are close, sizes are compared with half and
    twice the size.

    axes: axes of the run; the one with the largest total loss is shown.
    """
    curves_by_axis = {
        axis: curves_of_rows(rows, axis) for axis in axes if any(axis in row.axes for row in rows)
    }
    by_axis = {axis: bad_sizes_on(curves, axis) for axis, curves in curves_by_axis.items()}
    axis = max(
        by_axis,
        key=lambda a: (sum(bad.loss for bad in by_axis[a]), len({row.axes.get(a) for row in rows})),
    )
    bad, curves = by_axis[axis], curves_by_axis[axis]
    name = dashed(axis)
    sizes = sorted({row.axes[axis] for curve in curves for row in curve})
    near = bool(bad) or any(
        all(b.axes[name] * (1 - NEAR) <= value for name, value in a.axes.items())
        for curve in curves
        for a, b in pairwise(curve)
    )
    if not near and len(sizes) == 1:
        return Lead(axis, f"{name}: only {sizes[0]} was measured; a comparison needs a second size")
    if not near:
        bad = bad_sizes_on(curves_of_rows(rows, axis), axis, doubles=True)
    if not bad and not near:
        return Lead(
            axis, f"{name}: the {len(sizes)} sizes do not differ by more than their intervals"
        )
    if not bad:
        nothing = f"{name}: none of {len(sizes)} sizes between {sizes[0]} and {sizes[-1]} loses against a smaller one"
        return Lead(axis, f"{nothing} within {percent(NEAR)}")
    if len(curves) >= _MANY_CURVES:
        return _over_shapes(axis, bad, len(curves), check)
    worst, loss, better = bad[0].size, percent(bad[0].loss), bad[0].better.axes[axis]
    if near:
        stretches = sorted(_stretches(bad, curves), key=lambda s: -max(b.loss for b in s))
        sentence = (
            f"{name}: {len({b.size for b in bad})} of {len(sizes)} sizes lose against a smaller size within "
            f"{percent(NEAR)}; the worst, {worst}, loses {loss} against {better}"
        )
    else:
        stretches = [[one] for one in bad]
        sentence = (
            f"{name}: {worst} is the worst of {len(sizes)} sizes: it loses {loss} against {better} "
            f"(no two sizes are within {percent(NEAR)}; compared with half and twice the size)"
        )
    shown = sorted(stretches[:_MOST_ROWS], key=lambda s: s[0].size)
    others = {name for row in rows for name in row.axes} - {axis}
    varied = {name for name in others if len({row.axes.get(name) for row in rows}) > 1}
    several_providers = len({row.provider for row in rows}) > 1
    lines = tuple(_row(s, check, varied, several_providers, bad[0].loss) for s in shown)
    return Lead(axis, sentence, lines, len(stretches) - len(shown), bad=bad)


def _stretches(
    bad: Sequence[BadSize], curves: Sequence[tuple[LayerRow, ...]]
) -> list[list[BadSize]]:
    """Groups adjacent bad sizes of a curve that lose against the same better one."""
    of_row = {id(one.row): one for one in bad}
    found: list[list[BadSize]] = []
    for curve in curves:
        for better, same in groupby(
            map(of_row.get, map(id, curve)), key=lambda one: one and id(one.better)
        ):
            if better is not None:
                found.append([one for one in same if one is not None])
    return found


def _row(
    stretch: Sequence[BadSize],
    check: RunCheck,
    varied: set[str],
    several_providers: bool,
    most: float,
) -> SlowSize:
    """Formats one bad size, or adjacent ones, as a row.

    varied: axes whose values are shown in the details.
    most: the largest loss of the table.
    """
    worst = max(stretch, key=lambda b: b.loss)
    first, last = stretch[0], stretch[-1]
    cause = check.explain(worst).words
    interval = ""
    if worst.low is not None and worst.high is not None:
        interval = f"{percent(max(worst.low, 0.0))} to {percent(worst.high)}"
        if first is not last:
            interval += f" at {worst.size}"
    instead = str(worst.better.axes[worst.axis])
    if last.up_to is not None:
        instead += f", or {last.up_to} for the same {latency(last.row.latency_us)}"
    held = [f"{dashed(name)} = {value}" for name, value in worst.row.axes.items() if name in varied]
    return SlowSize(
        size=str(first.size) if first is last else f"{first.size} … {last.size}",
        loses=percent(worst.loss),
        interval=interval,
        bar=worst.loss / most,
        instead=instead,
        why=printable(f"{worst.culprit.op}: {cause}" if len(worst.row.points) > 1 else cause),
        trust=max(max(b.row.grade.letter, b.better.grade.letter) for b in stretch),
        details=", ".join([*([worst.row.provider] if several_providers else []), *held]),
    )


def _over_shapes(axis: str, bad: Sequence[BadSize], curves: int, check: RunCheck) -> Lead:
    """Builds one row per size over all shapes: number of shapes that lose, median and largest
    loss.
    """
    by_size: dict[int, list[BadSize]] = {}
    for one in bad:
        by_size.setdefault(one.size, []).append(one)
    ranked = sorted(by_size, key=lambda size: -sum(b.loss for b in by_size[size]))
    shown = sorted(ranked[:_MOST_ROWS])
    medians = {size: median(b.loss for b in by_size[size]) for size in shown}
    several_dtypes = len({b.culprit.workload.dtype for b in bad}) > 1
    rows = []
    for size in shown:
        own = by_size[size]
        worst = max(own, key=lambda b: b.loss)
        held = " ".join(f"{name}={value}" for name, value in worst.row.axes.items() if name != axis)
        if several_dtypes:
            held += f" in {worst.culprit.workload.dtype}"
        kinds = Counter(check.explain(b).kind for b in own).most_common(2)
        cause, times = kinds[0]
        row = SlowSize(
            size=str(size),
            loses=percent(medians[size]),
            interval="",
            bar=medians[size] / max(medians.values()),
            instead=str(Counter(b.better.axes[axis] for b in own).most_common(1)[0][0]),
            why=printable(
                cause
                if times > _COMMON_CAUSE * len(own)
                else ", ".join(f"{c} in {n}" for c, n in kinds)
            ),
            trust=max(b.row.grade.letter for b in own),
            details=f"{len(own)} of {curves} shapes; worst {percent(worst.loss)} at {held}",
        )
        rows.append(row)
    sentence = (
        f"{dashed(axis)}: the worst size is {ranked[0]}: {len(by_size[ranked[0]])} of {curves} shapes lose there, "
        f"median {percent(medians[ranked[0]])}"
    )
    return Lead(
        axis, sentence, tuple(rows), len(by_size) - len(shown), several=True, bad=tuple(bad)
    )
