"""Compares the named transformer shapes of a run: time per layer, and tokens per second over the
first's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from rich.table import Table as RichTable
from rich.text import Text

from quantbench.analysis.summary import Point, op_order
from quantbench.report.content import Section, Table
from quantbench.report.terminal import plain_table
from quantbench.sweep.axes import SHAPE_DIM
from quantbench.sweep.shape_file import Gain, NamedShape
from quantbench.units import latency
from quantbench.workload import TransformerShape
from quantbench.workload.parameters import useful_parameters

_LOGITS = "logits"


@dataclass(frozen=True)
class MeasuredShape:
    """Times of one shape with one library.

    number, name: 1-based position and name of the shape in the list.
    layer_us: time of all ops of one layer, forward and backward; None if an op is missing.
    logits_us: time of the logits ops; None if an op is missing.
    missing: ops that were measured for the first shape but not for this one.
    gain: tokens per second over the first shape's, at equal parameters; None if an op is missing.
    verdict: whether the measured gain agrees with the prediction; "" if either is unknown.
    left_out: planned ops that the library did not measure for the first shape; they are excluded
        from all times.
    """

    number: int
    name: str
    library: str
    layer_us: float | None
    logits_us: float | None
    missing: tuple[str, ...]
    gain: Gain | None
    predicted: Gain | None
    verdict: str
    left_out: tuple[str, ...]


def compare_shapes(
    points: Sequence[Point], models: Sequence[NamedShape]
) -> tuple[MeasuredShape, ...]:
    """Compares each shape with the first, per library (torch, triton, …).

    If several kernels of a library ran an op, the fastest counts. An op with the same workload in
    both shapes was measured once, so its error cancels in the ratio.
    """
    found: dict[str, dict[int, dict[str, Point]]] = defaultdict(lambda: defaultdict(dict))
    for point in points:
        # `torch` of `torch.mm`; a user-defined kernel, `package.module:Class`, is a library of its
        # own.
        library = point.provider if ":" in point.provider else point.provider.partition(".")[0]
        ops = found[library][point.axes[SHAPE_DIM]]
        if point.op not in ops or point.latency_us < ops[point.op].latency_us:
            ops[point.op] = point
    planned = {op.label for op in models[0].shape.ops()}
    shapes: list[MeasuredShape] = []
    for library, by_number in found.items():
        first = by_number.get(1, {})
        left_out = tuple(sorted(planned - first.keys(), key=op_order))
        for number, model in enumerate(models, start=1):
            ops = by_number.get(number, {})
            missing = tuple(sorted(first.keys() - ops.keys(), key=op_order))
            layer_us, logits_us, gain, verdict = None, None, None, ""
            if first and not missing:
                own = [ops[label] for label in first]
                layer_us = sum(
                    point.latency_us for point in own if not point.op.startswith(_LOGITS)
                )
                logits_us = sum(point.latency_us for point in own if point.op.startswith(_LOGITS))
                gain = _gain(list(first.values()), own, models[0].shape, model.shape)
                # A prediction covers all ops, so it is not compared with a subset of them.
                if model.predicted is not None and number > 1 and not left_out:
                    apart = gain.high < model.predicted.low or gain.low > model.predicted.high
                    verdict = "outside the predicted interval" if apart else "as predicted"
            shapes.append(
                MeasuredShape(
                    number,
                    model.name,
                    library,
                    layer_us,
                    logits_us,
                    missing,
                    gain,
                    model.predicted,
                    verdict,
                    left_out,
                )
            )
    return tuple(shapes)


def _gain(
    first: Sequence[Point], own: Sequence[Point], asked: TransformerShape, shape: TransformerShape
) -> Gain:
    """Computes the gain from the summed times of both shapes' ops, each weighted by its count."""
    shares: dict[str, float] = defaultdict(float)
    width: dict[str, float] = {}
    sums = []
    for sign, points in ((1, first), (-1, own)):
        total_us = sum(point.latency_us * point.count for point in points)
        sums.append(total_us)
        for point in points:
            shares[point.key] += sign * point.latency_us * point.count / total_us
            width[point.key] = log(point.high_us / point.low_us) / 2
    half_width = sqrt(
        sum((share * width[key]) ** 2 for key, share in shares.items())
    )  # of the logarithm
    weight = useful_parameters(shape, asked.vocab) / useful_parameters(asked, asked.vocab)
    faster = sums[0] / sums[1] * weight * shape.tokens / asked.tokens
    return Gain(faster - 1, faster * exp(-half_width) - 1, faster * exp(half_width) - 1)


def _columns(shapes: Sequence[MeasuredShape]) -> dict[str, list[str]]:
    """Returns the cells of the table by column name, as of `plain_table`."""
    columns = {
        "shape": [one.name for one in shapes],
        "library": [one.library for one in shapes],
        ">one layer": ["" if one.layer_us is None else latency(one.layer_us) for one in shapes],
        ">logits": ["" if not one.logits_us else latency(one.logits_us) for one in shapes],
        ">gain": ["" if one.gain is None or one.number == 1 else one.gain.words for one in shapes],
        ">predicted": ["" if one.predicted is None else one.predicted.words for one in shapes],
        "": [
            f"not measured: {', '.join(one.missing)}" if one.missing else one.verdict
            for one in shapes
        ],
    }
    if len(set(columns["library"])) == 1:
        del columns["library"]
    if not any(columns[">predicted"]):
        del columns[">predicted"]
    return columns


def comparison_table(shapes: Sequence[MeasuredShape]) -> RichTable:
    """Builds the table for the terminal; significant gains are green, significant losses red."""
    columns = {name: [Text(cell) for cell in cells] for name, cells in _columns(shapes).items()}
    for cell, one in zip(columns[">gain"], shapes, strict=True):
        if one.gain is not None and (one.gain.low > 0 or one.gain.high < 0):
            cell.stylize("bold green" if one.gain.low > 0 else "bold red")
    return plain_table(columns, fold=("shape", "library"))


def comparison_section(shapes: Sequence[MeasuredShape]) -> Section:
    columns = _columns(shapes)
    table = Table(tuple(columns), tuple(zip(*columns.values(), strict=True)))
    return Section(
        "shapes", "Shapes side by side", table=table, lines=tuple(comparison_lines(shapes))
    )


def comparison_sentence(shapes: Sequence[MeasuredShape]) -> str:
    """Returns a message naming the shape that is most significantly faster than the first, if there
    is one.
    """
    gains = [(one.gain, one.name) for one in shapes if one.number > 1 and one.gain is not None]
    first = shapes[0].name
    if not gains:
        return f"no other shape was measured whole beside {first}"
    gain, name = max(gains, key=lambda pair: pair[0].low)
    if gain.low <= 0:
        return f"none of {len(gains)} other shapes is surely faster than {first}"
    return f"{name} is faster than {first} by {gain.words}"


def comparison_lines(shapes: Sequence[MeasuredShape]) -> list[str]:
    """Returns the legend of the table and the ops that are left out."""
    said = [
        "one layer: its ops forward and backward; logits: of the model. gain: measured tokens per second at equal "
        "parameters against the first shape, with the 95 % interval."
    ]
    for library, ops in {one.library: one.left_out for one in shapes if one.left_out}.items():
        said.append(
            f"{library}: {', '.join(ops)} of the first shape not measured: left out everywhere, predictions not judged"
        )
    return said
