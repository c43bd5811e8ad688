"""Builds the JSON Schema of a profile file from the dataclasses and table layouts.

Entry points: `schema`, `PROFILE_FORMAT`, `PROFILE_VERSION`. Used by `file` and `profile.profile`; `python -m
quantbench.profile.schema` prints the schema.
"""

import json

from quantbench.analysis.verdict import VERDICTS, Verdict
from quantbench.device.spec import DEVICE_KINDS, DeviceSpec
from quantbench.profile.parts import KnownCliff, Provenance, RunSource, StoredFile
from quantbench.profile.table import FLAG, INTEGER, LAYOUTS, NUMBER, ROW_GRADES, TEXT, TableLayout
from quantbench.store.record import ORIGINS
from quantbench.store.typed import Json, json_schema

PROFILE_FORMAT = "quantbench-profile"
PROFILE_VERSION = 2

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_POSITIVE: Json = {"type": "number", "exclusiveMinimum": 0}
_SHA256: Json = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_OBJECT: Json = {"type": "object"}
_OPTIONAL_RATIO: Json = {"anyOf": [_POSITIVE, {"type": "null"}]}
_OPTIONAL_WORKLOAD: Json = {"anyOf": [_OBJECT, {"type": "null"}]}
# Checks of the classes beyond the types of their fields.
_LIMITS: dict[tuple[type, str], Json] = {
    (DeviceSpec, "kind"): {"enum": list(DEVICE_KINDS)},
    (DeviceSpec, "peak_tflops"): {"additionalProperties": _POSITIVE},
    (RunSource, "keys_sha256"): _SHA256 | {"description": "Of all record keys of the run, one a line."},
    (KnownCliff, "before"): _OPTIONAL_WORKLOAD,
    (KnownCliff, "after"): _OPTIONAL_WORKLOAD,
    **{(KnownCliff, name): _POSITIVE for name in ("ratio", "low", "high")},
    (Verdict, "verdict"): {"enum": list(VERDICTS)},
    **{(Verdict, name): _OPTIONAL_RATIO for name in ("effect", "low", "high", "predicted")},
    (StoredFile, "file"): {"pattern": r"^[^/\\]+\.parquet$", "description": "Name of a file beside this one."},
    (StoredFile, "num_rows"): _COUNT,
    (StoredFile, "sha256"): _SHA256 | {"description": "Of that file."},
}  # fmt: skip
_COLUMNS: dict[str, Json] = {INTEGER: _COUNT, NUMBER: _POSITIVE, FLAG: {"type": "boolean"}, TEXT: _TEXT}
_NAMED_COLUMNS: dict[str, Json] = {"grade": {"enum": list(ROW_GRADES)}, "origin": {"enum": list(ORIGINS)}}


def schema() -> Json:
    body = _object({
        "format": {"const": PROFILE_FORMAT},
        "version": {"const": PROFILE_VERSION},
        "sha256": _SHA256 | {
            "description": "Of this object without this field, as JSON with sorted names, no spaces and ASCII escapes."
        },
        "device": _whole(DeviceSpec),
        "software": {"type": "object", "description": "Versions by name.", "additionalProperties": _TEXT},
        "provenance": _whole(Provenance),
        "models": _models(),
        "cliffs": _list(_whole(KnownCliff)),
        "findings": _list(_whole(Verdict)),
        "tables": _object({kind: _table(layout) for kind, layout in LAYOUTS.items()}),
    })  # fmt: skip
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{PROFILE_FORMAT}-{PROFILE_VERSION}",
        "title": f"A profile of one GPU, version {PROFILE_VERSION}",
        "description": "Times in microseconds. A table of more rows stands in a Parquet file beside this one.",
    }
    return head | body


def _object(properties: Json) -> Json:
    return {"type": "object", "additionalProperties": False, "required": list(properties), "properties": properties}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _whole(kind: type) -> Json:
    """Returns the schema of a dataclass of which every field must be present."""
    return _object(json_schema(kind, _LIMITS)["properties"])


def _table(layout: TableLayout) -> Json:
    columns: Json = {"const": list(layout.names)}
    values = [_NAMED_COLUMNS.get(name, _COLUMNS[kind]) for name, kind in layout.columns.items()]
    row = {"type": "array", "prefixItems": values, "minItems": len(values), "maxItems": len(values)}
    beside = _whole(StoredFile)
    return {
        "oneOf": [
            _object({"columns": columns, "rows": _list(row)}),
            _object(beside["properties"] | {"columns": columns}),
        ]
    }


def _models() -> Json:
    """Names the fields of the models; what stands in them is for quantbench alone."""
    fields = {
        "gemm": "dtype library rows note provenance model",
        "softmax": "format version device parameters half_width rows note fused",
        "attention": "format version device dtype masks family parameters interval below above learner note provenance",
    }
    return _object({kind: _list(_OBJECT | {"required": names.split()}) for kind, names in fields.items()})


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
