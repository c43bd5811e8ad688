"""The published JSON Schemas of the stored formats, as shipped in the package."""

import json
from importlib.resources import files
from typing import Any


def schema(name: str) -> dict[str, Any]:
    """The schema called `name`: `run` (run.json) or `record` (one line of records.jsonl)."""
    text = files("quantbench.store").joinpath(f"schemas/{name}.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded
