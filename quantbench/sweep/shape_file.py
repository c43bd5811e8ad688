"""A JSON file of transformer shapes to measure side by side: written by `advise -o`, read by `sweep --shapes`.

History of the format:
1  first version.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantbench.errors import InputError, StoreError
from quantbench.files import read_text, reason
from quantbench.store.typed import decode
from quantbench.units import signed_percent
from quantbench.workload import TransformerShape

SHAPES_FORMAT = "quantbench-shapes"
SHAPES_VERSION = 1
#: how a file of transformer shapes is told from one of plain products
SUFFIX = ".json"

_WHO = "--shapes"
_MOST_BYTES = 2**20
_MOST_SHAPES = 100
_MOST_NAME = 200


@dataclass(frozen=True)
class Gain:
    """What a shape gains over the first of its file: tokens per second at equal parameters, as a share more, with its
    interval (90 % where it is predicted, 95 % where it is measured)."""

    mid: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """`+3.2 % (+1.5 % to +4.9 %)`."""
        return f"{signed_percent(self.mid)} ({signed_percent(self.low)} to {signed_percent(self.high)})"


@dataclass(frozen=True)
class NamedShape:
    """A shape and what to call it. predicted: what it was predicted to gain over the first shape; None where nobody
    predicted it."""

    name: str
    shape: TransformerShape
    predicted: Gain | None = None

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _MOST_NAME or not self.name.isprintable():
            raise InputError(_WHO, f"name = {self.name[:60]!r}", f"1 to {_MOST_NAME} printable characters")


def write_shape_file(path: Path, shapes: Sequence[NamedShape]) -> None:
    """Write the file. Raises StoreError where it cannot be written."""
    data = {"format": SHAPES_FORMAT, "version": SHAPES_VERSION, "shapes": [asdict(shape) for shape in shapes]}
    try:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError("write shapes", f"{path} ({error.strerror})", "a file that can be written") from None


def read_shape_file(path: Path) -> tuple[NamedShape, ...]:
    """The shapes of a file that `write_shape_file` wrote. Raises InputError, in one line, for anything else."""
    try:
        text = read_text(path, most_bytes=_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(_WHO, f"{path} ({reason(error)})", "a JSON file of shapes that can be read") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(_WHO, f"{path} ({str(error)[:80]})", "a JSON file of shapes") from None
    if not isinstance(data, dict) or data.get("format") != SHAPES_FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise InputError(_WHO, f"{path} of format {str(found)[:60]!r}", f"a JSON file of format {SHAPES_FORMAT!r}")
    if data.get("version") != SHAPES_VERSION:
        raise InputError(_WHO, f"{path} of version {str(data.get('version'))[:20]}", f"version {SHAPES_VERSION}")
    try:
        return named_shapes(data.get("shapes"))
    except InputError as error:
        raise InputError(_WHO, f"{path}: {error.operation}: {error.value}", error.expected) from None


def named_shapes(data: object) -> tuple[NamedShape, ...]:
    """Shapes from the list of JSON objects that a file or a run's options hold. Raises InputError for anything else."""
    if not isinstance(data, list | tuple) or not 1 <= len(data) <= _MOST_SHAPES:
        raise InputError("shapes", repr(data)[:60], f"a list of 1 to {_MOST_SHAPES} shapes")
    shapes = tuple(_named_shape(one, f"shape {number}") for number, one in enumerate(data, 1))
    names = [shape.name for shape in shapes]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError("shapes", f"name {repeated!r} twice", "names that differ")
    return shapes


def _named_shape(data: object, who: str) -> NamedShape:
    if not isinstance(data, dict):
        raise InputError(who, repr(data)[:60], "a JSON object")
    values: dict[str, Any] = dict(data)
    values["shape"] = decode(TransformerShape, values.get("shape"), who)
    if values.get("predicted") is not None:
        values["predicted"] = decode(Gain, values["predicted"], f"{who} predicted")
    return decode(NamedShape, values, who)
