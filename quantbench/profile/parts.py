"""What a profile says beside its tables: where it comes from, cliffs, and what was found of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantbench.errors import InputError, require_choice
from quantbench.workload import Workload


@dataclass(frozen=True)
class RunSource:
    """A run that a profile was made of. origin: measured, imported or simulated; source: whose figures, for imported
    ones. cache: cold, hot or unknown. records: lines of the run; rows: of these in the tables. keys_sha256: digest of
    all record keys in order."""

    run_id: str
    origin: str
    source: str
    cache: str
    records: int
    rows: int
    keys_sha256: str


@dataclass(frozen=True)
class Provenance:
    """quantbench: the version that made it. runs: in order of their ids. num_cliffs: that were found, of which the
    profile holds the largest. note: what else is to be known, in words."""

    quantbench: str
    runs: tuple[RunSource, ...] = ()
    num_cliffs: int = 0
    note: str = ""


@dataclass(frozen=True)
class KnownCliff:
    """After size `at` of `axis` the time jumps by `ratio`, beyond the trend around it, until `next` at the latest.

    low, high: 95 % interval of ratio. num_curves: 1 for a cliff of one curve; more where it is the middle of that many
    curves of one family. cause: its kind; why: in words; evidence: identity, arithmetic or clock. held: the sizes that
    were held (of one curve). before, after: the workloads on both sides, None for a cliff of many curves. keys: their
    records.
    """

    axis: str
    at: int
    next: int
    ratio: float
    low: float
    high: float
    op: str
    provider: str
    variant: str
    cause: str
    why: str = ""
    evidence: str = ""
    num_curves: int = 1
    held: Mapping[str, int] = field(default_factory=dict)
    before: Workload | None = None
    after: Workload | None = None
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        who = f"cliff after {self.axis} = {self.at}"
        if not 0 < self.low <= self.ratio <= self.high < float("inf"):
            raise InputError(who, f"ratio {self.low!r} to {self.high!r} around {self.ratio!r}", "finite, in order")
        if not 0 < self.at < self.next:
            raise InputError(who, f"next = {self.next!r}", "a larger size")


@dataclass(frozen=True)
class Finding:
    """What the runs say of a rule. effect, low, high: time per work where it is broken over where it is kept, with its
    95 % interval; predicted: what tiles and waves alone would make it. evidence: keys of records (the first ones, of
    evidence_total). reason: what stands in the way of a verdict."""

    rule: str
    predicate: str
    claim: str
    verdict: str
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    num_pairs: int = 0
    predicted: float | None = None
    evidence: tuple[str, ...] = ()
    evidence_total: int = 0
    reason: str = ""

    def __post_init__(self) -> None:
        require_choice(
            f"finding {self.rule}", "verdict", self.verdict, ("CONFIRMED", "REFUTED", "INCONCLUSIVE", "NOT TESTED")
        )
        for name in ("effect", "low", "high", "predicted"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"finding {self.rule}", f"{name} = {value!r}", "a finite ratio above 0, or null")
