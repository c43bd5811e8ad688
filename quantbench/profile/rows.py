"""From the records of runs to tables: one row per workload and provider."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quantbench.errors import InputError
from quantbench.measurement import GRADES
from quantbench.profile.table import LAYOUTS, Table
from quantbench.stats import median, median_interval
from quantbench.store.folder import Run
from quantbench.store.record import ORIGINS, Measured, Record

_WHO = "profile export"


@dataclass(frozen=True)
class _Figure:
    record: Record
    latency_us: float
    low_us: float
    high_us: float
    grade: str

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is better: own measurements before imported ones before simulated ones, then by grade."""
        return ORIGINS.index(self.record.origin), GRADES.index(self.grade)


def tables_of(runs: Sequence[Run]) -> tuple[dict[str, Table], dict[str, int]]:
    """(tables by kind, rows that each run gave to them by run id).

    Where several records time one workload by one provider, those of the best origin and grade count: the middle one
    of them is the figure, and its interval spans all of theirs.
    """
    groups: dict[tuple[str, tuple[Any, ...]], list[_Figure]] = {}
    for run in runs:
        for figure in _figures(run.records):
            kind = figure.record.workload.kind
            groups.setdefault((kind, _key(kind, figure.record)), []).append(figure)
    columns: dict[str, dict[str, list[Any]]] = {
        kind: {name: [] for name in layout.names} for kind, layout in LAYOUTS.items()
    }
    given = {run.info.run_id: 0 for run in runs}
    for (kind, key), figures in groups.items():
        best = min(figure.rank for figure in figures)
        alike = sorted((f for f in figures if f.rank == best), key=lambda f: (f.latency_us, f.record.run_id))
        chosen = alike[(len(alike) - 1) // 2]
        given[chosen.record.run_id] += 1
        row = dict(zip(LAYOUTS[kind].keys, key, strict=True))
        if kind == "gemm":
            row |= _kernel(chosen.record)
        row |= {
            "latency_us": chosen.latency_us, "low_us": min(f.low_us for f in alike),
            "high_us": max(f.high_us for f in alike), "grade": chosen.grade, "origin": chosen.record.origin,
        }  # fmt: skip
        for name, value in row.items():
            columns[kind][name].append(value)
    return {kind: Table.of(kind, of_kind) for kind, of_kind in columns.items()}, given


def _figures(records: Iterable[Record]) -> Iterable[_Figure]:
    for record in records:
        outcome = record.outcome
        if record.role != "point" or not isinstance(outcome, Measured) or outcome.grade.letter == "rejected":
            continue
        samples_us = outcome.measurement.samples_us
        if len(samples_us) == 1:
            yield _Figure(record, samples_us[0], samples_us[0], samples_us[0], outcome.grade.letter)
        else:
            interval = median_interval(samples_us)
            yield _Figure(record, median(samples_us), interval.low, interval.high, outcome.grade.letter)


def _key(kind: str, record: Record) -> tuple[Any, ...]:
    names = LAYOUTS[kind].keys
    return tuple(record.provider if name == "provider" else getattr(record.workload, name) for name in names)


def _kernel(record: Record) -> dict[str, Any]:
    launch = record.launch
    tile = None if launch is None else launch.tile
    return {
        "kernel": "" if launch is None else launch.kernel, "block_m": 0 if tile is None else tile.block_m,
        "block_n": 0 if tile is None else tile.block_n, "split_k": 0 if tile is None else tile.split_k,
    }  # fmt: skip


def cache_state(run: Run) -> str:
    """cold, hot or unknown: how a run's points were timed. Raises InputError for a run of both."""
    found = {
        record.outcome.measurement.cache
        for record in run.records
        if record.role == "point" and isinstance(record.outcome, Measured)
    }
    if len(found) > 1:
        raise InputError(_WHO, f"run {run.info.run_id} holds points timed {' and '.join(sorted(found))}", "one of them")
    return next(iter(found), "unknown")


def check_alike(runs: Sequence[Run]) -> None:
    """Raise InputError where runs cannot stand in one profile."""
    if not runs:
        raise InputError(_WHO, "no runs", "at least one")
    first = runs[0].info
    names = [run.info.run_id for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(_WHO, f"run {twice} is given twice", "each run once")
    for run in runs[1:]:
        for what in ("name", "kind", "sm_count", "memory_bytes", "compute_capability"):
            mine, other = getattr(first.device, what), getattr(run.info.device, what)
            if mine != other:
                ran = f"run {first.run_id} is of {what} {mine}, run {run.info.run_id} of {other}"
                raise InputError(_WHO, ran, "runs of one device")
    origins = {run.info.origin == "simulated" for run in runs}
    if len(origins) > 1:
        raise InputError(_WHO, "simulated runs beside measured ones", "one or the other")
    states = {cache_state(run) for run in runs} - {"unknown"}
    if len(states) > 1:
        raise InputError(_WHO, "runs timed with cold and with hot caches", "runs timed alike (--cache)")
