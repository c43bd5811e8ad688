"""Points and rows: the measured records of a run with medians, intervals, rates and shares of peak.

`points_of` turns records into points; `rows_of` adds up the ops of each place and provider; `layer_rows` takes each op
by its fastest provider. Every table, picture and analysis of a run starts with these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from quantbench.device.spec import DeviceSpec
from quantbench.latency.op_times import peak_share
from quantbench.launch import Launch
from quantbench.measurement import GRADES, Grade
from quantbench.stats import Interval, median, median_interval, noise
from quantbench.store.record import Measured, Record
from quantbench.workload import Workload

_OP_NAMES = (
    "qkv", "scores", "softmax", "context", "attention", "proj", "mlp_up", "mlp_gate", "mlp_up_gate", "mlp_down",
    "logits",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One measured workload at one place on the axes.

    latency_us: median of the samples.
    low_us, high_us: 95 % confidence interval of the median.
    count: how often the shape at this place runs the workload.
    tflops, gb_per_s: useful work over the median.
    peak_share: of the dense peak for products and attention, of the memory bandwidth for softmax; None where the
        device's figure is not known.
    num_samples: accepted samples behind the median.
    noise: relative standard deviation of the samples (0 for a single figure).
    clock_mhz: median SM clock during the samples; None where it was not recorded.
    """

    key: str
    axes: dict[str, int]
    op: str
    count: int
    provider: str
    workload: Workload
    launch: Launch | None
    latency_us: float
    low_us: float
    high_us: float
    tflops: float
    gb_per_s: float
    peak_share: float | None
    grade: Grade
    num_samples: int
    noise: float
    clock_mhz: float | None


@dataclass(frozen=True)
class Row:
    """The ops of one layer that one provider ran at one place, added up: a line of the sweep's table.

    points: the ops of the sum.
    latency_us: their sum, each op as often as it runs.
    half_width: relative half-width of the sum's interval.
    grade: the worst of all ops' grades.
    logits: logits of the model, apart, where the place has other ops as well.
    missing: ops that the provider has at other places and that were not measured here. The figures of such a row are
        sums over fewer ops and compare with no other row.
    """

    axes: dict[str, int]
    provider: str
    points: tuple[Point, ...]
    latency_us: float
    half_width: float
    tflops: float
    gb_per_s: float
    peak_share: float | None
    grade: Grade
    logits: tuple[Point, ...] = ()
    missing: tuple[str, ...] = ()

    @cached_property
    def work(self) -> float:
        """Useful work of the ops: arithmetic operations, or bytes where there are none (collectives)."""
        flops = sum([p.workload.flops * p.count for p in self.points])
        return float(flops or sum(p.workload.min_bytes * p.count for p in self.points))

    @property
    def logits_us(self) -> float | None:
        """Time of the logits that the row's time leaves out; None where there are none."""
        return sum(p.latency_us * p.count for p in self.logits) if self.logits else None

    @property
    def worst(self) -> Point:
        return min(self.points, key=lambda p: (p.peak_share is None, p.peak_share, p.op))


def op_order(label: str) -> tuple[int, str]:
    """Sort key for op labels: forward ops in layer order, gradients after them, anything else last.

    >>> sorted(["mlp_down", "qkv.dgrad", "qkv"], key=op_order)
    ['qkv', 'qkv.dgrad', 'mlp_down']
    """
    name = label.partition(".")[0]
    return (_OP_NAMES.index(name) if name in _OP_NAMES else len(_OP_NAMES), label)


def points_of(records: Iterable[Record], spec: DeviceSpec) -> tuple[Point, ...]:
    """Every measured point at every place it stands for, in order of places.

    Repetitions of the reference point, and figures that were rejected as impossible, are left out.
    """
    found = []
    for record in records:
        if record.role != "point" or not isinstance(record.outcome, Measured):
            continue
        if record.outcome.grade.letter == "rejected":
            continue
        found += list(_points(record, record.outcome, spec))
    return tuple(sorted(found, key=lambda p: (tuple(p.axes.values()), p.provider, op_order(p.op))))


def _points(record: Record, outcome: Measured, spec: DeviceSpec) -> Iterable[Point]:
    samples_us = outcome.measurement.samples_us
    if len(samples_us) == 1:  # tables of tens of thousands of single figures
        latency_us, spread = samples_us[0], 0.0
        interval = Interval(latency_us, latency_us, 0.0)
    else:
        latency_us, spread, interval = median(samples_us), noise(samples_us), median_interval(samples_us)
    work = record.workload
    tflops = work.flops / latency_us / 1e6
    gb_per_s = work.min_bytes / latency_us / 1e3
    clocks_mhz = outcome.measurement.clocks_mhz
    clock_mhz = median(clocks_mhz) if clocks_mhz else None
    for place in record.places:
        yield Point(
            record.key, place.axes, place.op, place.count, record.provider, work, record.launch, latency_us,
            interval.low, interval.high, tflops, gb_per_s, peak_share(work, latency_us, spec), outcome.grade,
            len(samples_us), spread, clock_mhz,
        )  # fmt: skip


