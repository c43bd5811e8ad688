"""Defines provenance, cliffs and rule findings of a profile, and converts them and the tables to JSON and back.

Entry points: the types `Provenance`, `RunSource`, `KnownCliff`, `RuleFinding` and `StoredFile`, their functions
`*_to_json` and `*_from_json`, and `VERDICTS`. Used by `profile.profile`, `build`, `file`, `schema`,
`exporters.modelled`, the command `profile` and `tools.shelf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantbench.errors import InputError, require_choice
from quantbench.profile.table import FLAG, INTEGER, LAYOUTS, NUMBER, TEXT, Table
from quantbench.store.typed import Json, decode, encode, is_number
from quantbench.workload import Workload, workload_from_json, workload_to_json

# As `analysis.rules.VERDICTS`, whose import would slow `Profile.load` by 50 ms.
VERDICTS = ("CONFIRMED", "REFUTED", "INCONCLUSIVE", "NOT TESTED")


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


@dataclass(frozen=True)
class RuleFinding:
    """Verdict on a rule of thumb.

    effect, low, high: time per unit of work, rule broken over rule kept, with its 95 % interval.
    predicted: effect predicted from tiles and waves alone.
    evidence: first record keys of the `evidence_total` records behind the verdict.
    reason: reason for a missing verdict.
    """

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
        require_choice(f"finding {self.rule}", "verdict", self.verdict, VERDICTS)
        for name in ("effect", "low", "high", "predicted"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"finding {self.rule}", f"{name} = {value!r}", "a finite ratio above 0, or null")


@dataclass(frozen=True)
class StoredTable:
    """Table in a profile's JSON; `StoredFile` is its counterpart in a Parquet file."""

    columns: tuple[str, ...]
    rows: tuple[list[Any], ...]


@dataclass(frozen=True)
class StoredFile:
    """Reference from a profile's JSON to the Parquet file of a table. sha256: digest of that file."""

    columns: tuple[str, ...]
    file: str
    num_rows: int
    sha256: str


def table_to_json(table: Table) -> Json:
    """Returns a table as a JSON object of column names and rows."""
    lists = [values.tolist() for values in table.columns.values()]
    return {"columns": list(table.columns), "rows": [list(row) for row in zip(*lists, strict=True)]}


# Column kind → (check of a value, expected values)
_VALID: dict[str, tuple[Callable[[Any], bool], str]] = {
    INTEGER: (lambda value: type(value) is int and abs(value) < 2**62, "integer values below 2**62"),
    NUMBER: (is_number, "number values"),
    FLAG: (lambda value: type(value) is bool, "flag values"),
    TEXT: (lambda value: type(value) is str, "text values"),
}


def table_from_json(kind: str, data: Json, who: str) -> Table:
    """Inverse of `table_to_json`. Raises InputError if the data is invalid."""
    stored = decode(StoredTable, data, who)
    names, rows = stored.columns, stored.rows
    if names != LAYOUTS[kind].names:
        raise InputError(who, f"columns {names!r}"[:120], ", ".join(LAYOUTS[kind].names))
    if not all(len(row) == len(names) for row in rows):
        raise InputError(who, "rows of another length", f"lists of {len(names)} values")
    columns = {}
    for i, column in enumerate(LAYOUTS[kind].columns):
        values = [row[i] for row in rows]
        valid, expected = _VALID[column.kind]
        for value in values:
            if not valid(value):
                raise InputError(who, f"{column.name} = {value!r}"[:100], expected)
        columns[column.name] = values
    return Table(kind, columns)  # type: ignore[arg-type]


def provenance_to_json(provenance: Provenance) -> Json:
    return encode(provenance)  # type: ignore[no-any-return]


def provenance_from_json(data: object) -> Provenance:
    return decode(Provenance, data, "profile provenance", whole=True)


def cliff_to_json(cliff: KnownCliff) -> Json:
    sides = {name: None if (work := getattr(cliff, name)) is None else workload_to_json(work)
             for name in ("before", "after")}  # fmt: skip
    return {**encode(cliff), **sides}


def cliffs_from_json(data: object) -> tuple[KnownCliff, ...]:
    """Inverse of `cliff_to_json`, for a list."""
    return tuple(_cliff(one) for one in _list(data, "profile cliffs"))


def _cliff(data: object) -> KnownCliff:
    if isinstance(data, dict):
        works = {name: workload_from_json(data[name]) for name in ("before", "after") if data.get(name) is not None}
        data = {**data, **works}
    return decode(KnownCliff, data, "profile cliff", whole=True)


def finding_to_json(finding: RuleFinding) -> Json:
    return encode(finding)  # type: ignore[no-any-return]


def findings_from_json(data: object) -> tuple[RuleFinding, ...]:
    """Inverse of `finding_to_json`, for a list."""
    return tuple(decode(RuleFinding, one, "profile finding", whole=True) for one in _list(data, "profile findings"))


def software_from_json(data: object) -> Mapping[str, str]:
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise InputError("profile software", repr(data)[:80], "versions by name")
    return data


def _list(data: object, who: str) -> list[Any]:
    if not isinstance(data, list):
        raise InputError(who, repr(data)[:80], "a list")
    return data
