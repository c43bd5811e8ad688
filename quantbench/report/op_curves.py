"""Builds the charts of an HTML report, which show rates along an axis.

A chart of one op has numbered cliffs, jumps in time between neighbouring sizes, with their causes.
The chart of all ops together marks the sizes that lose throughput. A chart has at most four curves,
because more could not be distinguished; the chart's note says what is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from quantbench.analysis.check import RunCheck
from quantbench.analysis.curves import Curve
from quantbench.analysis.jumps import Cliff, CommonCliff
from quantbench.analysis.neighbours import BadSize, curves_of_rows
from quantbench.analysis.summary import LayerRow, Point, held_of, op_order
from quantbench.errors import printable
from quantbench.launch import Tile
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
from quantbench.units import axis_words, dashed, latency, percent

# Maps the evidence for a cliff's cause to the table's text.
_EVIDENCE_WORDS = {
    "identity": "by the kernel that ran",
    "arithmetic": "by arithmetic",
    "clock": "by the clock",
}
# Maximum number of curves in one chart.
_MOST_CURVES = 4
# Maximum number of ops, with one chart each, along one axis.
_MOST_OPS = 12
# Maximum number of kernels that are listed below a chart.
_MOST_KERNELS = 10
# Maximum number of numbered cliffs or of labelled losses in one chart.
_MOST_NUMBERED = 6


def axis_section(
    axis: str, every: Sequence[Curve], check: RunCheck, caption: Caption
) -> Section | None:
    """Builds the section of an axis, with a card for each of the ops that take the most time.

    Returns None if there are no curves.

    every: all curves along the axis.
    check: analysis of the whole run, which contains the cliffs.
    caption: function from points to the caption of their chart.
    """
    if not every:
        return None
    by_op, still = _varying_curves(every)
    spent: dict[str, float] = defaultdict(float)
    for op, curves in by_op.items():
        for curve in curves:
            spent[op] += sum(point.total_us for point in curve.points)
    ops = sorted(sorted(spent, key=lambda op: -spent[op])[:_MOST_OPS], key=op_order)
    notes = []
    if len(spent) > len(ops):
        notes.append(f"the {len(ops)} of {len(spent)} ops that take most time")
    if still:
        notes.append(f"{', '.join(still)}: the same product at every {dashed(axis)}")
    cards = tuple(_op_card(op, by_op[op], check, caption) for op in ops)
    title = f"Efficiency over {dashed(axis)}"
    return Section(f"axis-{file_name(axis)}", title, "; ".join(notes), cards)


def _varying_curves(curves: Sequence[Curve]) -> tuple[dict[str, list[Curve]], list[str]]:
    """Returns, by op, the curves along which the workload changes, and the ops without such curves.

    Only one of several curves with the same points is returned.
    """
    found: dict[str, list[Curve]] = {}
    known: set[tuple[str, ...]] = set()
    for curve in curves:
        keys = (curve.op, *(point.key for point in curve.points))
        if keys not in known and len(set(keys[1:])) > 1:
            found.setdefault(curve.op, []).append(curve)
        known.add(keys)
    return found, sorted({curve.op for curve in curves} - found.keys(), key=op_order)


def _op_card(op: str, curves: Sequence[Curve], check: RunCheck, caption: Caption) -> Card:
    """Builds the card of one op, with a chart, a table of cliffs and the kernels that ran.

    curves: all curves of the op along one axis.
    """
    axis = curves[0].axis
    drawn = typical(curves, _MOST_CURVES)
    points: list[Point] = []
    lines = []
    for curve, name in zip(drawn, curve_names(drawn), strict=True):
        points += curve.points
        lines.append(_line(name, curve.points, axis))
    there = set(map(_place_key, points))
    # check.cliffs has the largest cliffs first.
    own = [c for c in check.cliffs if c.axis == axis and _place_key(c.after) in there]
    marks = []
    rows = []
    numbered = sorted(own[:_MOST_NUMBERED], key=lambda cliff: cliff.next)
    for number, cliff in enumerate(numbered, start=1):
        marks.append(Mark(cliff.next, rate(cliff.after), str(number)))
        sizes = (f"{name}={value}" for name, value in cliff.held.items())
        place = " ".join([f"{cliff.at} → {cliff.next}", *sizes])
        cause = f"{cliff.cause.words} ({_EVIDENCE_WORDS[cliff.cause.evidence]})"
        rows.append((str(number), place, cost_words(cliff), printable(cause)))
    notes = []
    if len(drawn) < len(curves):
        notes.append(f"{len(drawn)} of {len(curves)} curves, from smaller to larger work")
    if len(own) > len(numbered):
        notes.append(f"the {len(numbered)} largest of {len(own)} cliffs are numbered")
    tiles: dict[str, Tile | None] = {}
    for point in points:
        if point.launch is not None:
            tiles[point.launch.kernel] = point.launch.tile
    kernels = []
    for name, tile in list(tiles.items())[:_MOST_KERNELS]:
        kernels.append((printable(str(tile or name), 40), printable(name, 120)))
    if len(tiles) > _MOST_KERNELS:
        notes.append(f"{len(tiles) - _MOST_KERNELS} more kernels ran")
    return Card(
        title=f"{op} over {dashed(axis)}",
        caption=caption(points),
        chart=Chart(dashed(axis), rate_unit(points[0]), tuple(lines), tuple(marks)),
        note="; ".join(notes),
        table=Table(("#", dashed(axis), "time", "cause"), tuple(rows)) if rows else None,
        kernels=tuple(kernels),
    )


def _line(name: str, measured: Sequence[Point | LayerRow], axis: str) -> Line:
    return Line(printable(name, 80), tuple(_dot(one, axis) for one in measured))


def _dot(measured: Point | LayerRow, axis: str) -> Dot:
    """Returns the dot of a point or row, with a text of its size, time, rate, kernel and grade."""
    size = measured.axes[axis]
    height = rate(measured)
    words = [
        f"{dashed(axis)} {size}",
        latency(measured.latency_us),
        f"{height:.1f} {rate_unit(measured)}",
    ]
    if isinstance(measured, Point):
        words[0] += f": {measured.workload}"
        words.append(measured.launch.kernel if measured.launch else "kernel unknown")
        low = height * measured.latency_us / measured.high_us
        high = height * measured.latency_us / measured.low_us
    else:
        low = height / (1 + measured.half_width)
        high = height * (1 + measured.half_width)
    grade = measured.grade
    because = f" ({grade.reasons[0]})" if grade.reasons else ""
    words.append(f"grade {grade.letter}{because}")
    return Dot(size, height, low, high, printable(", ".join(words), 300))


def _place_key(point: Point) -> tuple[object, ...]:
    """Returns a key that identifies a point's workload and grid point in any copy of the run."""
    return (point.key, point.op, *point.axes.items())


