"""Converts the records of a run to points, and sums the points of a layer to rows.

A `Point` is one measured workload at one grid point, with its time, rates and fraction of peak. A
`LayerRow` sums the points of all ops at one grid point. The analyses and the reports of a run start
from these two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import attrgetter
from typing import TypeGuard

from quantbench import units
from quantbench.device.spec import DeviceSpec
from quantbench.latency.op_times import peak_share
from quantbench.launch import Launch
from quantbench.measurement import GRADES, Grade, Measurement
from quantbench.stats import median, noise
from quantbench.store.record import Measured, Outcome, Record
from quantbench.sweep.sizes import UNFUSED_OPS
from quantbench.units import latency
from quantbench.workload import Workload

_OP_NAMES = (
    "qkv",
    "scores",
    "softmax",
    "context",
    "attention",
    "proj",
    "mlp_up",
    "mlp_gate",
    "mlp_up_gate",
    "mlp_down",
    "permute",
    "experts_up",
    "experts_up_gate",
    "experts_down",
    "unpermute",
    "logits",
)


@dataclass(frozen=True)
class Point:
    """One measured workload at one grid point.

    key: key of the record.
    axes: value of each axis at the grid point.
    op: name of the op at the grid point.
    count: number of times that the shape at this grid point runs the workload.
    latency_us: median time (see `stated.stated`), in µs.
    low_us, high_us: 95 % confidence interval of this time, in µs.
    tflops: useful floating-point operations per second, in 1e12.
    gb_per_s: minimal memory traffic per second, in 1e9 bytes.
    peak_share: fraction of the dense peak for GEMMs and attention, and of the memory bandwidth for
        other workloads; None if the peak is unknown, and on a CPU.
    grade: quality grade of the measurement.
    noise: robust relative standard deviation of the samples; 0 for a single sample.
    clock_mhz: median SM clock during the samples; None if it was not recorded.
    mode: timing mode (see `Measurement`).
    floor_us: time of an empty kernel in this mode, below which no kernel gets; None if unknown.
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
    mode: str = "unknown"
    floor_us: float | None = None

    @property
    def total_us(self) -> float:
        """Time in µs of all `count` runs of the workload."""
        return self.latency_us * self.count


@dataclass(frozen=True)
class LayerRow:
    """Sum over the ops of one layer at one grid point.

    axes: value of each axis at the grid point.
    provider: provider of all ops, or FASTEST.
    points: points of the ops that are summed.
    latency_us: sum of latency × count over these ops, in µs.
    half_width: half-width of the sum's 95 % interval, relative to the sum.
    tflops, gb_per_s, peak_share: the same as in `Point`, for the sum.
    grade: worst grade of all ops, including the logits.
    logits: points of the model's logits if they are excluded from the sum, which is the case at
        grid points with other ops; else empty.
    missing: ops that were measured at other grid points but not at this one. A row with missing ops
        must not be compared with other rows.
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

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the ops that are summed."""
        return tuple(map(attrgetter("op"), self.points))

    @cached_property
    def work(self) -> float:
        """Floating-point operations of the summed ops; bytes if there are none (collectives)."""
        flops = sum([p.workload.flops * p.count for p in self.points])
        return float(flops or sum(p.workload.min_bytes * p.count for p in self.points))

    @property
    def logits_us(self) -> float | None:
        """Time of `logits` in µs, which `latency_us` excludes; None if `logits` is empty."""
        return sum(map(attrgetter("total_us"), self.logits)) if self.logits else None

    @property
    def floor_us(self) -> float | None:
        """Time in µs of one empty kernel per run of each summed op; None if it is unknown."""
        floors = [p.floor_us * p.count for p in self.points if p.floor_us is not None]
        return sum(floors) if len(floors) == len(self.points) else None

    @property
    def worst(self) -> Point:
        """The summed op with the smallest fraction of peak."""
        return min(self.points, key=lambda p: (p.peak_share is None, p.peak_share, p.op))


def useful_work(workload: Workload) -> int:
    """Returns the floating-point operations of a workload, or its bytes if it has none.

    Collectives have no floating-point operations.
    """
    return workload.flops or workload.min_bytes


