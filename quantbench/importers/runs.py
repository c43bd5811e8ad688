"""Writing imported rows as a run: one record per workload and provider, every figure graded for what it is."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import median

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import StoreError
from quantbench.importers.rows import Row, Rows, axes_of, require_rows
from quantbench.launch import Launch
from quantbench.measurement import Grade, Measurement
from quantbench.store.folder import RunWriter
from quantbench.store.record import Measured, Record, Skipped, record_key
from quantbench.store.run import RunInfo, now_text, read_run_info
from quantbench.timing.options import TimingOptions
from quantbench.workload import Collective, Workload

_UNKNOWN_STATE = DeviceState(note="imported: the device's state was not recorded")


@dataclass(frozen=True)
class Origin:
    """Where a table comes from.

    run_id: the run's name, the same for the same table. source: package, version, table and framework, in one line.
    software: versions by name. options: what the table is, for run.json (importer, file, sha256, …).
    mode, cache: how it was timed, as far as its makers say. caveats: what is not known of each figure, in words.
    """

    run_id: str
    source: str
    software: dict[str, str]
    options: dict[str, str]
    mode: str = "unknown"
    cache: str = "unknown"
    caveats: tuple[str, ...] = ("imported: spread, clock and cache state were not recorded",)


@dataclass(frozen=True)
class ImportSummary:
    """What became of a table.

    rows: looked at. records: written, of which `rejected` are impossible figures, `cached` are faster than the memory
    allows (graded D) and `no_time` hold no time at all. left_out: rows that no workload describes, by reason.
    existed: the same table had been imported before and was left as it is.
    """

    folder: Path
    source: str
    rows: int
    records: int
    rejected: int
    cached: int
    no_time: int
    left_out: dict[str, int]
    seconds: float
    existed: bool = False


def write_run(results: Path, spec: DeviceSpec, origin: Origin, found: Rows) -> ImportSummary:
    """Write `results/<device-slug>/<run-id>/`. The same table twice is recognised and left alone; another table of
    the same name, or half an import, is a StoreError."""
    require_rows("import", found)
    begun = time.perf_counter()
    folder = results / spec.name / origin.run_id
    if os.path.exists(folder):
        return _existing(folder, origin)
    info = RunInfo(
        run_id=origin.run_id,
        device=spec,
        state=_UNKNOWN_STATE,
        software=origin.software,
        axes=axes_of(found.rows),
        options={**origin.options, "left_out": dict(found.left_out)},
        seed=0,
        environment={},
        started=now_text(),
        origin="imported",
        source=origin.source,
    )
    records = list(_records(found.rows, origin, spec))
    with RunWriter.create(results, info) as writer:
        writer.extend(records)
        writer.update(replace(info, ended=now_text(), how_ended="complete"))
    outcomes = [record.outcome for record in records]
    letters = Counter(o.grade.letter for o in outcomes if isinstance(o, Measured))
    return ImportSummary(
        folder=folder,
        source=origin.source,
        rows=found.total,
        records=len(records),
        rejected=letters["rejected"],
        cached=letters["D"],
        no_time=sum(isinstance(o, Skipped) for o in outcomes),
        left_out=dict(found.left_out),
        seconds=time.perf_counter() - begun,
    )


def _existing(folder: Path, origin: Origin) -> ImportSummary:
    info = read_run_info(folder)
    same = info.source == origin.source and all(info.options.get(k) == v for k, v in origin.options.items())
    if not same or info.how_ended != "complete":
        what = "holds another table" if not same else "is an import that did not finish"
        raise StoreError("import", f"{folder} {what}", "another --run-id, or that folder removed")
    return ImportSummary(folder, origin.source, 0, 0, 0, 0, 0, {}, 0.0, existed=True)


def _records(rows: list[Row], origin: Origin, spec: DeviceSpec) -> Iterator[Record]:
    """One record per workload, provider and kernel; rows that repeat them are its samples, in the table's order."""
    timing = TimingOptions()
    groups: dict[tuple[Workload, str, str | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.provider, row.kernel), []).append(row)
    for (workload, provider, kernel), group in groups.items():
        samples = tuple(row.latency_us for row in group if isfinite(row.latency_us) and row.latency_us > 0)
        outcome: Measured | Skipped
        if samples:
            outcome = Measured(_measurement(samples, origin), _grade(workload, median(samples), spec, origin))
        else:
            outcome = Skipped(f"the table gives no time: {group[0].latency_us:g} µs")
        places = {(p.op, *p.axes.items()): p for p in (row.place for row in group)}
        yield Record(
            run_id=origin.run_id,
            key=record_key(workload, provider, timing),
            workload=workload,
            provider=provider,
            outcome=outcome,
            launch=None if kernel is None else Launch(kernel),
            places=tuple(places.values()),
            origin="imported",
            source=origin.source,
        )


def _measurement(samples_us: tuple[float, ...], origin: Origin) -> Measurement:
    return Measurement(
        samples_us=samples_us,
        clocks_mhz=(),
        discarded=(),
        stopped_by="imported",
        mode=origin.mode,
        cache=origin.cache,
        state_before=_UNKNOWN_STATE,
        state_after=_UNKNOWN_STATE,
    )


def _grade(workload: Workload, latency_us: float, spec: DeviceSpec, origin: Origin) -> Grade:
    """rejected: faster than the device's arithmetic. D: faster than its memory, so the inputs lay in a cache. C: all
    others, for somebody else's figure comes without its spread."""
    if isinstance(workload, Collective):
        return Grade("C", origin.caveats)
    peak_tflops = spec.peak(workload.dtype)
    tflops = workload.flops / latency_us / 1e6
    if peak_tflops is not None and tflops > peak_tflops:
        return Grade("rejected", (f"{tflops:.4g} TFLOP/s is above the peak of {peak_tflops:g}", *origin.caveats))
    gb_per_s = workload.min_bytes / latency_us / 1e3
    if gb_per_s > spec.memory_gb_per_s:
        beyond = f"{gb_per_s:.4g} GB/s is above the memory's {spec.memory_gb_per_s:g}: the inputs were in a cache"
        return Grade("D", (beyond, *origin.caveats))
    return Grade("C", origin.caveats)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def summary_lines(summary: ImportSummary) -> list[str]:
    """The summary as a person reads it."""
    if summary.existed:
        return [f"{summary.source}", f"  imported before, unchanged: {summary.folder}"]
    lines = [
        f"{summary.source}",
        f"  {_counted(summary.rows, 'row')} read, {_counted(summary.records, 'record')} written in "
        f"{summary.seconds:.1f} s",
    ]
    if summary.rejected:
        doubt = "; is the unit of the times right?" if summary.rejected == summary.records else ""
        lines.append(f"  {summary.rejected:,} of them rejected: faster than the device's peak{doubt}")
    if summary.cached:
        lines.append(f"  {summary.cached:,} of them graded D: faster than the device's memory, so from a cache")
    if summary.no_time:
        lines.append(f"  {summary.no_time:,} of them without a time")
    for reason, rows in Counter(summary.left_out).most_common():
        lines.append(f"  {rows:,} rows left out: {reason}")
    return [*lines, f"  {summary.folder}"]
