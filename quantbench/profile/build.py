"""Builds a profile's tables, models, cliffs, findings and provenance from the records of runs.

`Profile.from_runs` calls `parts_of`. A table gets one row per workload and provider. Runs that
cannot be combined, such as runs of different devices, raise InputError.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from quantbench import __version__
from quantbench.analysis.check import RunCheck, check_run
from quantbench.analysis.jumps import Cliff, CommonCliff
from quantbench.errors import InputError, first_repeated
from quantbench.measurement import GRADES
from quantbench.profile.fit import models_of
from quantbench.profile.schema import KnownCliff, Provenance, RunSource
from quantbench.profile.table import LAYOUTS, Table
from quantbench.rules import Verdict
from quantbench.store.folder import Run
from quantbench.store.record import ORIGINS, Measured, Record

_WHO = "profile export"


class _Timing(NamedTuple):
    """Time of one record.

    rank: indices of the record's origin in ORIGINS and of its grade in GRADES; smaller is better.
    """

    rank: tuple[int, int]
    latency_us: float
    low_us: float
    high_us: float
    record: Record


def tables_of(runs: Sequence[Run]) -> tuple[dict[str, Table], dict[str, int]]:
    """Returns the tables by kind, and by run id the number of rows that come from each run.

    Several records may time the same workload and provider. Records with the best origin
    (measured, then imported, then simulated) are kept, and among them the records with the best
    grade. The kept record with the median time becomes the row; of two middle records, the faster
    one does. The row's interval covers the intervals of all kept records.
    """
    groups: dict[str, dict[tuple[Any, ...], list[_Timing]]] = {kind: {} for kind in LAYOUTS}
    for run in runs:
        for timing in _timings(run.records):
            record = timing.record
            kind = record.workload.kind
            if kind in LAYOUTS:
                # The last key column is the provider. The other key columns are fields of the
                # workload.
                sizes = attrgetter(*LAYOUTS[kind].keys[:-1])(record.workload)
                groups[kind].setdefault((*sizes, record.provider), []).append(timing)
    num_rows = {run.info.run_id: 0 for run in runs}
    tables = {}
    for kind, layout in LAYOUTS.items():
        rows = [(*key, *_row(kind, timings, num_rows)) for key, timings in groups[kind].items()]
        columns = zip(*rows, strict=True) if rows else [()] * len(layout.names)
        tables[kind] = Table.of(kind, dict(zip(layout.names, columns, strict=True)))
    return tables, num_rows


def _timings(records: Iterable[Record]) -> Iterator[_Timing]:
    """Yields the time of each measured point, except points with the grade `rejected`."""
    for record in records:
        outcome = record.outcome
        if record.role != "point" or not isinstance(outcome, Measured):
            continue
        if outcome.grade.letter != "rejected":
            rank = ORIGINS.index(record.origin), GRADES.index(outcome.grade.letter)
            stated = outcome.measurement.stated
            interval = stated.interval
            yield _Timing(rank, stated.latency_us, interval.low, interval.high, record)


def _row(kind: str, timings: list[_Timing], num_rows: dict[str, int]) -> tuple[Any, ...]:
    """Returns the row's values that follow its key columns, and counts the row in `num_rows`.

    timings: times of one workload by one provider.
    num_rows: number of rows by run id; the count of the row's run is increased in place.
    """
    best = min(timing.rank for timing in timings)
    alike = [timing for timing in timings if timing.rank == best]
    alike.sort(key=lambda timing: (timing.latency_us, timing.record.run_id))
    middle = alike[(len(alike) - 1) // 2]
    num_rows[middle.record.run_id] += 1
    kernel: tuple[str | int, ...] = ()
    if kind == "gemm":
        launch = middle.record.launch
        tile = launch and launch.tile
        blocks = (tile.block_m, tile.block_n, tile.split_k) if tile else (0, 0, 0)
        kernel = (launch.kernel if launch else "", *blocks)
    low_us = min(timing.low_us for timing in alike)
    high_us = max(timing.high_us for timing in alike)
    origin, grade = best
    return *kernel, middle.latency_us, low_us, high_us, GRADES[grade], ORIGINS[origin]


def cache_state(run: Run) -> str:
    """Returns the cache state of a run's points: cold, hot or unknown.

    Raises InputError if the points have different states.
    """
    found = set()
    for record in run.records:
        if record.role == "point" and isinstance(record.outcome, Measured):
            found.add(record.outcome.measurement.cache)
    if len(found) > 1:
        shown = f"run {run.info.run_id} holds points timed {' and '.join(sorted(found))}"
        raise InputError(_WHO, shown, "one of them")
    return next(iter(found), "unknown")


def check_alike(runs: Sequence[Run]) -> None:
    """Raises InputError if the runs cannot be combined in one profile.

    There must be at least one run, and no run may be given twice. All runs must be of one device.
    Runs with a known cache state must have the same state. Simulated runs do not mix with other
    runs.
    """
    if not runs:
        raise InputError(_WHO, "no runs", "at least one")
    first = runs[0].info
    names = [run.info.run_id for run in runs]
    twice = first_repeated(names)
    if twice is not None:
        raise InputError(_WHO, f"run {twice} is given twice", "each run once")
    for run in runs[1:]:
        for what in ("name", "kind", "sm_count", "memory_bytes", "compute_capability"):
            mine = getattr(first.device, what)
            other = getattr(run.info.device, what)
            if mine != other:
                ran = f"run {first.run_id} is of {what} {mine}, run {run.info.run_id} of {other}"
                raise InputError(_WHO, ran, "runs of one device")
    simulated = [run.info.origin == "simulated" for run in runs]
    if any(simulated) and not all(simulated):
        raise InputError(_WHO, "simulated runs beside measured ones", "one or the other")
    states = {cache_state(run) for run in runs} - {"unknown"}
    if len(states) > 1:
        raise InputError(
            _WHO, "runs timed with cold and with hot caches", "runs timed alike (--cache)"
        )


# Largest number of record keys stored as evidence per finding. A finding may have thousands.
_MOST_EVIDENCE = 50
# Largest number of cliffs of single curves that a profile stores.
_MOST_CLIFFS = 300


def cliffs_of(
    checks: Iterable[RunCheck], *, keep: int = _MOST_CLIFFS
) -> tuple[tuple[KnownCliff, ...], int]:
    """Returns the cliffs to store, largest first, and the number of cliffs found.

    A cliff is a jump of the time between neighbouring sizes of a curve. A table with tens of
    thousands of rows has thousands of cliffs, so only the `keep` largest cliffs of single curves
    are stored. Cliffs that a family of curves has in common are all stored.
    """
    single: list[KnownCliff] = []
    common: list[KnownCliff] = []
    for check in checks:
        for cliff in check.cliffs:
            known = KnownCliff(
                **_edge(cliff),
                cause=cliff.cause.kind,
                why=cliff.cause.words,
                evidence=cliff.cause.evidence,
                held=dict(cliff.held),
                before=cliff.before.workload,
                after=cliff.after.workload,
                keys=(cliff.before.key, cliff.after.key),
            )
            single.append(known)
        for family in check.common:
            why = f"median over {family.num_curves} curves"
            edge = _edge(family)
            common.append(
                KnownCliff(**edge, cause=family.cause, why=why, num_curves=family.num_curves)
            )

    def rank(cliff: KnownCliff) -> tuple[Any, ...]:
        held = tuple(sorted(cliff.held.items()))
        return -cliff.ratio, cliff.axis, cliff.at, cliff.op, cliff.provider, cliff.variant, held

    kept = sorted(single, key=rank)[:keep]
    return tuple(sorted(kept + common, key=rank)), len(single) + len(common)


def _edge(cliff: Cliff | CommonCliff) -> dict[str, Any]:
    """Returns the KnownCliff fields that Cliff and CommonCliff share."""
    names = ("axis", "at", "next", "ratio", "low", "high", "op", "provider", "variant")
    return {name: getattr(cliff, name) for name in names}


def findings_of(checks: Iterable[RunCheck]) -> tuple[Verdict, ...]:
    """Returns one verdict per rule: that of the run which compares the most pairs of points.

    Each verdict keeps at most _MOST_EVIDENCE record keys as evidence.
    """
    best: dict[str, Verdict] = {}
    for verdict in chain.from_iterable(check.rules for check in checks):
        if verdict.rule not in best or verdict.num_pairs > best[verdict.rule].num_pairs:
            best[verdict.rule] = replace(verdict, evidence=verdict.evidence[:_MOST_EVIDENCE])
    return tuple(best.values())


def parts_of(runs: Sequence[Run], *, fit: bool, seed: int) -> dict[str, Any]:
    """Returns the fields of the profile of these runs; see `Profile.from_runs`."""
    check_alike(runs)
    ordered = sorted(runs, key=lambda run: run.info.run_id)
    tables, num_rows = tables_of(ordered)
    if not any(map(len, tables.values())):
        raise InputError(_WHO, f"no measured point in {', '.join(num_rows)}", "at least one")
    sources = tuple(source_of(run, rows=num_rows[run.info.run_id]) for run in ordered)
    checks = list(map(check_run, ordered))  # one run at a time: a cliff compares points of one run
    cliffs, num_cliffs = cliffs_of(checks)
    device = ordered[0].info.device
    return {
        "device": device,
        "software": software_of(ordered),
        "provenance": Provenance(__version__, sources, num_cliffs),
        "tables": tables,
        "models": models_of(device, tables, fit=fit, seed=seed),
        "cliffs": cliffs,
        "findings": findings_of(checks),
    }


def source_of(run: Run, *, rows: int) -> RunSource:
    """Describes a run for the provenance of a profile.

    rows: number of the profile's rows that come from the run.
    """
    keys = hashlib.sha256("\n".join(record.key for record in run.records).encode()).hexdigest()
    return RunSource(
        run.info.run_id,
        run.info.origin,
        run.info.source,
        cache_state(run),
        len(run.records),
        rows,
        keys,
    )


def software_of(runs: Sequence[Run]) -> dict[str, str]:
    """Returns versions by software name; if the runs differ, all versions, joined by commas."""
    found: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for name, version in run.info.software.items():
            found[name].add(version)
    return {name: ", ".join(sorted(found[name])) for name in sorted(found)}
