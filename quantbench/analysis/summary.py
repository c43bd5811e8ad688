"""From records to figures: median and interval, TFLOP/s, GB/s, share of peak, for each place on the axes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from quantbench.device.spec import DeviceSpec
from quantbench.latency.roofline import peak_share
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

    latency_us: median of the samples; low_us, high_us: its 95 % confidence interval. count: how often the shape at
    this place runs it. tflops, gb_per_s: useful work over the median. peak_share: of the dense peak for products and
    attention, of the memory bandwidth for softmax; None where the device's figure is not known. num_samples: accepted
    samples behind the median; noise: their relative standard deviation (0 for a single figure). clock_mhz: median SM
    clock beside the samples; None where the device did not tell.
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
    """The ops of one layer that one provider ran at one place, taken together: a line of the sweep's table.

    points: the ops of the sum, each as often as it runs (once, but in runs of whole models). latency_us: their sum.
    half_width: relative half-width of that sum's interval. grade: the worst of all ops'. worst: the op with the
    smallest share of peak. logits: those of the model, apart, where the place has other ops as well. missing: ops that
    the provider has at other places and that were not measured here; figures of such a row are sums over fewer ops and
    compare with no other row's.
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
        flops = sum(p.workload.flops * p.count for p in self.points)
        return float(flops or sum(p.workload.min_bytes * p.count for p in self.points))

    @property
    def logits_us(self) -> float | None:
        """Time of the logits that the row's time leaves out; None where there are none."""
        return sum(p.latency_us * p.count for p in self.logits) if self.logits else None

    @property
    def worst(self) -> Point:
        return min(self.points, key=lambda p: (p.peak_share is None, p.peak_share, p.op))


def op_order(label: str) -> tuple[int, str]:
    """Sorts ops as a layer runs them, gradients behind the forward pass, anything else last.

    >>> sorted(["mlp_down", "qkv.dgrad", "qkv"], key=op_order)
    ['qkv', 'qkv.dgrad', 'mlp_down']
    """
    name = label.partition(".")[0]
    return (_OP_NAMES.index(name) if name in _OP_NAMES else len(_OP_NAMES), label)


def points_of(records: Iterable[Record], spec: DeviceSpec) -> tuple[Point, ...]:
    """Every measured point at every place it stands for, in order of places. Reference repetitions are left out, and
    so are figures that were rejected as impossible."""
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


def rows_of(points: Sequence[Point], spec: DeviceSpec) -> tuple[Row, ...]:
    """The points of each place and provider taken together, logits apart, in order of places."""
    groups: dict[tuple[tuple[int, ...], str], list[Point]] = {}
    ops: dict[tuple[str, frozenset[str]], set[str]] = {}
    for point in points:
        groups.setdefault((tuple(point.axes.values()), point.provider), []).append(point)
        ops.setdefault(_kind_of_place(point), set()).add(point.op)
    return tuple(
        _row(group, spec, ops[_kind_of_place(group[0])])
        for _, group in sorted(groups.items(), key=lambda item: item[0])
    )


def _row(points: Sequence[Point], spec: DeviceSpec, ops: Collection[str]) -> Row:
    logits = tuple(p for p in points if p.op.partition(".")[0] == "logits")
    layer = tuple(p for p in points if p not in logits)
    whole = row_of(tuple(points), spec, ops)
    if not layer or not logits:
        return whole
    return replace(row_of(layer, spec), logits=logits, grade=whole.grade, missing=whole.missing)


def _kind_of_place(point: Point) -> tuple[str, frozenset[str]]:
    """Places of one provider along the same axes have the same ops, unless some were not measured."""
    return point.provider, frozenset(point.axes)


def row_of(points: tuple[Point, ...], spec: DeviceSpec, ops: Collection[str] = ()) -> Row:
    """Points of one place taken together; the provider is the first one's. ops: those that a whole row has."""
    latency_us = sum(p.latency_us * p.count for p in points)
    # The intervals are independent, so their widths add as squares.
    width_us = sum(((p.high_us - p.low_us) / 2 * p.count) ** 2 for p in points) ** 0.5
    shares = [(p.peak_share, p.latency_us * p.count) for p in points]
    known = [(share, time_us) for share, time_us in shares if share is not None]
    return Row(
        axes=points[0].axes,
        provider=points[0].provider,
        points=points,
        latency_us=latency_us,
        half_width=width_us / latency_us,
        tflops=sum(p.workload.flops * p.count for p in points) / latency_us / 1e6,
        gb_per_s=sum(p.workload.min_bytes * p.count for p in points) / latency_us / 1e3,
        peak_share=sum(s * t for s, t in known) / latency_us if len(known) == len(shares) else None,
        grade=max((p.grade for p in points), key=lambda g: GRADES.index(g.letter)),
        missing=tuple(sorted(set(ops) - {p.op for p in points}, key=op_order)),
    )
