"""Builds the first screen of a report, which lists the sizes that lose throughput.

A size loses if it runs at a lower rate than a better size nearby. Each row shows the loss, its
cause and the better size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, starmap
from statistics import median

from quantbench.analysis.check import RunCheck
from quantbench.analysis.neighbours import NEAR, BadSize, bad_sizes_on, curves_of_rows
from quantbench.analysis.summary import LayerRow, held_of, values_along
from quantbench.errors import printable
from quantbench.units import dashed, latency, percent

# Maximum number of rows in the table of the first screen; the table of all sizes has the rest.
_MOST_ROWS = 12
# With this many curves or more, each row summarizes one size over all curves.
_MANY_CURVES = 13
# A row over many shapes shows only the most frequent cause if more than this fraction of the losing
# shapes have it. Otherwise the row shows the two most frequent causes.
_COMMON_CAUSE = 0.5


@dataclass(frozen=True)
class SlowSize:
    """A formatted row of the first screen's table.

    size: slow size, or range of adjacent slow sizes.
    loses: throughput lost against the better size.
    interval: interval of the loss; "" if it is unknown.
    bar: loss over the table's largest loss, 0 to 1, for the bar behind the cell.
    instead: better size.
    why: cause of the loss.
    trust: worst grade of the compared rows.
    details: provider and values of the other axes, or the number of shapes that lose.
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

    axis: axis whose sizes are compared.
    sentence: result in one line.
    rows: sizes with the largest losses, sorted by size.
    more: number of further rows that are not shown.
    several: whether each row summarizes one size over many shapes.
    bad: all sizes that lose.
    ops: message that lists the ops whose times are summed.
    """

    axis: str
    sentence: str
    rows: tuple[SlowSize, ...] = ()
    more: int = 0
    several: bool = False
    bad: tuple[BadSize, ...] = ()
    ops: str = ""


def lead_of(rows: Sequence[LayerRow], axes: Sequence[str], check: RunCheck) -> Lead:
    """Builds the first screen of a run.

    Each size is compared with the sizes up to NEAR smaller. If no two sizes are that close, each
    size is instead compared with all sizes from half to twice its value.

    rows: measured grid points of the run.
    axes: axes of the run. The axis with the largest total loss is shown, and of several such axes
        the one with the most values.
    check: analysis of the run, which explains the losses.
    """
    axis = ""
    bad: tuple[BadSize, ...] = ()
    curves: tuple[tuple[LayerRow, ...], ...] = ()
    most = (-1.0, 0)
    for name in axes:
        curves_along = curves_of_rows(rows, name)
        bad_along = bad_sizes_on(curves_along, name)
        total = (sum(one.loss for one in bad_along), len(values_along(rows, name)))
        if curves_along and total > most:
            most = total
            axis = name
            bad = bad_along
            curves = curves_along
    name = dashed(axis)
    sizes = sorted({row.axes[axis] for row in chain(*curves)})
    near = bool(bad) or any(map(_has_neighbours, curves))
    if not near and len(sizes) == 1:
        return Lead(axis, f"{name}: only {sizes[0]} was measured; a comparison needs a second size")
    if not near:
        bad = bad_sizes_on(curves, axis, doubles=True)
    if not bad:
        same = f"the {len(sizes)} sizes do not differ by more than their intervals"
        between = f"{len(sizes)} sizes between {sizes[0]} and {sizes[-1]}"
        none = f"none of {between} loses against a smaller one within {percent(NEAR)}"
        return Lead(axis, f"{name}: {none if near else same}")
    if len(curves) >= _MANY_CURVES:
        return _over_shapes(axis, bad, len(curves), check)
    worst = bad[0].size
    against = f"loses {percent(bad[0].loss)} against {bad[0].better.axes[axis]}"
    if near:
        stretches = sorted(_stretches(bad, curves), key=lambda s: -max(b.loss for b in s))
        losing = f"{len({b.size for b in bad})} of {len(sizes)} sizes lose"
        smaller = f"against a smaller size within {percent(NEAR)}"
        sentence = f"{name}: {losing} {smaller}; the worst, {worst}, {against}"
    else:
        stretches = [[one] for one in bad]
        compared = "compared with half and twice the size"
        sentence = (
            f"{name}: {worst} is the worst of {len(sizes)} sizes: it {against} "
            f"(no two sizes are within {percent(NEAR)}; {compared})"
        )
    shown = sorted(stretches[:_MOST_ROWS], key=lambda s: s[0].size)
    others = set().union(*(row.axes for row in rows)) - {axis}
    varied = {name for name in others if len(values_along(rows, name)) > 1}
    several_providers = len({row.provider for row in rows}) > 1
    lines = tuple(_row(s, check, varied, several_providers, bad[0].loss) for s in shown)
    return Lead(axis, sentence, lines, len(stretches) - len(shown), bad=bad)


def _has_neighbours(curve: Sequence[LayerRow]) -> bool:
    """Returns whether any two neighbouring rows of a curve are close (`_are_near`)."""
    return any(starmap(_are_near, pairwise(curve)))


def _are_near(smaller: LayerRow, larger: LayerRow) -> bool:
    """Returns whether each axis value of `smaller` is at least 1 − NEAR times that of `larger`."""
    return all(larger.axes[name] * (1 - NEAR) <= value for name, value in smaller.axes.items())


def _stretches(
    bad: Sequence[BadSize], curves: Sequence[tuple[LayerRow, ...]]
) -> list[list[BadSize]]:
    """Groups adjacent bad sizes of a curve that lose against the same better size."""
    of_row = {id(one.row): one for one in bad}
    found: list[list[BadSize]] = []
    for curve in curves:
        better: LayerRow | None = None
        for row in curve:
            one = of_row.get(id(row))
            if one is not None and one.better is better:
                found[-1].append(one)
            elif one is not None:
                found.append([one])
            better = None if one is None else one.better
    return found


def _row(
    stretch: Sequence[BadSize],
    check: RunCheck,
    varied: set[str],
    several_providers: bool,
    most: float,
) -> SlowSize:
    """Formats one bad size, or several adjacent bad sizes, as a row.

    stretch: one group of `_stretches`.
    varied: axes whose values are shown in the details.
    several_providers: whether the provider is shown in the details.
    most: largest loss of all sizes, as a fraction of the throughput, which gets a full bar.
    """
    worst = max(stretch, key=lambda b: b.loss)
    first = stretch[0]
    last = stretch[-1]
    cause = check.explain(worst).words
    if len(worst.row.points) > 1:
        cause = f"{worst.culprit.op}: {cause}"
    details = [worst.row.provider] if several_providers else []
    for name, value in worst.row.axes.items():
        if name in varied:
            details.append(f"{dashed(name)} = {value}")
    interval = ""
    if worst.low is not None and worst.high is not None:
        interval = f"{percent(max(worst.low, 0.0))} to {percent(worst.high)}"
        if first is not last:
            interval += f" at {worst.size}"
    instead = str(worst.better.axes[worst.axis])
    if last.up_to is not None:
        instead += f", or {last.up_to} for the same {latency(last.row.latency_us)}"
    return SlowSize(
        size=str(first.size) if first is last else f"{first.size} … {last.size}",
        loses=percent(worst.loss),
        interval=interval,
        bar=worst.loss / most,
        instead=instead,
        why=printable(cause),
        trust=max(max(b.row.grade.letter, b.better.grade.letter) for b in stretch),
        details=", ".join(details),
    )


def _over_shapes(axis: str, bad: Sequence[BadSize], curves: int, check: RunCheck) -> Lead:
    """Builds the first screen of a run with many shapes, each of which is one curve.

    A row is one size over all shapes. The row shows the number of shapes that lose at the size, and
    their median and largest loss.

    curves: number of shapes.
    """
    by_size: dict[int, list[BadSize]] = {}
    dtypes = set()
    for one in bad:
        by_size.setdefault(one.size, []).append(one)
        dtypes.add(one.culprit.workload.dtype)
    ranked = sorted(by_size, key=lambda size: -sum(b.loss for b in by_size[size]))
    shown = sorted(ranked[:_MOST_ROWS])
    medians = {size: median(b.loss for b in by_size[size]) for size in shown}
    rows = []
    for size in shown:
        own = by_size[size]
        worst = max(own, key=lambda b: b.loss)
        held = " ".join(f"{name}={value}" for name, value in held_of(worst.row.axes, axis))
        if len(dtypes) > 1:
            held += f" in {worst.culprit.workload.dtype}"
        kinds: Counter[str] = Counter()
        better: Counter[int] = Counter()
        for one in own:
            kinds[check.explain(one).kind] += 1
            better[one.better.axes[axis]] += 1
        cause, times = kinds.most_common(1)[0]
        if times <= _COMMON_CAUSE * len(own):
            cause = ", ".join(f"{kind} in {number}" for kind, number in kinds.most_common(2))
        row = SlowSize(
            size=str(size),
            loses=percent(medians[size]),
            interval="",
            bar=medians[size] / max(medians.values()),
            instead=str(better.most_common(1)[0][0]),
            why=printable(cause),
            trust=max(one.row.grade.letter for one in own),
            details=f"{len(own)} of {curves} shapes; worst {percent(worst.loss)} at {held}",
        )
        rows.append(row)
    worst_size = ranked[0]
    losing = f"{len(by_size[worst_size])} of {curves} shapes lose there"
    sentence = (
        f"{dashed(axis)}: the worst size is {worst_size}: {losing}, "
        f"median {percent(medians[worst_size])}"
    )
    more = len(by_size) - len(shown)
    return Lead(axis, sentence, tuple(rows), more, several=True, bad=tuple(bad))
