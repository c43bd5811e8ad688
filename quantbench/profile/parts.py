"""Defines the provenance and the cliffs of a profile, as they are stored in its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quantbench.errors import InputError
from quantbench.workload import Workload


@dataclass(frozen=True)
class RunSource:
    """Run from which a profile was built.

    origin: measured, imported or simulated.
    cache: cold, hot or unknown.
    rows: number of profile rows taken from it.
    keys_sha256: digest of all record keys in order.
    """

    run_id: str
    origin: str
    source: str
    cache: str
    records: int
    rows: int
    keys_sha256: str


@dataclass(frozen=True)
class Provenance:
    """Origin of a profile.

    quantbench: version that built it.
    num_cliffs: number of cliffs found, of which the profile keeps the largest.
    """

    quantbench: str
    runs: tuple[RunSource, ...] = ()
    num_cliffs: int = 0
    note: str = ""


@dataclass(frozen=True)
class KnownCliff:
    """Cliff in measured times: from size `at` to `next` of `axis`, the time jumps by `ratio` beyond the trend.

    low, high: 95 % interval of ratio.
    cause: kind of the cause.
    evidence: as in `analysis.cliffs.Cause`; "" for a family.
    num_curves: 1 for a cliff of one curve; else the number of curves in the family, and ratio is their median.
    held, before, after, keys: fixed sizes, workloads on both sides and their record keys; empty for a family.
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
