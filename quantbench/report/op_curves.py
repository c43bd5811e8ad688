"""Builds the report's charts: per op the curves along an axis with numbered cliffs, and the sizes
that lose.

A chart has at most four curves, because more cannot be told apart; its note says what it leaves
out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from quantbench.analysis.check import RunCheck
from quantbench.analysis.curves import Curve
from quantbench.analysis.jumps import Cliff, CommonCliff
from quantbench.analysis.neighbours import BadSize, curves_of_rows
from quantbench.analysis.summary import LayerRow, Point, op_order
from quantbench.errors import printable
from quantbench.report.canvas import curve_names, rate, rate_unit, typical
from quantbench.report.content import (
    Caption,
    Card,
    Chart,
    Dot,
    Line,
    Mark,
    Section,
    Table,
    file_name,
)
from quantbench.report.source import dashed
from quantbench.units import latency, percent

# Evidence for a cause, as shown in the table.
_TOLD_BY = {
    "identity": "by the kernel that ran",
    "arithmetic": "by arithmetic",
    "clock": "by the clock",
}
# Maximum numbers of curves in one chart, of charts per axis (the ops that take most time), and of
# kernels listed.
_MOST_CURVES = 4
_MOST_OPS = 12
_MOST_KERNELS = 10
# Maximum number of numbered cliffs, and of labelled losses, in one chart.
_MOST_NUMBERED = 6


def axis_section(
    axis: str, every: Sequence[Curve], check: RunCheck, caption: Caption
) -> Section | None:
    """Builds an axis's section: a card for each of the 12 ops taking most time; None if `every` is
    empty.

    every: all curves along the axis.
    check: results of the whole run; its cliffs are numbered.
    """
    if not every:
        return None
    curves, still = _that_vary(every)
    spent: dict[str, float] = defaultdict(float)
    for curve in curves:
        spent[curve.op] += sum(p.latency_us * p.count for p in curve.points)
    ops = sorted(sorted(spent, key=lambda op: -spent[op])[:_MOST_OPS], key=op_order)
    notes = []
    if len(spent) > len(ops):
        notes.append(f"the {len(ops)} of {len(spent)} ops that take most time")
    if still:
        notes.append(f"{', '.join(still)}: the same product at every {dashed(axis)}")
    cards = [_op_card(op, [c for c in curves if c.op == op], check, caption) for op in ops]
    return Section(
        f"axis-{file_name(axis)}", f"Efficiency over {dashed(axis)}", "; ".join(notes), tuple(cards)
    )


def _that_vary(curves: Sequence[Curve]) -> tuple[list[Curve], list[str]]:
    """Returns the curves along which the workload changes, without duplicates, and the ops that
    have none.
    """
    found: dict[tuple[str, ...], Curve] = {}
    for curve in curves:
        keys = tuple(point.key for point in curve.points)
        if len(set(keys)) > 1:
            found.setdefault((curve.op, *keys), curve)
    vary = {curve.op for curve in found.values()}
    return list(found.values()), sorted({curve.op for curve in curves} - vary, key=op_order)


def _op_card(op: str, curves: Sequence[Curve], check: RunCheck, caption: Caption) -> Card:
    """Charts one op along one axis: points with intervals, numbered cliffs, and the kernels that
    ran.
    """
    axis = curves[0].axis
    drawn = typical(curves, _MOST_CURVES)
    points = [point for curve in drawn for point in curve.points]
    there = set(map(_place_key, points))
    own = sorted(
        (c for c in check.cliffs if c.axis == axis and _place_key(c.after) in there),
        key=lambda c: -c.ratio,
    )
    numbered = sorted(own[:_MOST_NUMBERED], key=lambda cliff: cliff.next)
    marks = [
        Mark(cliff.next, rate(cliff.after), str(number))
        for number, cliff in enumerate(numbered, start=1)
    ]
    lines = [
        Line(printable(name, 80), tuple(_dot(point, axis) for point in curve.points))
        for curve, name in zip(drawn, curve_names(drawn), strict=True)
    ]
    notes = []
    if len(drawn) < len(curves):
        notes.append(f"{len(drawn)} of {len(curves)} curves, from smaller to larger work")
    if len(own) > len(numbered):
        notes.append(f"the {len(numbered)} largest of {len(own)} cliffs are numbered")
    launches = {p.launch.kernel: p.launch for p in points if p.launch is not None}
    kernels = [
        (printable(str(launch.tile or name), 40), printable(name, 120))
        for name, launch in list(launches.items())[:_MOST_KERNELS]
    ]
    if len(launches) > _MOST_KERNELS:
        notes.append(f"{len(launches) - _MOST_KERNELS} more kernels ran")
    return Card(
        title=f"{op} over {dashed(axis)}",
        caption=caption(points),
        chart=Chart(dashed(axis), rate_unit(points[0]), tuple(lines), tuple(marks)),
        note="; ".join(notes),
        table=_cliffs_table(numbered, axis),
        kernels=tuple(kernels),
    )


def _dot(measured: Point | LayerRow, axis: str) -> Dot:
    """Returns the dot of a point or row with its interval, and with shape, time, kernel and grade
    as words.
    """
    size = measured.axes[axis]
    height = rate(measured)
    said = [
        f"{dashed(axis)} {size}",
        latency(measured.latency_us),
        f"{height:.1f} {rate_unit(measured)}",
    ]
    if isinstance(measured, Point):
        said[0] += f": {measured.workload}"
        said.append(measured.launch.kernel if measured.launch else "kernel unknown")
        low = height * measured.latency_us / measured.high_us
        high = height * measured.latency_us / measured.low_us
    else:
        low = height / (1 + measured.half_width)
        high = height * (1 + measured.half_width)
    grade = measured.grade
    said.append(f"grade {grade.letter}" + (f" ({grade.reasons[0]})" if grade.reasons else ""))
    return Dot(size, height, low, high, printable(", ".join(said), 300))


def _place_key(point: Point) -> tuple[object, ...]:
    """Returns a key of the point that is the same whenever the run is read."""
    return (point.key, point.op, *point.axes.items())


def _cliffs_table(numbered: Sequence[Cliff], axis: str) -> Table | None:
    rows = []
    for number, cliff in enumerate(numbered, start=1):
        place = " ".join(
            [
                f"{cliff.at} → {cliff.next}",
                *(f"{name}={value}" for name, value in cliff.held.items()),
            ]
        )
        cause = f"{cliff.cause.words} ({_TOLD_BY[cliff.cause.evidence]})"
        rows.append((str(number), place, cost_words(cliff), printable(cause)))
    return Table(("#", dashed(axis), "time", "cause"), tuple(rows)) if rows else None


def cost_words(cliff: Cliff | CommonCliff) -> str:
    """Formats the extra time of a cliff with its interval: `+31 % (30 % to 32 %)`."""
    return f"+{percent(cliff.ratio - 1)} ({percent(cliff.low - 1)} to {percent(cliff.high - 1)})"


def losses_card(
    rows: Sequence[LayerRow], bad: Sequence[BadSize], axis: str, caption: str
) -> Card | None:
    """Charts the share of peak over `axis`, all ops of a place together, with the sizes that lose
    in red.

    Draws at most four curves, those with the largest total loss; None if no curve has two sizes.
    """
    losses = {id(one.row): one for one in sorted(bad, key=lambda one: one.loss)}
    curves = [curve for curve in curves_of_rows(rows, axis) if len(curve) > 1]
    curves.sort(key=lambda curve: -sum(losses[id(row)].loss for row in curve if id(row) in losses))
    if not curves:
        return None
    drawn = curves[:_MOST_CURVES]
    slow = [losses[id(row)] for curve in drawn for row in curve if id(row) in losses]
    ops = ", ".join(dict.fromkeys(point.op for point in drawn[0][0].points))
    return Card(
        title=f"{ops}, together" if "," in ops else ops,
        caption=caption,
        chart=Chart(
            dashed(axis),
            rate_unit(drawn[0][0]),
            tuple(
                Line(_row_name(curve[0], axis), tuple(_dot(row, axis) for row in curve))
                for curve in drawn
            ),
            _loss_marks(slow),
        ),
    )


def _row_name(row: LayerRow, axis: str) -> str:
    held = (f"{dashed(name)}={value}" for name, value in row.axes.items() if name != axis)
    return printable(" ".join([row.provider, *held]), 80)


def _loss_marks(slow: Sequence[BadSize]) -> tuple[Mark, ...]:
    """Marks every size that loses; labels the largest losses, one of those against the same better
    size.
    """
    worst: Mapping[int, BadSize] = {
        id(one.better): one for one in sorted(slow, key=lambda one: one.loss)
    }
    labelled = {
        id(one) for one in sorted(worst.values(), key=lambda one: -one.loss)[:_MOST_NUMBERED]
    }
    return tuple(
        Mark(one.size, rate(one.row), f"−{percent(one.loss)}" if id(one) in labelled else "")
        for one in slow
    )