def cost_words(cliff: Cliff | CommonCliff) -> str:
    """Formats the extra time of a cliff with its interval: `+31 % (30 % to 32 %)`."""
    return f"+{percent(cliff.ratio - 1)} ({percent(cliff.low - 1)} to {percent(cliff.high - 1)})"


def losses_card(
    rows: Sequence[LayerRow], bad: Sequence[BadSize], axis: str, caption: str
) -> Card | None:
    """Builds the card with the rate of all ops together over an axis.

    The sizes that lose are marked in red. The chart has the curves with the largest total loss, at
    most four. Returns None if no curve has two sizes.

    rows: measured grid points of the run.
    bad: sizes that run at a lower rate than a better size nearby.
    """
    losses = {id(one.row): one for one in sorted(bad, key=lambda one: one.loss)}
    curves = [curve for curve in curves_of_rows(rows, axis) if len(curve) > 1]
    if not curves:
        return None
    curves.sort(key=lambda curve: -sum(losses[id(row)].loss for row in curve if id(row) in losses))
    drawn = curves[:_MOST_CURVES]
    slow: list[BadSize] = []
    lines = []
    for curve in drawn:
        slow += [losses[id(row)] for row in curve if id(row) in losses]
        first = curve[0]
        name = " ".join([first.provider, *axis_words(dict(held_of(first.axes, axis)))])
        lines.append(_line(name, curve, axis))
    first = drawn[0][0]
    ops = ", ".join(dict.fromkeys(first.ops))
    return Card(
        title=f"{ops}, together" if "," in ops else ops,
        caption=caption,
        chart=Chart(dashed(axis), rate_unit(first), tuple(lines), _loss_marks(slow)),
    )


def _loss_marks(slow: Sequence[BadSize]) -> tuple[Mark, ...]:
    """Returns a mark for every size that loses. The largest losses are labelled.

    Among sizes that lose against the same better size, only the worst is labelled.
    """
    worst: dict[int, BadSize] = {}
    for one in slow:
        against = id(one.better)
        if against not in worst or one.loss >= worst[against].loss:
            worst[against] = one
    largest = sorted(worst.values(), key=lambda one: -one.loss)[:_MOST_NUMBERED]
    labelled = set(map(id, largest))
    marks = []
    for one in slow:
        label = f"−{percent(one.loss)}" if id(one) in labelled else ""
        marks.append(Mark(one.size, rate(one.row), label))
    return tuple(marks)
