"""Builds the JSON Schemas of run.json and of a line of records.jsonl from the dataclasses.

`python -m quantbench.store.schema run` prints one of them.
"""

import json
import sys
from dataclasses import fields

from quantbench.device.spec import DEVICE_KINDS, DeviceSpec
from quantbench.launch import Launch, Tile
from quantbench.measurement import CACHES, GRADES, MODES, Grade, MeanClock, Measurement
from quantbench.store.record import (
    FAILURES,
    ORIGINS,
    RECORD_VERSION,
    ROLES,
    Failed,
    Place,
    Record,
    Skipped,
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
    return {"enum": list(choices)}


# Limits that the classes check in addition to the types of their fields.
_LIMITS: dict[tuple[type, str], Json] = {
    (DeviceSpec, "kind"): _one_of(DEVICE_KINDS),
    (DeviceSpec, "peak_tflops"): {"additionalProperties": _POSITIVE},
    (RunInfo, "how_ended"): _one_of(ENDINGS),
    (RunInfo, "origin"): _one_of(ORIGINS),
    (Record, "key"): {"pattern": "^[0-9a-f]{16}$"},
    (Record, "role"): _one_of(ROLES),
    (Record, "origin"): _one_of(ORIGINS),
    (Place, "count"): {"minimum": 1},
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
    (MeanClock, "mhz"): _POSITIVE,
    (MeanClock, "half_width_mhz"): {"minimum": 0},
    (Measurement, "floor_us"): {"anyOf": [_POSITIVE, _NULL]},
    (Grade, "letter"): _one_of(GRADES),
    (Launch, "grid"): {"anyOf": [_GRID, _NULL]},
    (Launch, "block"): {"anyOf": [_GRID, _NULL]},
    (Failed, "kind"): _one_of(FAILURES),
}  # fmt: skip


def schema(name: str) -> Json:
    """Returns a JSON Schema.

    It accepts everything that the loader accepts, and some values that the dataclasses reject as
    out of range. The schema of a profile is `profile.file.schema`.

    name: `run` for run.json, or `record` for a line of records.jsonl.
    """
    return {"run": _run, "record": _record}[name]()


def _run() -> Json:
    head = {"format": {"const": RUN_FORMAT}, "version": {"const": RUN_VERSION}}
    title = f"run.json, version {RUN_VERSION}"
    return _document(f"quantbench-run-{RUN_VERSION}", title, head, _of(RunInfo))


def _record() -> Json:
    outcomes = {"measurement": _measurement(), "skipped": _of(Skipped), "failed": _of(Failed)}
    body = _of(Record)
    properties = body["properties"] | outcomes | {"launch": {"anyOf": [_launch(), _NULL]}}
    del properties["outcome"]
    optional = (*outcomes, "launch", "check", "phases_s")
    body["properties"] = properties
    body["required"] = [name for name in properties if name not in optional]
    body["oneOf"] = [{"required": [name]} for name in outcomes]
    head = {"version": {"const": RECORD_VERSION}}
    title = f"One line of records.jsonl, version {RECORD_VERSION}"
    return _document(f"quantbench-record-{RECORD_VERSION}", title, head, body)


def _document(name: str, title: str, head: Json, body: Json) -> Json:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": name,
        "title": title,
        **body,
        "properties": head | body["properties"],
        "required": [*head, *body["required"]],
    }


def _of(kind: type) -> Json:
    return json_schema(kind, _LIMITS)


def _measurement() -> Json:
    body = _of(Measurement)
    body["properties"]["grade"] = _of(Grade)
    body["required"].append("grade")
    return body


def _launch() -> Json:
    body = _of(Launch)
    del body["properties"]["tile"]
    for one in fields(Tile):
        body["properties"][one.name] = json_schema(int | None)
    return body


if __name__ == "__main__":
    print(json.dumps(schema(sys.argv[1]), indent=1))
