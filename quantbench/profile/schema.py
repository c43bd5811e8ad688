"""Defines the types that a profile's JSON file is decoded to.

`python -m quantbench.profile.schema` prints the JSON Schema, which is generated from the types.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.rules import Verdict
from quantbench.store.typed import Json, json_schema
from quantbench.workload import Workload

PROFILE_FORMAT = "quantbench-profile"
PROFILE_VERSION = 2


@dataclass(frozen=True)
class RunSource:
    """Run from which a profile was built.

    origin: measured, imported or simulated.
    source: where imported or simulated times come from.
    cache: state of the GPU's cache before each timing: cold, hot or unknown.
    records: number of records in the run.
    rows: number of the profile's rows that come from the run.
    keys_sha256: SHA-256 of the run's record keys, in order, joined by newlines.
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

    quantbench: version of quantbench that built the profile.
    num_cliffs: number of cliffs found. The profile stores only the largest of them.
    note: text that `Profile.note` includes.
    """

    quantbench: str
    runs: tuple[RunSource, ...] = ()
    num_cliffs: int = 0
    note: str = ""


@dataclass(frozen=True)
class KnownCliff:
    """Cliff in measured times: from size `at` to `next`, the time jumps by `ratio` over the trend.

    A cliff belongs to a single curve, or to a family of curves that jump at the same size.

    axis: size that varies along the curve.
    ratio: jump of the time, relative to the trend; for a family, the median over its curves.
    low, high: 95 % interval of the ratio.
    cause, why: kind of the cause, and its explanation for the user.
    evidence: as in `analysis.blocks.Cause`; "" for a family.
    num_curves: number of curves in a family; 1 for a cliff of a single curve.
    held: sizes that are fixed on the curve; empty for a family.
    before, after: workloads on both sides of the cliff; None for a family.
    keys: record keys of the workloads `before` and `after`; empty for a family.
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
            raise InputError(
                who,
                f"ratio {self.low!r} to {self.high!r} around {self.ratio!r}",
                "finite, in order",
            )
        if not 0 < self.at < self.next:
            raise InputError(who, f"next = {self.next!r}", "a larger size")


@dataclass(frozen=True)
class InlineTable:
    """Small table, stored in the JSON file as one list of values per row."""

    columns: tuple[str, ...]
    rows: tuple[list[Any], ...]


@dataclass(frozen=True)
class StoredFile:
    """Reference to the Parquet file of a large table, beside the profile's JSON file.

    columns: names of the columns.
    file: name of the Parquet file.
    sha256: SHA-256 of the Parquet file.
    """

    columns: tuple[str, ...]
    file: str
    num_rows: int
    sha256: str


@dataclass(frozen=True)
class ProfileFile:
    """Content of a profile's JSON file.

    sha256: SHA-256 of the file without this field, written as JSON with sorted names, no spaces
        and ASCII escapes.
    software: versions by name.
    models: models by kind. Only quantbench reads their content, which may change.
    findings: verdicts on rules of thumb.
    tables: tables by kind (`table.LAYOUTS`), with times in microseconds.
    """

    format: str
    version: int
    sha256: str
    device: DeviceSpec
    software: Mapping[str, str]
    provenance: Provenance
    models: Mapping[str, tuple[dict[str, Any], ...]]
    cliffs: tuple[KnownCliff, ...]
    findings: tuple[Verdict, ...]
    tables: Mapping[str, InlineTable | StoredFile]


def schema() -> Json:
    """Returns the JSON Schema of a profile's JSON file."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{PROFILE_FORMAT}-{PROFILE_VERSION}",
        "title": f"A profile of one GPU, version {PROFILE_VERSION}",
    }
    body = json_schema(ProfileFile)
    body["properties"] |= {
        "format": {"const": PROFILE_FORMAT},
        "version": {"const": PROFILE_VERSION},
    }
    return head | body


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
