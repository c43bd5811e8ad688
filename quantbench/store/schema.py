"""Builds the JSON Schemas of run.json and of a line of records.jsonl from the dataclasses.

Entry point: `schema`, for users and tests; `python -m quantbench.store.schema run` prints one.
"""

import json
import sys
from dataclasses import fields

from quantbench.device.spec import DEVICE_KINDS, DeviceSpec
from quantbench.launch import Launch, Tile
from quantbench.measurement import GRADES, Grade, MeanClock, Measurement
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
_GRID: Json = {
    "type": "array",
    "items": {"type": "integer", "minimum": 1},
    "minItems": 3,
    "maxItems": 3,
}
# Limits that the classes check beyond the types of their fields.
_LIMITS: dict[tuple[type, str], Json] = {
    (DeviceSpec, "kind"): {"enum": list(DEVICE_KINDS)},
    (DeviceSpec, "peak_tflops"): {"additionalProperties": _POSITIVE},
    (RunInfo, "how_ended"): {"enum": list(ENDINGS)},
    (RunInfo, "origin"): {"enum": list(ORIGINS)},
    (Record, "key"): {"pattern": "^[0-9a-f]{16}$"},
    (Record, "role"): {"enum": list(ROLES)},
    (Record, "origin"): {"enum": list(ORIGINS)},
    (Place, "count"): {"minimum": 1},
    (Gemm, "layout"): {"enum": list(LAYOUTS)},
    (GroupedGemm, "layout"): {"enum": list(LAYOUTS)},
    (GroupedGemm, "tokens_per_expert"): {"items": _COUNT, "minItems": 1},
    (Permute, "direction"): {"enum": list(PERMUTATIONS)},
    (MoE, "distribution"): {"anyOf": [{"type": "string"}, {"type": "array", "items": _COUNT, "minItems": 1}]},
    (Softmax, "mask"): {"enum": list(MASKS)},
    (Softmax, "direction"): {"enum": list(DIRECTIONS)},
    (Attention, "direction"): {"enum": list(DIRECTIONS)},
    (Measurement, "samples_us"): {"items": _POSITIVE, "minItems": 1},
    (Measurement, "mode"): {"enum": ["events", "graph", "cpu", "unknown"]},
    (Measurement, "cache"): {"enum": ["cold", "hot", "unknown"]},
    (Measurement, "kernels_per_sample"): {"minimum": 1},
    (MeanClock, "mhz"): _POSITIVE,
    (MeanClock, "half_width_mhz"): {"minimum": 0},
    (Measurement, "floor_us"): {"anyOf": [_POSITIVE, {"type": "null"}]},
    (Grade, "letter"): {"enum": list(GRADES)},
    (Launch, "grid"): {"anyOf": [_GRID, {"type": "null"}]},
    (Launch, "block"): {"anyOf": [_GRID, {"type": "null"}]},
    (Failed, "kind"): {"enum": list(FAILURES)},
}  # fmt: skip


def schema(name: str) -> Json:
    """Returns a JSON Schema. name: `run` (run.json) or `record` (a line of records.jsonl).

    Accepts everything that the loader accepts, and some values that the dataclasses reject as out
    of range. The schema of a profile is `profile.file.schema`.
    """
    return {"run": _run, "record": _record}[name]()


def _run() -> Json:
    head = {"format": {"const": RUN_FORMAT}, "version": {"const": RUN_VERSION}}
    return _document(
        f"quantbench-run-{RUN_VERSION}", f"run.json, version {RUN_VERSION}", head, _of(RunInfo)
    )


def _record() -> Json:
    outcomes = {"measurement": _measurement(), "skipped": _of(Skipped), "failed": _of(Failed)}
    body = _of(Record)
    properties = (
        body["properties"] | outcomes | {"launch": {"anyOf": [_launch(), {"type": "null"}]}}
    )
    del properties["outcome"]
    needed = [name for name in properties if name not in (*outcomes, "launch", "check", "phases_s")]
    body |= {
        "properties": properties,
        "required": needed,
        "oneOf": [{"required": [name]} for name in outcomes],
    }
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
    return body | {
        "properties": body["properties"] | {"grade": _of(Grade)},
        "required": [*body["required"], "grade"],
    }


def _launch() -> Json:
    body = _of(Launch)
    properties = {name: value for name, value in body["properties"].items() if name != "tile"}
    return body | {
        "properties": properties | {one.name: json_schema(int | None) for one in fields(Tile)}
    }


if __name__ == "__main__":
    print(json.dumps(schema(sys.argv[1]), indent=1))
