"""Writes imported tables as runs, with one record per workload, provider and kernel.

The other importers read tables as `Rows` and call `write_run`. A table whose times are implausible
for the given unit or GPU is refused. Single times that the GPU cannot reach are marked in their
grade.
"""

import hashlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isfinite
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, StoreError
from quantbench.files import read_bytes
from quantbench.latency.op_times import roofline_us
from quantbench.launch import Launch
from quantbench.measurement import Grade, Measurement
from quantbench.providers import kernel_names
from quantbench.store.folder import RunWriter
from quantbench.store.record import GridPosition, Measured, Record, Skipped, record_key
from quantbench.store.run import RunInfo, now_text, read_run_info
from quantbench.timing.options import TimingOptions
from quantbench.units import counted, latency, listed
from quantbench.workload import Attention, Collective, Gemm, Workload

# A table is refused if its median ratio of time to roofline time is outside these limits. The
# median ratio is 0.6 to 3.7 in the packaged tables, and down to 0.05 for small shapes in a cache.
# With a unit that is wrong by a factor of 1,000, it would be below 0.004 or above 500.
_FASTEST = 1 / 30
_SLOWEST = 100.0
# Two tests show that a table belongs to another GPU. First, more than this fraction of the records
# exceeds the peak; if fewer than _FEWEST records exceed it, the limit is half of the records. In
# the public tables, no GEMM exceeds the peak.
_MOST_REJECTED = 0.2
# Second, the median ratio of time to roofline time is above _SLOWEST_LONG for long GEMMs of tuned
# libraries, of which there must be at least _FEWEST. In the public tables, this median is 0.3 to
# 2.5. A GEMM is long if its roofline time is at least _LONG_US.
_LONG_US = 50.0
_SLOWEST_LONG = 4.0
_FEWEST = 10
_TUNED = ("aiter", "cublas", "torch")
# Approximate number of rows from which the medians are computed.
_MOST_JUDGED = 1000
# Largest number of rows that a note names.
_MOST_NAMED = 3

#: microseconds in each unit of time
UNITS_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}

# Maps other tools' names of dtypes to quantbench's names.
_DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
    "float32": "fp32", "float": "fp32", "single": "fp32",
    "float8_e4m3fn": "fp8", "fp8_e4m3": "fp8",
}  # fmt: skip


def dtype_name(text: str) -> str:
    """Returns quantbench's name of a dtype. An unknown name is returned in lower case.

    >>> dtype_name("torch.bfloat16")
    'bf16'
    """
    name = text.strip().lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


@dataclass(frozen=True)
class Row:
    """Workload and time from one row of an imported table.

    latency_us: the table's time in µs. It may be nan, 0 or negative.
    provider: library that ran the workload (`sglang`, `vllm.flash_attn_fa3`).
    place: grid point of the row: the sizes that the table varies, and the op.
    kernel: name of the kernel; None if it is unknown.
    where: position of the row in the table, for messages (`line 12`).
    launch: launch of the kernel; None if the table has no more about it than the kernel's name.
    """

    workload: Workload
    latency_us: float
    provider: str
    place: GridPosition
    kernel: str | None = None
    where: str = ""
    launch: Launch | None = None

    @property
    def has_time(self) -> bool:
        """Whether the time is finite and above 0."""
        return isfinite(self.latency_us) and self.latency_us > 0