def held_of(axes: Mapping[str, int], axis: str) -> tuple[tuple[str, int], ...]:
    """Returns the (name, value) pairs of all axes except `axis`."""
    return tuple([item for item in axes.items() if item[0] != axis])


def values_along(rows: Iterable[LayerRow], axis: str) -> set[int | None]:
    """Returns the distinct values of an axis, with None if a row does not have the axis."""
    return {row.axes.get(axis) for row in rows}


def op_order(label: str) -> tuple[int, str]:
    """Returns a sort key that puts op labels in the order of the layer.

    Each forward op comes before its gradients. Unknown ops come last.

    >>> sorted(["mlp_down", "qkv.dgrad", "qkv"], key=op_order)
    ['qkv', 'qkv.dgrad', 'mlp_down']
    """
    name = label.partition(".")[0]
    return (_OP_NAMES.index(name) if name in _OP_NAMES else len(_OP_NAMES), label)


def points_of(records: Iterable[Record], spec: DeviceSpec) -> tuple[Point, ...]:
    """Returns a point for each grid point of each measured record.

    The points are sorted by grid point, provider and op. Measurements of the reference points, and
    measurements that were rejected as impossible, are left out.

    spec: device that ran the records.
    """
    found: list[Point] = []
    for record in records:
        if record.role == "point" and is_accepted(record.outcome):
            found += _points(record, record.outcome, spec)
    return tuple(sorted(found, key=lambda p: (tuple(p.axes.values()), p.provider, op_order(p.op))))


def is_accepted(outcome: Outcome) -> TypeGuard[Measured]:
    """Returns whether an outcome is a measurement that was not rejected as impossible."""
    return isinstance(outcome, Measured) and outcome.grade.letter != "rejected"


def rejected_lines(records: Iterable[Record]) -> list[str]:
    """Describes the rejected measurements that `points_of` leaves out.

    Each kind of reason gets one line, which states the number of measurements.
    """
    kinds: Counter[str] = Counter()
    for record in records:
        outcome = record.outcome
        if record.role == "point" and isinstance(outcome, Measured) and not is_accepted(outcome):
            kinds[outcome.grade.reasons[0].partition(":")[0]] += 1
    lines = []
    for kind, number in kinds.most_common():
        lines.append(f"{units.counted(number, 'time')} left out: {kind}")
    return lines


def _points(record: Record, outcome: Measured, spec: DeviceSpec) -> Iterable[Point]:
    """Yields a point for each grid point of a measured record."""
    measurement = outcome.measurement
    stated = measurement.stated
    work = record.workload
    num_samples = len(measurement.samples_us)
    first = Point(
        key=record.key,
        axes={},
        op="",
        count=1,
        provider=record.provider,
        workload=work,
        launch=record.launch,
        latency_us=stated.latency_us,
        low_us=stated.interval.low,
        high_us=stated.interval.high,
        tflops=work.flops / stated.latency_us / 1e6,
        gb_per_s=work.min_bytes / stated.latency_us / 1e3,
        peak_share=peak_share(work, stated.latency_us, spec),
        grade=outcome.grade,
        num_samples=num_samples,
        noise=0.0 if num_samples == 1 else noise(measurement.samples_us),
        clock_mhz=median(measurement.clocks_mhz) if measurement.clocks_mhz else None,
        mode=measurement.mode,
        floor_us=measurement.floor_us,
    )
    for place in record.places:
        yield replace(first, axes=place.axes, op=place.op, count=place.count)


# Below this time, in µs, an empty kernel takes about 2 % or more of it, so reports state both.
_FLOOR_BELOW_US = 50.0


def floor_lines(times: Iterable[tuple[float, Point | Measurement]]) -> list[str]:
    """Returns a line that states the time of an empty kernel, if some times are under 50 µs.

    Returns an empty list if no time is that short, or if the time of an empty kernel is unknown.

    times: pairs of a latency in µs and the point or measurement to which it belongs.
    """
    floors: dict[str, list[float]] = defaultdict(list)
    for latency_us, of in times:
        if latency_us < _FLOOR_BELOW_US and of.floor_us is not None:
            floors[of.mode].append(of.floor_us)
    words = []
    for mode, found in floors.items():
        ends = dict.fromkeys((latency(min(found)), latency(max(found))))
        words.append(f"{' to '.join(ends)} (empty kernel, {mode})")
    if not words:
        return []
    return [f"times under {_FLOOR_BELOW_US:.0f} µs include a floor of {' or '.join(words)}"]


