"""Which points of two runs belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantbench.errors import InputError, require_choice
from quantbench.store.folder import Run
from quantbench.store.record import Failed, Measured, Place, Record, Skipped
from quantbench.workload import Workload

MATCHES = ("key", "workload")


@dataclass(frozen=True)
class Matched:
    """Two records of the same work. a, b: with figures that count (see `Matching` for the others)."""

    a: Record
    b: Record

    @property
    def place(self) -> Place:
        """Where the work stands on the axes of the second run (its first place there)."""
        return next(iter((*self.b.places, *self.a.places)), Place({}, self.b.workload.kind))


@dataclass(frozen=True)
class Matching:
    """pairs: both sides measured. lost: measured in a, tried and failed in b. only_a, only_b: measured on one side
    only, because the other did not try, skipped or rejected it."""

    pairs: tuple[Matched, ...]
    lost: tuple[Matched, ...]
    only_a: tuple[Record, ...]
    only_b: tuple[Record, ...]


_Key = tuple[object, ...]


def match_runs(a: Run, b: Run, by: str = "key", provider_a: str = "", provider_b: str = "") -> Matching:
    """Pair the points of two runs.

    by: `key` (same workload, provider and timing) or `workload` (whoever ran it). provider_a, provider_b: only this
    provider's points; needed with `workload` where a run has several providers for one workload.
    """
    require_choice("compare", "by", by, MATCHES)
    sides = [_side(run, by, provider, name) for run, provider, name in ((a, provider_a, "A"), (b, provider_b, "B"))]
    ours, theirs = _same_kernels_apart(*sides)
    pairs, lost, only_a = [], [], []
    for key, record in ours.items():
        other = theirs.get(key)
        if not _counts(record):
            continue
        if other is not None and _counts(other):
            pairs.append(Matched(record, other))
        elif other is not None and isinstance(other.outcome, Failed):
            lost.append(Matched(record, other))
        else:
            only_a.append(record)
    only_b = [r for key, r in theirs.items() if _counts(r) and not (key in ours and _counts(ours[key]))]
    return Matching(tuple(pairs), tuple(lost), tuple(only_a), tuple(only_b))


def _counts(record: Record) -> bool:
    return isinstance(record.outcome, Measured) and record.outcome.grade.letter != "rejected"


def _side(run: Run, by: str, provider: str, name: str) -> dict[_Key, list[Record]]:
    points = [r for r in run.records if r.role == "point" and (not provider or r.provider == provider)]
    if provider and not points:
        there = ", ".join(sorted({r.provider for r in run.records})) or "nothing"
        raise InputError("compare", f"--provider-{name.lower()} {provider}", f"one of run {name}'s: {there}")
    found: dict[_Key, list[Record]] = {}
    for record in points:
        found.setdefault((record.key,) if by == "key" else (record.workload,), []).append(record)
    if by == "workload":
        _require_one_provider(found, name)
    return found


def _require_one_provider(found: dict[_Key, list[Record]], name: str) -> None:
    for records in found.values():
        # A provider that cannot run a workload is no alternative.
        providers = sorted({r.provider for r in records if not isinstance(r.outcome, Skipped)})
        if len(providers) > 1:
            work: Workload = records[0].workload
            raise InputError(
                "compare",
                f"run {name} has {', '.join(providers)} for {work}",
                f"--provider-{name.lower()} with one of them",
            )


def _same_kernels_apart(
    a: dict[_Key, list[Record]], b: dict[_Key, list[Record]]
) -> tuple[dict[_Key, Record], dict[_Key, Record]]:
    """One record a key: where a table has several for one, they are told apart by their kernel."""

    def flat(side: dict[_Key, list[Record]], several: set[_Key]) -> dict[_Key, Record]:
        found: dict[_Key, Record] = {}
        for key, records in side.items():
            for record in _preferred(records):
                kernel = (record.launch.kernel if record.launch else "",) if key in several else ()
                found.setdefault((*key, *kernel), record)
        return found

    several = {key for side in (a, b) for key, records in side.items() if len(_preferred(records)) > 1}
    return flat(a, several), flat(b, several)


def _preferred(records: Sequence[Record]) -> list[Record]:
    """Those with a figure, else the first of whatever there is."""
    return [r for r in records if _counts(r)] or list(records[:1])
