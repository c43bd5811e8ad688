"""The parts of a profile beside tables and models: provenance, cliffs, rule findings. Converts every part but the
models to JSON and back, for `Profile.save` and `Profile.load`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.profile.table import FLAG, INTEGER, LAYOUTS, NUMBER, TEXT, Table
from quantbench.store.typed import Json, decode
from quantbench.workload import Workload, workload_from_json, workload_to_json


@dataclass(frozen=True)
class RunSource:
    """A run that a profile was made of.

    origin: measured, imported or simulated. source: of imported figures. cache: cold, hot or unknown.
    records: number of records. rows: how many of them are in the tables.
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
    """quantbench: the version that made the profile. runs: sorted by id. num_cliffs: found; the profile has the largest
    of them."""

    quantbench: str
    runs: tuple[RunSource, ...] = ()
    num_cliffs: int = 0
    note: str = ""


@dataclass(frozen=True)
class KnownCliff:
    """Between sizes `at` and `next` of `axis`, the time jumps by `ratio` beyond the trend around it.

    low, high: 95 % interval of ratio.
    cause: its kind. why: in words. evidence: identity, arithmetic or clock.
    num_curves: 1 for a cliff of one curve; otherwise the number of curves of a family whose median this is.
    held, before, after, keys: of one curve: the fixed sizes, the workloads on both sides, and their record keys.
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
    """The verdict of the runs on a rule of thumb.

    effect, low, high: time per work with the rule broken over the rule kept, with its 95 % interval.
    predicted: the effect of tiles and waves alone.
    evidence: the first keys of `evidence_total` records.
    reason: why there is no verdict.
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
        require_choice(
            f"finding {self.rule}", "verdict", self.verdict, ("CONFIRMED", "REFUTED", "INCONCLUSIVE", "NOT TESTED")
        )
        for name in ("effect", "low", "high", "predicted"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"finding {self.rule}", f"{name} = {value!r}", "a finite ratio above 0, or null")


def table_to_json(table: Table) -> Json:
    """Column names, and the rows."""
    lists = [values.tolist() for values in table.columns.values()]
    return {"columns": list(table.columns), "rows": [list(row) for row in zip(*lists, strict=True)]}


def table_from_json(kind: str, data: Json, who: str) -> Table:
    """The table that `table_to_json` wrote. Raises InputError for anything else."""
    names, rows = data.get("columns"), data.get("rows")
    types: dict[str, tuple[type, ...]] = {INTEGER: (int,), NUMBER: (int, float), FLAG: (bool,), TEXT: (str,)}
    if names != list(LAYOUTS[kind].names):
        raise InputError(who, f"columns {names!r}"[:120], ", ".join(LAYOUTS[kind].names))
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(names) for row in rows):
        raise InputError(who, "rows that are no lists of one value per column", f"lists of {len(names)} values")
    columns = {}
    for i, column in enumerate(LAYOUTS[kind].columns):
        values = [row[i] for row in rows]
        wanted = types[column.kind]
        odd = next((v for v in values if type(v) not in wanted), None)
        if odd is not None or None in values:
            raise InputError(who, f"{column.name} = {odd!r}"[:100], f"{column.kind} values")
        if column.kind == INTEGER and any(abs(v) >= 2**62 for v in values):
            raise InputError(who, f"{column.name} of {max(map(abs, values))}"[:100], "integers below 2**62")
        if column.kind == NUMBER and any(isinstance(v, int) and abs(v) >= 2**62 for v in values):
            raise InputError(who, f"{column.name} above 2**62", "finite numbers")
        columns[column.name] = values
    return Table(kind, columns)  # type: ignore[arg-type]


def provenance_to_json(provenance: Provenance) -> Json:
    """As a JSON object."""
    return asdict(provenance)


def provenance_from_json(data: object) -> Provenance:
    """The provenance that `provenance_to_json` wrote."""
    who = "profile provenance"
    if not isinstance(data, dict):
        raise InputError(who, repr(data)[:80], "a JSON object")
    runs = tuple(decode(RunSource, run, f"{who}, run", whole=True) for run in _list(data.get("runs"), f"{who}, runs"))
    return decode(Provenance, {**data, "runs": runs}, who, whole=True)


def cliff_to_json(cliff: KnownCliff) -> Json:
    """As a JSON object."""
    sides = {name: None if (work := getattr(cliff, name)) is None else workload_to_json(work)
             for name in ("before", "after")}  # fmt: skip
    return {**vars(cliff), "held": dict(cliff.held), "keys": list(cliff.keys), **sides}


def cliffs_from_json(data: object) -> tuple[KnownCliff, ...]:
    """Cliffs that `cliff_to_json` wrote."""
    return tuple(_cliff(one) for one in _list(data, "profile cliffs"))


def _cliff(data: object) -> KnownCliff:
    if isinstance(data, dict):
        works = {name: workload_from_json(data[name]) for name in ("before", "after") if data.get(name) is not None}
        data = {**data, **works}
    return decode(KnownCliff, data, "profile cliff", whole=True)


def finding_to_json(finding: RuleFinding) -> Json:
    """As a JSON object."""
    return {**vars(finding), "evidence": list(finding.evidence)}


def findings_from_json(data: object) -> tuple[RuleFinding, ...]:
    """Findings that `finding_to_json` wrote."""
    return tuple(decode(RuleFinding, one, "profile finding", whole=True) for one in _list(data, "profile findings"))


def device_from_json(data: object) -> DeviceSpec:
    """The device that `encode` wrote."""
    return decode(DeviceSpec, data, "profile device", whole=True)


def software_from_json(data: object) -> Mapping[str, str]:
    """Versions by name."""
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise InputError("profile software", repr(data)[:80], "versions by name")
    return data


def _list(data: object, who: str) -> list[Any]:
    if not isinstance(data, list):
        raise InputError(who, repr(data)[:80], "a list")
    return data