def rows_of(points: Sequence[Point]) -> tuple[LayerRow, ...]:
    """Returns a row for each grid point and provider, sorted by grid point.

    The sum of a row excludes the logits if the row has other ops.
    """
    groups: dict[tuple[tuple[int, ...], str], list[Point]] = {}
    # All ops that each provider ran on a set of axes. A grid point on these axes without one of the
    # ops has a missing op.
    ops: dict[tuple[str, frozenset[str]], set[str]] = defaultdict(set)
    names = cache(frozenset[str])
    for point in points:
        groups.setdefault((tuple(point.axes.values()), point.provider), []).append(point)
        ops[point.provider, names(tuple(point.axes))].add(point.op)
    return tuple(
        _row(tuple(group), ops[provider, names(tuple(group[0].axes))])
        for (_, provider), group in sorted(groups.items(), key=lambda item: item[0])
    )


def _row(points: tuple[Point, ...], ops: Collection[str]) -> LayerRow:
    """Returns the row of one grid point and provider.

    The sum excludes the logits if the row has other ops.

    ops: names of all ops of a complete row.
    """
    whole = row_of(points, ops)
    parts: dict[bool, list[Point]] = {False: [], True: []}
    for point in points:
        parts[point.op.startswith("logits")].append(point)
    if not parts[False] or not parts[True]:
        return whole
    layer = tuple(parts[False])
    logits = tuple(parts[True])
    return replace(row_of(layer), logits=logits, grade=whole.grade, missing=whole.missing)


def row_of(points: tuple[Point, ...], ops: Collection[str] = ()) -> LayerRow:
    """Sums the points of one grid point. The provider of the row is that of the first point.

    ops: names of all ops of a complete row, from which the missing ops follow; default none.
    """
    latency_us = sum([p.total_us for p in points])
    # The errors are independent, so the squares of the half-widths add up.
    width_us = sum([((p.high_us - p.low_us) / 2 * p.count) ** 2 for p in points]) ** 0.5
    known = [p.peak_share * p.total_us for p in points if p.peak_share is not None]
    return LayerRow(
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


#: provider name of rows whose ops come from several providers
FASTEST = "each op's fastest"


def providers_run_different_ops(points: Sequence[Point]) -> bool:
    """Returns whether the providers ran different ops, so that only all together form a layer."""
    ops: dict[str, set[str]] = defaultdict(set)
    for point in points:
        ops[point.provider].add(point.op)
    return len({frozenset(own) for own in ops.values()}) > 1


def layer_rows(points: Sequence[Point]) -> tuple[LayerRow, ...]:
    """Returns a row for each dtype and grid point, with each op from its fastest provider.

    The rows are sorted by dtype and grid point. The sums include the logits.
    """
    places: dict[tuple[str, tuple[int, ...]], dict[str, Point]] = defaultdict(dict)
    # The fastest point of each op comes last, so it overwrites the others.
    for point in sorted(points, key=lambda p: -p.latency_us):
        places[point.workload.dtype, tuple(point.axes.values())][point.op] = point
    whole = set(counted(set().union(*places.values())))
    rows = []
    for _, ops in sorted(places.items()):
        # Where the unfused attention ops were measured, fused attention is not missing.
        needed = whole - {"attention"} if ops.keys() >= set(UNFUSED_OPS) else whole
        fastest = tuple(map(ops.__getitem__, counted(ops)))
        rows.append(replace(row_of(fastest, needed), provider=FASTEST))
    return tuple(rows)


def counted(ops: Iterable[str]) -> tuple[str, ...]:
    """Returns the ops that count for a layer's sum, in layer order.

    If fused attention is present, the unfused attention ops, which it replaces, are left out.

    >>> counted(["attention", "softmax", "qkv", "context", "scores"])
    ('qkv', 'attention')
    """
    names = set(ops)
    if "attention" in names:
        names = {name for name in names if name.partition(".")[0] not in UNFUSED_OPS}
    return tuple(sorted(names, key=op_order))
