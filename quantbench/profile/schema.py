"""Defines what a profile's JSON file holds. `python -m quantbench.profile.schema` prints its JSON Schema, which is
generated from these types; reading decodes a file to them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantbench.analysis.verdict import Verdict
from quantbench.device.spec import DeviceSpec
from quantbench.profile.parts import KnownCliff, Provenance
from quantbench.store.typed import Json, json_schema

PROFILE_FORMAT = "quantbench-profile"
PROFILE_VERSION = 2


@dataclass(frozen=True)
class InlineTable:
    """Small table: a list of values for each row."""

    columns: tuple[str, ...]
    rows: tuple[list[Any], ...]


@dataclass(frozen=True)
class StoredFile:
    """Parquet file of a large table, beside the profile's JSON. sha256: digest of that file."""

    columns: tuple[str, ...]
    file: str
    num_rows: int
    sha256: str


@dataclass(frozen=True)
class ProfileFile:
    """Content of a profile's JSON file.

    sha256: digest of the file without this field, as JSON with sorted names, no spaces and ASCII escapes.
    software: versions by name.
    models: by kind; what stands in them is for quantbench alone.
    tables: by kind (`table.LAYOUTS`), times in microseconds.
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
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{PROFILE_FORMAT}-{PROFILE_VERSION}",
        "title": f"A profile of one GPU, version {PROFILE_VERSION}",
    }
    body = json_schema(ProfileFile)
    body["properties"] |= {"format": {"const": PROFILE_FORMAT}, "version": {"const": PROFILE_VERSION}}
    return head | body


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