@dataclass
class Rows:
    """Rows in the order of the table.

    left_out: number of rows that are not used, by reason.
    """

    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Number of rows that were read, including those left out."""
        return len(self.rows) + sum(self.left_out.values())

    def sample(self, count: int, seed: int) -> None:
        """Keeps `count` random rows of each dtype, in the order of the table."""
        by_dtype: dict[str, list[int]] = defaultdict(list)
        for index, row in enumerate(self.rows):
            by_dtype[row.workload.dtype].append(index)
        random = Random(seed)
        chosen: list[int] = []
        for rows in by_dtype.values():
            chosen += random.sample(rows, min(count, len(rows)))
        chosen.sort()
        if len(chosen) < len(self.rows):
            reason = f"not among {count} random rows of its dtype"
            self.left_out[reason] += len(self.rows) - len(chosen)
        self.rows = [self.rows[index] for index in chosen]


_UNKNOWN_STATE = DeviceState(note="imported: the device's state was not recorded")


@dataclass(frozen=True)
class Origin:
    """Provenance of an imported table.

    run_id: name of the run. Without a name from the user, it depends only on the table, so that
        importing the same table twice gives the same run.
    source: package, version, table and framework in one line.
    software: version of each software by name.
    options: description of the table in run.json (importer, file, sha256, …).
    mode: timing mode of the times, or `unknown`.
    caveats: reasons that are stored with every record's grade.
    """

    run_id: str
    source: str
    software: dict[str, str]
    options: dict[str, str]
    mode: str = "unknown"
    caveats: tuple[str, ...] = ("imported: spread, clock and cache state were not recorded",)


def digest(path: Path) -> str:
    """Returns the SHA-256 digest of a file."""
    return hashlib.sha256(read_bytes(path)).hexdigest()


def file_origin(
    path: Path,
    importer: str,
    table: str,
    run_id: str | None,
    what: str = "",
    columns: str = "",
    **more: Any,
) -> Origin:
    """Returns the provenance of a table that the user gave as a single file.

    importer: name of the importer.
    table: kind of table.
    run_id: name of the run; None for a name made of the importer, the table and the file's digest.
    what: text before the digest in `Origin.source`.
    columns: the user's column mapping; "" if there is none.
    more: other fields of `Origin`.
    """
    sha256 = digest(path)
    options = {"importer": importer, "table": table, "file": path.name, "sha256": sha256}
    if columns:
        options["map"] = columns
    more.setdefault("software", {})
    return Origin(
        run_id or f"{importer}-{table}-{sha256[:8]}",
        f"{path.name} ({what}sha256 {sha256[:8]})",
        options=options,
        **more,
    )


@dataclass(frozen=True)
class ImportSummary:
    """Result of an import.

    folder: folder of the run.
    rows: number of rows that were read.
    records: number of records that were written.
    rejected: number of records that are faster than the device's peak.
    cached: number of records that are faster than the device's memory bandwidth (graded D).
    no_time: number of rows without a finite time above 0.
    repeated: number of (workload, provider) pairs with several different times. The times of a pair
        become the samples of its record.
    no_tile: number of records whose kernel name contains no tile.
    notes: one line for each kind of irregular row, with examples.
    left_out: number of rows that are not used, by reason.
    seconds: duration of the import in s.
    existed: whether the table had been imported before and the run was left unchanged.
    """

    folder: Path
    source: str
    rows: int = 0
    records: int = 0
    rejected: int = 0
    cached: int = 0
    no_time: int = 0
    repeated: int = 0
    no_tile: int = 0
    notes: tuple[str, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    existed: bool = False


def write_run(
    results: Path, spec: DeviceSpec, origin: Origin, found: Rows, *, units_are_right: bool = False
) -> ImportSummary:
    """Writes a table as the run `results/<device-slug>/<run-id>/`.

    A run that already contains the same table is left unchanged.

    found: rows of the table.
    units_are_right: whether to skip the check that the times are plausible for the device's
        roofline.

    Raises InputError for implausible times, for a dtype that the device lacks, for a table without
    a usable row, and if too many times are faster than the device's peak. Raises StoreError if the
    folder contains another table, the same table with other dtypes or providers, or an unfinished
    import.
    """
    if not found.rows:
        reasons = found.left_out.most_common(3)
        reason = ", ".join(f"{reason} ({rows} rows)" for reason, rows in reasons)
        raise InputError(
            "import", f"no row can be kept: {reason or 'the table is empty'}", "at least one row"
        )
    for row in found.rows:
        dtype = row.workload.dtype
        if isinstance(row.workload, Gemm | Attention) and spec.peak(dtype) is None:
            raise InputError("import", f"{dtype} on {spec.name}", f"one of {spec.dtypes}")
    start_s = time.perf_counter()
    folder = results / spec.name / origin.run_id
    described = {
        **origin.options,
        "dtypes": ", ".join(sorted({row.workload.dtype for row in found.rows})),
        "providers": ", ".join(sorted({row.provider for row in found.rows})),
    }
    if os.path.exists(folder):
        info = read_run_info(folder)
        # Runs that earlier versions imported lack some of the options.
        known = info.options
        same = all(known.get(name, value) == value for name, value in described.items())
        same = same and info.source == origin.source
        if not same or info.how_ended != "complete":
            what = "holds another table"
            if same:
                what = "is an import that did not finish"
            elif known.get("sha256") == origin.options.get("sha256"):
                what = "was imported from the same table with other options"
            raise StoreError(
                "import", f"{folder} {what}", "another --run-id, or that folder removed"
            )
        return ImportSummary(folder, origin.source, existed=True)
    if not units_are_right:
        _require_plausible(found.rows, spec)
    records = list(records_of(found.rows, origin, spec))
    outcomes = [record.outcome for record in records]
    letters = Counter(one.grade.letter for one in outcomes if isinstance(one, Measured))
    if not letters:
        raise InputError(
            "import", f"no row has a time above 0, such as {_times(found.rows[:1])}", "at least one"
        )
    # A few rejected records show another GPU only if they are the majority.
    most = _MOST_REJECTED if letters["rejected"] >= _FEWEST else 0.5
    if letters["rejected"] > most * letters.total():
        share = f"{letters['rejected']:,} of"
        if letters["rejected"] == letters.total():
            share = "all"
        raise InputError(
            "import",
            f"{share} {letters.total():,} figures are above the peak of {spec.name}",
            "times that it can reach: the right --gpu, dtype and unit",
        )
    axes: dict[str, set[int]] = defaultdict(set)
    for row in found.rows:
        for name, value in row.place.axes.items():
            axes[name].add(value)
    info = RunInfo(
        origin.run_id,
        spec,
        _UNKNOWN_STATE,
        origin.software,
        {name: sorted(values) for name, values in axes.items()},
        {**described, "left_out": dict(found.left_out)},
        seed=0,
        environment={},
        started=now_text(),
        origin="imported",
        source=origin.source,
    )
    with RunWriter.create(results, info) as writer:
        writer.extend(records)
        writer.end("complete", {})
    timeless = [row for row in found.rows if not row.has_time]
    repeated = _repeated(found.rows)
    no_tile = sum(record.launch is not None and record.launch.tile is None for record in records)
    return ImportSummary(
        folder,
        origin.source,
        rows=found.total,
        records=len(records),
        rejected=letters["rejected"],
        cached=letters["D"],
        no_time=len(timeless),
        repeated=len(repeated),
        no_tile=no_tile,
        notes=tuple(_notes(timeless, repeated, no_tile)),
        left_out=dict(found.left_out),
        seconds=time.perf_counter() - start_s,
    )


def records_of(rows: list[Row], origin: Origin, spec: DeviceSpec) -> Iterator[Record]:
    """Yields one record per workload, provider and launch.

    A record's samples are the valid times of its rows, in the order of the table. A record without
    a valid time has the outcome Skipped.
    """
    timing = TimingOptions()
    groups: dict[tuple[Workload, str, Launch | None], list[Row]] = defaultdict(list)
    for row in rows:
        launch = row.launch
        if launch is None and row.kernel is not None:
            launch = _launch(row.kernel)
        groups[row.workload, row.provider, launch].append(row)
    for (workload, provider, launch), group in groups.items():
        samples = tuple(row.latency_us for row in group if row.has_time)
        outcome: Measured | Skipped
        if samples:
            state = _UNKNOWN_STATE
            measurement = Measurement(
                samples, (), (), "imported", origin.mode, "unknown", state, state
            )
            outcome = Measured(measurement, _grade(workload, median(samples), spec, origin))
        else:
            outcome = Skipped(f"the table gives no time: {group[0].latency_us:g} µs")
        places = {(row.place.op, *row.place.axes.items()): row.place for row in group}
        yield Record(
            origin.run_id,
            record_key(workload, provider, timing),
            workload,
            provider,
            outcome,
            launch,
            tuple(places.values()),
            origin="imported",
            source=origin.source,
        )


@cache
def _launch(kernel: str) -> Launch:
    """Returns a launch with the tile that the kernel's name contains.

    The launch has no tile if the name contains none, or if the kernel's split_k is unknown.
    """
    name = kernel_names.parse(kernel)
    return Launch(kernel, tile=None if name.split_k_unknown else name.tile)


def _require_plausible(rows: list[Row], spec: DeviceSpec) -> None:
    """Raises InputError if a table's unit or GPU must be wrong.

    The median ratio of time to roofline time must be within wide limits, and for long GEMMs of
    tuned libraries below a narrower limit. A wrong unit changes the ratio by a factor of 1,000.
    Good libraries are within a factor of about two of the roofline, and slow kernels and small
    sizes within a factor of ten. Collectives are not checked, because their times depend on the
    links.
    """
    judged = [row for row in rows if row.has_time and not isinstance(row.workload, Collective)]
    judged = judged[:: max(1, len(judged) // _MOST_JUDGED)]
    if not judged:
        return
    ratios = [row.latency_us / roofline_us(row.workload, spec) for row in judged]
    ratio = median(ratios)
    if _FASTEST <= ratio <= _SLOWEST:
        long = []
        for times, row in zip(ratios, judged, strict=True):
            tuned = isinstance(row.workload, Gemm) and row.provider.partition(".")[0] in _TUNED
            if tuned and row.latency_us >= _LONG_US * times:
                long.append(times)
        if len(long) >= _FEWEST and median(long) > _SLOWEST_LONG:
            slow = f"large products take {median(long):.0f} times what they should"
            raise InputError(
                "import",
                f"{slow} on {spec.name} (median)",
                "the times of that GPU: the right --gpu, or --units-are-right",
            )
        return
    times_slower = f"1/{float(f'{1 / ratio:.2g}'):,.0f} of"
    if ratio > 1:
        times_slower = f"{float(f'{ratio:.2g}'):,.0f} times"
    should = f"what {spec.name} should take, such as {_times(judged[:1])}"
    raise InputError(
        "import",
        f"the median time is {times_slower} {should}",
        "times in the unit that was stated, or --units-are-right",
    )


def _repeated(rows: list[Row]) -> list[list[Row]]:
    """Returns groups of rows with the same workload and provider but different times.

    The rows of a group are sorted by time. Groups are sorted by the ratio of longest to shortest
    time, largest first.
    """
    groups: dict[tuple[Workload, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.has_time:
            groups[row.workload, row.provider].append(row)
    found = []
    for group in groups.values():
        group.sort(key=lambda row: row.latency_us)
        if group[0].latency_us < group[-1].latency_us:
            found.append(group)
    return sorted(found, key=lambda group: group[0].latency_us / group[-1].latency_us)


def _times(rows: Sequence[Row]) -> str:
    """Formats the times of several rows with the same workload.

    Example: `4096×4096×4096: 600 µs (line 2), 700 µs (line 3)`.
    """
    shown = []
    for row in rows:
        text = latency(row.latency_us) if row.has_time else f"{row.latency_us:g} µs"
        if row.where:
            text += f" ({row.where})"
        shown.append(text)
    return f"{rows[0].workload}: {', '.join(shown)}"


def _notes(timeless: Sequence[Row], repeated: Sequence[list[Row]], no_tile: int) -> Iterator[str]:
    """Yields one line for each kind of irregular row, with examples.

    timeless: rows without a time above 0.
    repeated: result of `_repeated`.
    no_tile: number of records whose kernel name contains no tile.
    """
    if timeless:
        shown = listed([_times([row]) for row in timeless], _MOST_NAMED, "; ")
        yield f"{counted(len(timeless), 'row')} without a time above 0: {shown}"
    if repeated:
        shapes = f"{counted(len(repeated), 'shape')} more than once with different times"
        most_apart = _times([repeated[0][0], repeated[0][-1]])
        yield f"{shapes}, kept as samples; most apart: {most_apart}"
    if no_tile:
        yield f"{counted(no_tile, 'record')} with a kernel name that has no tile"


def _grade(workload: Workload, latency_us: float, spec: DeviceSpec, origin: Origin) -> Grade:
    """Grades an imported time.

    A time is rejected if its FLOP/s are above the device's peak. Otherwise a time is graded D if
    its bytes per second are above the memory bandwidth, because the inputs were in a cache. All
    other times are graded C, because the spread of an imported time is unknown.
    """
    if isinstance(workload, Collective):
        return Grade("C", origin.caveats)
    peak_tflops = spec.peak(workload.dtype)
    tflops = workload.flops / latency_us / 1e6
    if peak_tflops is not None and tflops > peak_tflops:
        beyond = f"{tflops:.4g} TFLOP/s is above the peak of {peak_tflops:g}"
        return Grade("rejected", (beyond, *origin.caveats))
    gb_per_s = workload.min_bytes / latency_us / 1e3
    if gb_per_s > spec.memory_gb_per_s:
        beyond = f"{gb_per_s:.4g} GB/s is above the memory's {spec.memory_gb_per_s:g}"
        return Grade("D", (f"{beyond}: the inputs were in a cache", *origin.caveats))
    return Grade("C", origin.caveats)


def summary_lines(summary: ImportSummary) -> list[str]:
    """Describes the result of an import in several lines."""
    if summary.existed:
        return [summary.source, f"  imported before, unchanged: {summary.folder}"]
    read = counted(summary.rows, "row")
    written = counted(summary.records, "record")
    lines = [summary.source, f"  {read} read, {written} written in {summary.seconds:.1f} s"]
    if summary.rejected:
        lines.append(f"  {summary.rejected:,} of them rejected: faster than the device's peak")
    if summary.cached:
        graded = f"  {summary.cached:,} of them graded D"
        lines.append(f"{graded}: faster than the device's memory, so from a cache")
    lines += [f"  {note}" for note in summary.notes]
    for reason, rows in Counter(summary.left_out).most_common():
        lines.append(f"  {rows:,} rows left out: {reason}")
    return [*lines, f"  {summary.folder}"]
