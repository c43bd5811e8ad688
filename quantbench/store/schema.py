"""Builds JSON Schemas from dataclasses, for run.json and for a line of records.jsonl.

`python -m quantbench.store.schema run` prints the schema of run.json. With `record` instead of
`run`, the command prints the schema of a line.
"""

import json
import sys

from quantbench.device.spec import DEVICE_KINDS, DeviceSpec
from quantbench.launch import Launch
from quantbench.measurement import CACHES, GRADES, MODES, Grade, Measurement
from quantbench.store.record import (
    FAILURES,
    ORIGINS,
    RECORD_VERSION,
    ROLES,
    Failed,
    GridPosition,
    Record,
)
from quantbench.store.run import ENDINGS, RUN_FORMAT, RUN_VERSION, RunInfo
from quantbench.store.typed import Json, json_schema
from quantbench.workload import Attention, Gemm, GroupedGemm, MoE, Permute, Softmax
from quantbench.workload.moe import PERMUTATIONS
from quantbench.workload.ops import DIRECTIONS, LAYOUTS, MASKS

_POSITIVE: Json = {"type": "number", "exclusiveMinimum": 0}
_COUNT: Json = {"type": "integer", "minimum": 0}
_COUNTS: Json = {"items": _COUNT, "minItems": 1}
_NULL: Json = {"type": "null"}
_GRID: Json = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1},
    "minItems": 3,
    "maxItems": 3,
}


def _one_of(choices: tuple[str, ...]) -> Json:
    """Returns the schema of a value that must be one of the choices."""
    return {"enum": list(choices)}


# Schema entries for limits that the classes check in addition to field types, by (class, field).
_LIMITS: dict[tuple[type, str], Json] = {
    (DeviceSpec, "kind"): _one_of(DEVICE_KINDS),
    (DeviceSpec, "peak_tflops"): {"additionalProperties": _POSITIVE},
    (RunInfo, "how_ended"): _one_of(ENDINGS),
    (RunInfo, "origin"): _one_of(ORIGINS),
    (Record, "key"): {"pattern": "^[0-9a-f]{16}$"},
    (Record, "role"): _one_of(ROLES),
    (Record, "origin"): _one_of(ORIGINS),
    (GridPosition, "count"): {"minimum": 1},
    (Gemm, "layout"): _one_of(LAYOUTS),
    (GroupedGemm, "layout"): _one_of(LAYOUTS),
    (GroupedGemm, "tokens_per_expert"): _COUNTS,
    (Permute, "direction"): _one_of(PERMUTATIONS),
    (MoE, "distribution"): {"anyOf": [{"type": "string"}, {"type": "array", **_COUNTS}]},
    (Softmax, "mask"): _one_of(MASKS),
    (Softmax, "direction"): _one_of(DIRECTIONS),
    (Attention, "direction"): _one_of(DIRECTIONS),
    (Measurement, "samples_us"): {"items": _POSITIVE, "minItems": 1},
    (Measurement, "mode"): _one_of(MODES),
    (Measurement, "cache"): _one_of(CACHES),
    (Measurement, "kernels_per_sample"): {"minimum": 1},
    (Measurement, "floor_us"): {"anyOf": [_POSITIVE, _NULL]},
    (Grade, "letter"): _one_of(GRADES),
    (Launch, "grid"): {"anyOf": [_GRID, _NULL]},
    (Launch, "block"): {"anyOf": [_GRID, _NULL]},
    (Failed, "error"): _one_of(FAILURES),
}  # fmt: skip


def schema(name: str) -> Json:
    """Returns the JSON Schema of run.json or of a line of records.jsonl.

    The schema accepts everything that the loader accepts. The schema also accepts some values that
    the loader rejects, because the dataclasses check more limits than `_LIMITS` contains.
    `profile.file.schema` returns the schema of a profile.

    name: `run` for run.json, or `record` for a line of records.jsonl.
    """
    kind, version, title = {
        "run": (RunInfo, RUN_VERSION, "run.json"),
        "record": (Record, RECORD_VERSION, "One line of records.jsonl"),
    }[name]
    head: Json = {"version": {"const": version}}
    if kind is RunInfo:
        head["format"] = {"const": RUN_FORMAT}
    body = json_schema(kind, _LIMITS)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"quantbench-{name}-{version}",
        "title": f"{title}, version {version}",
        **body,
        "properties": head | body["properties"],
        "required": [*head, *body["required"]],
    }


if __name__ == "__main__":
    print(json.dumps(schema(sys.argv[1]), indent=1))