def rows_of(points: Sequence[Point]) -> tuple[Row, ...]:
    """The points of each place and provider taken together, logits apart, in order of places."""
    groups: dict[tuple[tuple[int, ...], str], list[Point]] = {}
    # Places with the same axes have the same ops of one provider.
    ops: dict[tuple[str, frozenset[str]], set[str]] = defaultdict(set)
    names = cache(frozenset[str])
    for point in points:
        groups.setdefault((tuple(point.axes.values()), point.provider), []).append(point)
        ops[point.provider, names(tuple(point.axes))].add(point.op)
    return tuple(
        _row(tuple(group), ops[provider, names(tuple(group[0].axes))])
        for (_, provider), group in sorted(groups.items(), key=lambda item: item[0])
    )


def _row(points: tuple[Point, ...], ops: Collection[str]) -> Row:
    whole = row_of(points, ops)
    logits = tuple([p for p in points if p.op.startswith("logits") and p.op.partition(".")[0] == "logits"])
    if not logits or len(logits) == len(points):
        return whole
    layer = tuple(p for p in points if p not in logits)
    return replace(row_of(layer), logits=logits, grade=whole.grade, missing=whole.missing)


def row_of(points: tuple[Point, ...], ops: Collection[str] = ()) -> Row:
    """Points of one place taken together; the provider is the first one's. ops: those that a whole row has."""
    latency_us = sum([p.latency_us * p.count for p in points])
    # The intervals are independent, so their widths add as squares.
    width_us = sum([((p.high_us - p.low_us) / 2 * p.count) ** 2 for p in points]) ** 0.5
    known = [p.peak_share * (p.latency_us * p.count) for p in points if p.peak_share is not None]
    return Row(
        axes=points[0].axes,
        provider=points[0].provider,
        points=points,
        latency_us=latency_us,
        half_width=width_us / latency_us,
        tflops=sum([p.workload.flops * p.count for p in points]) / latency_us / 1e6,
        gb_per_s=sum([p.workload.min_bytes * p.count for p in points]) / latency_us / 1e3,
        peak_share=sum(known) / latency_us if len(known) == len(points) else None,
        grade=max([p.grade for p in points], key=lambda g: GRADES.index(g.letter)),
        missing=tuple(sorted(set(ops).difference([p.op for p in points]), key=op_order)),
    )


#: stands for the provider in rows that are made of several
FASTEST = "each op's fastest"
# What attention computes in one kernel: where both were measured, only the one kernel counts.
_UNFUSED = ("scores", "softmax", "context")


def are_parts(points: Sequence[Point]) -> bool:
    """Whether the providers of a run compute different ops, so that only together they make a layer.

    Providers that compute the same ops are rivals, and each makes a layer of its own.
    """
    ops: dict[str, set[str]] = {}
    for point in points:
        ops.setdefault(point.provider, set()).add(point.op)
    return len({frozenset(own) for own in ops.values()}) > 1


def layer_rows(points: Sequence[Point]) -> tuple[Row, ...]:
    """One row for each place and dtype, with each op by its fastest provider, in order of places."""
    places: dict[tuple[str, tuple[int, ...]], dict[str, Point]] = {}
    for point in points:
        ops = places.setdefault((point.workload.dtype, tuple(point.axes.values())), {})
        seen = ops.get(point.op)
        if seen is None or point.latency_us < seen.latency_us:
            ops[point.op] = point
    whole = set(counted({name for ops in places.values() for name in ops}))
    return tuple(
        replace(row_of(tuple(ops[name] for name in counted(ops)), _needed(whole, ops)), provider=FASTEST)
        for _, ops in sorted(places.items())
    )


def _needed(whole: set[str], ops: Iterable[str]) -> set[str]:
    """The ops that make a place a whole layer: attention in one kernel, or the three that replace it."""
    return whole - {"attention"} if set(_UNFUSED) <= set(ops) else whole


def counted(ops: Iterable[str]) -> tuple[str, ...]:
    """The ops of a layer without those that another op computes as well.

    >>> counted(["attention", "softmax", "qkv", "context", "scores"])
    ('qkv', 'attention')
    """
    names = set(ops)
    fused = "attention" in names
    kept = [name for name in names if not (fused and name.partition(".")[0] in _UNFUSED)]
    return tuple(sorted(kept, key=op_order))
