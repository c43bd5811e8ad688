"""Cliffs and findings of runs, in a profile's own terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quantbench.analysis.check import Check, check_run
from quantbench.analysis.cliffs import Cliff
from quantbench.analysis.common_cliffs import CommonCliff
from quantbench.analysis.rules import rule_named
from quantbench.profile.parts import Finding, KnownCliff

if TYPE_CHECKING:
    from quantbench.store.folder import Run

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
