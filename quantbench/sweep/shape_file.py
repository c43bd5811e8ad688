"""Reads the shape files of `sweep --shapes`, and writes those with transformer shapes.

A CSV file has GEMM sizes (`read_shapes`). A JSON file, format version 1, has transformer shapes
with their predicted gains (`read_shape_file`).
"""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantbench.errors import InputError, first_repeated
from quantbench.files import open_text, read_json, reason, write_file
from quantbench.store.typed import decode
from quantbench.units import signed_percent
from quantbench.workload import TransformerShape

_SHAPES_FORMAT = "quantbench-shapes"
_SHAPES_VERSION = 1
#: suffix of a file name with transformer shapes; any other file is CSV
SUFFIX = ".json"

_WHO = "--shapes"
_NEEDED = ("m", "n", "k")
_DEFAULTS = {"batch": "1"}
_MOST_BYTES = 2**20
_MOST_SHAPES = 100
_MOST_NAME = 200


@dataclass(frozen=True)
class Gain:
    """Throughput gain over the first shape in the file, as a ratio minus 1.

    Throughput is tokens per second times the shape's useful parameters, so that shapes with more
    parameters are not at a disadvantage.

    mid: estimate of the gain.
    low, high: bounds of its interval (90 % if predicted, 95 % if measured).
    """

    mid: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """Gain as text: `+3.2 % (+1.5 % to +4.9 %)`."""
        interval = f"{signed_percent(self.low)} to {signed_percent(self.high)}"
        return f"{signed_percent(self.mid)} ({interval})"


@dataclass(frozen=True)
class NamedShape:
    """A transformer shape with a name.

    predicted: predicted gain over the first shape in the file; None if there is no prediction.
    Raises InputError for a name that is empty, too long or not printable.
    """

    name: str
    shape: TransformerShape
    predicted: Gain | None = None

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > _MOST_NAME or not self.name.isprintable():
            raise InputError(
                _WHO, f"name = {self.name[:60]!r}", f"1 to {_MOST_NAME} printable characters"
            )


def write_shape_file(path: Path, shapes: Sequence[NamedShape]) -> None:
    """Writes a file of transformer shapes. Raises StoreError if it cannot be written."""
    data = {
        "format": _SHAPES_FORMAT,
        "version": _SHAPES_VERSION,
        "shapes": [asdict(shape) for shape in shapes],
    }
    write_file("write shapes", path, json.dumps(data, indent=1) + "\n")


def read_shape_file(path: Path) -> tuple[NamedShape, ...]:
    """Reads a JSON file of transformer shapes. Raises InputError if the file is not one."""
    try:
        data = read_json(path, most_bytes=_MOST_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(
            _WHO, f"{path} ({reason(error)[:80]})", "a JSON file of shapes that can be read"
        ) from None
    found = data.get("format") if isinstance(data, dict) else type(data).__name__
    if not isinstance(data, dict) or found != _SHAPES_FORMAT:
        raise InputError(
            _WHO,
            f"{path} of format {str(found)[:60]!r}",
            f"a JSON file of format {_SHAPES_FORMAT!r}",
        )
    version = data.get("version")
    if version != _SHAPES_VERSION:
        raise InputError(
            _WHO, f"{path} of version {str(version)[:20]}", f"version {_SHAPES_VERSION}"
        )
    try:
        return named_shapes(data.get("shapes"))
    except InputError as error:
        raise InputError(
            _WHO, f"{path}: {error.operation}: {error.value}", error.expected
        ) from None


def named_shapes(data: object) -> tuple[NamedShape, ...]:
    """Decodes the list of shapes from a file or from the options of a run.

    Raises InputError if the list is malformed.
    """
    if not isinstance(data, list | tuple) or not 1 <= len(data) <= _MOST_SHAPES:
        raise InputError("shapes", repr(data)[:60], f"a list of 1 to {_MOST_SHAPES} shapes")
    shapes = tuple(_named_shape(one, f"shape {number}") for number, one in enumerate(data, 1))
    repeated = first_repeated([shape.name for shape in shapes])
    if repeated is not None:
        raise InputError("shapes", f"name {repeated!r} twice", "names that differ")
    return shapes


def _named_shape(data: object, who: str) -> NamedShape:
    """Decodes one shape.

    who: name of the shape in error messages.
    """
    if not isinstance(data, dict):
        raise InputError(who, repr(data)[:60], "a JSON object")
    values: dict[str, Any] = dict(data)
    values["shape"] = decode(TransformerShape, values.get("shape"), who)
    if values.get("predicted") is not None:
        values["predicted"] = decode(Gain, values["predicted"], f"{who} predicted")
    return decode(NamedShape, values, who)


def read_shapes(path: Path, who: str = _WHO) -> tuple[tuple[int, int, int, int], ...]:
    """Reads (m, n, k, batch) from each row of a CSV file.

    The file must have the columns m, n and k. The column batch is optional, and an empty batch is
    1. Other columns are ignored.

    who: option to name in error messages.
    Raises InputError that names the file and the line.
    """
    try:
        with open_text(path) as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            if not set(_NEEDED) <= set(columns):
                expected = "a CSV file with the columns m, n, k"
                if who == _WHO:
                    expected += f", or a {SUFFIX} file"
                raise InputError(who, f"{path} has {', '.join(columns) or 'nothing'}", expected)
            shapes = [_shape(who, path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(who, f"{path} ({reason(error)})", "a CSV file that can be read") from None
    if not shapes:
        raise InputError(who, f"{path} has no rows", "at least one shape")
    return tuple(shapes)


def _shape(
    who: str, path: Path, line: int, row: dict[str, str | None]
) -> tuple[int, int, int, int]:
    """Reads the sizes of one CSV row. Raises InputError if a size is missing or out of range."""
    values = []
    for name in (*_NEEDED, *_DEFAULTS):
        text = (row.get(name) or _DEFAULTS.get(name, "")).strip()
        # The number of digits is limited, because Python's error for integers with thousands of
        # digits does not name the line.
        if not re.fullmatch("[0-9]{1,10}", text) or not 1 <= int(text) < 2**31:
            raise InputError(
                who, f"{path}:{line} {name} = {text[:40]!r}", f"an integer from 1 to {2**31 - 1:,}"
            )
        values.append(int(text))
    m, n, k, batch = values
    return m, n, k, batch
