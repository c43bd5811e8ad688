"""Lists of shapes to measure, where axes could only give a grid: plain products, or transformer shapes with all ops."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from quantbench.errors import InputError
from quantbench.files import open_text, reason
from quantbench.sweep.axes import SHAPE_DIM
from quantbench.sweep.plan import Placed
from quantbench.sweep.shape_file import NamedShape
from quantbench.workload import Gemm, Op

_NEEDED = ("m", "n", "k")
# Python refuses to read integers of thousands of digits with an error of its own.
_MOST_DIGITS = 10


def read_shapes(path: Path) -> tuple[tuple[int, int, int, int], ...]:
    """(m, n, k, batch) of each row of a CSV file with the columns m, n, k and, if wanted, batch; others are ignored.

    Raises InputError that names the file and the line.
    """
    try:
        with open_text(path) as file:
            reader = csv.DictReader(file)
            missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                columns = ", ".join(reader.fieldnames or ()) or "nothing"
                raise InputError(
                    "--shapes", f"{path} has {columns}", "a CSV file with the columns m, n, k, or a .json file"
                )
            shapes = [_shape(path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError("--shapes", f"{path} ({reason(error)})", "a CSV file that can be read") from None
    if not shapes:
        raise InputError("--shapes", f"{path} has no rows", "at least one shape")
    return tuple(shapes)


def _shape(path: Path, line: int, row: dict[str, str | None]) -> tuple[int, int, int, int]:
    values = []
    for name in (*_NEEDED, "batch"):
        text = (row.get(name) or ("1" if name == "batch" else "")).strip()
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and 1 <= int(text) < 2**31):
            raise InputError("--shapes", f"{path}:{line} {name} = {text[:40]!r}", "an integer of at least 1")
        values.append(int(text))
    return (values[0], values[1], values[2], values[3])


def placed_shapes(shapes: tuple[tuple[int, ...], ...], dtype: str, layout: str) -> list[Placed]:
    """Each shape as a place of its own, in the order given."""
    return [
        Placed(
            {"m": m, "n": n, "k": k, "batch": batch},
            (Op("gemm", "forward", Gemm(m, n, k, batch=batch, dtype=dtype, layout=layout), 1),),
            rank=number,
        )
        for number, (m, n, k, batch) in enumerate(shapes)
    ]


def placed_models(models: Sequence[NamedShape]) -> list[Placed]:
    """Every op of each shape, forward and backward, at the place that its number (from 1) names."""
    return [Placed({SHAPE_DIM: number}, one.shape.ops(), rank=number) for number, one in enumerate(models, 1)]
