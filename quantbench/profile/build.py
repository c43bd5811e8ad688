"""Builds a profile from the records of runs: one row per workload and provider, fitted models, cliffs, findings.

Entry point: `build`, called by `Profile.from_runs`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantbench import __version__
from quantbench.analysis.check import Check, check_run
from quantbench.analysis.cliffs import Cliff, CommonCliff
from quantbench.analysis.rules import rule_named
from quantbench.errors import InputError
from quantbench.measurement import GRADES
from quantbench.profile.fit import models_of
from quantbench.profile.parts import Finding, KnownCliff, Provenance, RunSource
from quantbench.profile.table import LAYOUTS, Table
from quantbench.stats import median, median_interval
from quantbench.store.folder import Run
from quantbench.store.record import ORIGINS, Measured, Record

if TYPE_CHECKING:
    from quantbench.profile.profile import Profile
    from quantbench.store.folder import Run


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


# Records that stand for a verdict; a table has thousands.
_MOST_EVIDENCE = 50
MOST_CLIFFS = 300


def checks_of(runs: Sequence[Run]) -> list[Check]:
    """The check of each run on its own, because its points come from the same run."""
    return [check_run(run) for run in runs]


def cliffs_of(checks: Iterable[Check], *, most: int = MOST_CLIFFS) -> tuple[tuple[KnownCliff, ...], int]:
    """(the largest sure rises of single curves, and all of the middle of many, the largest first; how many there are).

    A table of tens of thousands of rows has thousands: the small ones say little that its rows do not.
    """
    own: list[KnownCliff] = []
    common: list[KnownCliff] = []
    for check in checks:
        own += [_own(cliff) for cliff in check.cliffs]
        common += [_common(cliff) for cliff in check.common]
    kept = sorted(own, key=_rank)[:most]
    return tuple(sorted(kept + common, key=_rank)), len(own) + len(common)


def _rank(cliff: KnownCliff) -> tuple[float, str, int, str, str, str, tuple[tuple[str, int], ...]]:
    held = tuple(sorted(cliff.held.items()))
    return -cliff.ratio, cliff.axis, cliff.at, cliff.op, cliff.provider, cliff.variant, held


def _own(cliff: Cliff) -> KnownCliff:
    return KnownCliff(
        axis=cliff.axis, at=cliff.at, next=cliff.next, ratio=cliff.ratio, low=cliff.low, high=cliff.high, op=cliff.op,
        provider=cliff.provider, variant=cliff.variant, cause=cliff.cause.kind, why=cliff.cause.words,
        evidence=cliff.cause.evidence, held=dict(cliff.held), before=cliff.before.workload,
        after=cliff.after.workload, keys=(cliff.before.key, cliff.after.key),
    )  # fmt: skip


def _common(cliff: CommonCliff) -> KnownCliff:
    return KnownCliff(
        axis=cliff.axis, at=cliff.at, next=cliff.next, ratio=cliff.ratio, low=cliff.low, high=cliff.high, op=cliff.op,
        provider=cliff.provider, variant=cliff.variant, cause=cliff.cause,
        why=f"median over {cliff.num_curves} curves", num_curves=cliff.num_curves,
    )  # fmt: skip


def findings_of(checks: Iterable[Check]) -> tuple[Finding, ...]:
    """The verdict on each rule: of the run that tells most of it, where several were asked."""
    best: dict[str, Finding] = {}
    for check in checks:
        for verdict in check.rules:
            rule = rule_named(verdict.rule)
            found = Finding(
                rule=rule.id, predicate=rule.predicate, claim=rule.claim, verdict=verdict.verdict,
                effect=verdict.effect, low=verdict.low, high=verdict.high, num_pairs=verdict.num_pairs,
                predicted=verdict.predicted, evidence=verdict.evidence[:_MOST_EVIDENCE],
                evidence_total=len(verdict.evidence), reason=verdict.reason,
            )  # fmt: skip
            if rule.id not in best or found.num_pairs > best[rule.id].num_pairs:
                best[rule.id] = found
    return tuple(best.values())


def build(made: type[Profile], runs: Sequence[Run], *, fit: bool, seed: int) -> Profile:
    """See `Profile.from_runs`."""
    check_alike(runs)
    ordered = sorted(runs, key=lambda run: run.info.run_id)
    tables, given = tables_of(ordered)
    sources = tuple(source_of(run, rows=given[run.info.run_id]) for run in ordered)
    checks = checks_of(ordered)
    cliffs, num_cliffs = cliffs_of(checks)
    device = ordered[0].info.device
    return made(
        device=device,
        software=software_of(ordered),
        provenance=Provenance(__version__, sources, num_cliffs),
        tables=tables,
        models=models_of(device, tables, fit=fit, seed=seed),
        cliffs=cliffs,
        findings=findings_of(checks),
    )


def source_of(run: Run, *, rows: int) -> RunSource:
    """Where figures come from; rows: of the run's that the profile holds."""
    keys = hashlib.sha256("\n".join(record.key for record in run.records).encode()).hexdigest()
    return RunSource(run.info.run_id, run.info.origin, run.info.source, cache_state(run), len(run.records), rows, keys)


def software_of(runs: Sequence[Run]) -> dict[str, str]:
    """Versions by name; where runs differ, all of them."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.info.software.items():
            found.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(found[name])) for name in sorted(found)}
