"""Compares the transformer shapes of a run by their measured times.

The first shape is the reference. Another shape's gain is the ratio of its tokens per second to the
first shape's, minus 1. The ratio is taken at equal parameters: it is multiplied by the shape's
number of parameters over the first shape's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from operator import attrgetter

from rich.text import Text

from quantbench.analysis.summary import Point, op_order
from quantbench.report.content import Section, Table
from quantbench.report.terminal import filled, shown
from quantbench.sweep.axes import SHAPE_DIM
from quantbench.sweep.shape_file import Gain, NamedShape
from quantbench.units import latency
from quantbench.workload import TransformerShape
from quantbench.workload.parameters import useful_parameters


@dataclass(frozen=True)
class MeasuredShape:
    """Times of one shape with one library.

    number: position of the shape in the list, from 1.
    name: name of the shape.
    library: library that ran the ops.
    layer_us: time of one layer's ops, forward and backward, each op counted once; None if an op is
        missing.
    logits_us: time of the logits ops; None if an op is missing.
    missing: ops that were measured for the first shape but not for this shape.
    gain: measured gain over the first shape, as the module defines it; None if an op is missing.
    predicted: predicted gain over the first shape; None if the run has no prediction.
    verdict: text on whether the measured gain agrees with the prediction; "" if it is not judged.
    left_out: planned ops that the library did not run for the first shape. These ops are left out
        of the times of all shapes.
    """

    number: int
    name: str
    library: str
    layer_us: float | None = None
    logits_us: float | None = None
    missing: tuple[str, ...] = ()
    gain: Gain | None = None
    predicted: Gain | None = None
    verdict: str = ""
    left_out: tuple[str, ...] = ()


def compare_shapes(
    points: Sequence[Point], models: Sequence[NamedShape]
) -> tuple[MeasuredShape, ...]:
    """Compares each shape with the first shape, for each library (torch, triton, …).

    If several kernels of a library ran an op, the fastest kernel's time is used.

    points: measured points of the run.
    models: shapes in the run's order.
    """
    found: dict[str, dict[int, dict[str, Point]]] = defaultdict(lambda: defaultdict(dict))
    for point in points:
        # The library of `torch.mm` is `torch`. A user-defined kernel, `package.module:Class`,
        # counts as a separate library.
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
            one = MeasuredShape(
                number,
                model.name,
                library,
                missing=missing,
                predicted=model.predicted,
                left_out=left_out,
            )
            if first and not missing:
                times_us = {op: ops[op].latency_us for op in first}
                gain = _gain(list(first.values()), ops, models[0].shape, model.shape)
                one = replace(
                    one,
                    layer_us=sum(us for op, us in times_us.items() if not op.startswith("logits")),
                    logits_us=sum(us for op, us in times_us.items() if op.startswith("logits")),
                    gain=gain,
                    verdict=_verdict(one, gain),
                )
            shapes.append(one)
    return tuple(shapes)


def _verdict(shape: MeasuredShape, gain: Gain) -> str:
    """Returns text on whether a measured gain agrees with its prediction.

    Returns "" for the first shape, for a shape without a prediction, and if ops are left out that
    the prediction includes.
    """
    predicted = shape.predicted
    if predicted is None or shape.number == 1 or shape.left_out:
        return ""
    if gain.high < predicted.low or gain.low > predicted.high:
        return "outside the predicted interval"
    return "as predicted"


def _gain(
    first: Sequence[Point],
    ops: Mapping[str, Point],
    asked: TransformerShape,
    shape: TransformerShape,
) -> Gain:
    """Computes the gain of a shape over the shape `asked` from the summed times of their ops.

    An op's time is multiplied by the number of times that the shape runs the op. Vocabulary entries
    beyond those of `asked` do not count as parameters.

    The gain's interval follows from the relative errors of the ops, each weighted by the op's
    fraction of its shape's total time. A workload that both shapes have was measured once, so its
    weight is the difference between its fractions in the two shapes.

    first: ops of the shape `asked`.
    ops: ops of `shape` by label. Ops that are not in `first` are ignored.
    """
    shares: dict[str, float] = defaultdict(float)
    width: dict[str, float] = {}
    sums = []
    for sign, points in ((1, first), (-1, [ops[point.op] for point in first])):
        total_us = sum(point.total_us for point in points)
        sums.append(total_us)
        for point in points:
            shares[point.key] += sign * point.latency_us * point.count / total_us
            width[point.key] = log(point.high_us / point.low_us) / 2
    # Half-width of the interval of log(1 + gain). Errors of different workloads are independent.
    half_width = sqrt(sum((share * width[key]) ** 2 for key, share in shares.items()))
    weight = useful_parameters(shape, asked.vocab) / useful_parameters(asked, asked.vocab)
    faster = sums[0] / sums[1] * weight * shape.tokens / asked.tokens
    return Gain(faster - 1, faster * exp(-half_width) - 1, faster * exp(half_width) - 1)


def comparison_section(shapes: Sequence[MeasuredShape]) -> Section:
    """Builds the section with a table of the shapes, a legend, and the ops that are left out.

    The table has one line per shape and library. Libraries are named only if there are several. On
    a terminal, significant gains are green and significant losses are red.
    """
    several = len({one.library for one in shapes}) > 1
    lines = []
    for one in shapes:
        lacks = f"not measured: {', '.join(one.missing)}"
        cells: dict[str, str | Text] = {
            "shape": one.name,
            "library": one.library if several else "",
            ">one layer": shown(one.layer_us, latency),
            ">logits": shown(one.logits_us or None, latency),
            ">gain": "" if one.number == 1 else _styled(one.gain),
            ">predicted": shown(one.predicted, _words),
            "": lacks if one.missing else one.verdict,
        }
        lines.append(cells)
    legend = {
        "": "one layer: its ops forward and backward; logits: of the model. gain: measured tokens "
        "per second at equal parameters against the first shape, with the 95 % interval."
    }
    for one in shapes:
        if one.left_out:
            lacks = f"{', '.join(one.left_out)} of the first shape not measured"
            left_out = "left out everywhere, predictions not judged"
            legend[one.library] = f"{one.library}: {lacks}: {left_out}"
    table = Table(*filled(lines, optional=("library", ">predicted")))
    return Section("shapes", "Shapes side by side", table=table, lines=tuple(legend.values()))


_words = attrgetter("words")


def _styled(gain: Gain | None) -> Text:
    """Formats a gain, in green if its interval is above 0 and in red if it is below 0.

    The result is "" if the gain is None.
    """
    text = Text(shown(gain, _words))
    if gain is not None and gain.low > 0:
        text.stylize("bold green")
    elif gain is not None and gain.high < 0:
        text.stylize("bold red")
    return text


def comparison_sentence(shapes: Sequence[MeasuredShape]) -> str:
    """Returns a sentence that names the shape whose gain has the highest lower bound.

    If no lower bound is above 0, the sentence says that no shape is surely faster than the first.
    """
    gains = [(one.gain, one.name) for one in shapes if one.number > 1 and one.gain is not None]
    first = shapes[0].name
    if not gains:
        return f"no other shape was measured whole beside {first}"
    gain, name = max(gains, key=lambda pair: pair[0].low)
    if gain.low <= 0:
        return f"none of {len(gains)} other shapes is surely faster than {first}"
    return f"{name} is faster than {first} by {gain.words}"
