"""The axes of a sweep, as text: `hidden=1024:4096:64`, `tp=1,2,4,8`, `n=3072:8192@edges`.

Grammar: items separated by commas, each an integer or `start:stop[:step]` (stop included where the step lands on it),
and `@edges` at the end for points on both sides of the predicted edges between the smallest and the largest value.
"""

import re
from dataclasses import dataclass

from quantbench.errors import InputError

MODEL_DIMS = ("hidden", "heads", "head-dim", "ffn", "seq", "mbs", "tp", "vocab")
GEMM_DIMS = ("m", "n", "k", "batch")
DIMS = MODEL_DIMS + GEMM_DIMS
#: numbers the shapes of a list from 1; no size, so nothing varies along it
SHAPE_DIM = "shape"

#: an axis may have so many values, and a grid so many places
MOST_VALUES = 100_000
_LARGEST = 2**31 - 1

#: what a dimension counts in where no step is given: whole heads and batches, 64 hidden or vocabulary units, …
DEFAULT_STEP = {
    "hidden": 64, "heads": 1, "head-dim": 8, "ffn": 64, "seq": 128, "mbs": 1, "tp": 1, "vocab": 64,
    "m": 64, "n": 64, "k": 64, "batch": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """One dimension and its values, ascending and distinct. edges: whether predicted edges are to be added."""

    dim: str
    values: tuple[int, ...]
    edges: bool = False

    def __post_init__(self) -> None:
        if self.dim not in (*DIMS, SHAPE_DIM):
            raise InputError("--dim", repr(self.dim), "one of " + ", ".join(DIMS))
        if not self.values:
            raise InputError(f"--dim {self.dim}", "no values", "at least one value")

    @property
    def field(self) -> str:
        """The dimension as Python spells it."""
        return self.dim.replace("-", "_")


def parse_axis(text: str) -> Axis:
    """`dim=values` to an Axis.

    >>> parse_axis("tp=1,2,4").values
    (1, 2, 4)
    >>> parse_axis("hidden=1024:1280:128@edges")
    Axis(dim='hidden', values=(1024, 1152, 1280), edges=True)
    """
    dim, _, values = text.partition("=")
    if dim not in DIMS:
        raise InputError("--dim", repr(dim), "one of " + ", ".join(DIMS))
    return parse_values(dim, values)


def parse_values(dim: str, text: str) -> Axis:
    """The values of one dimension; see the grammar above. Raises InputError that names the offending item."""
    body, at, suffix = text.strip().partition("@")
    if at and suffix != "edges":
        raise InputError(f"--dim {dim}", f"'@{suffix}'", "@edges or nothing after the values")
    values: set[int] = set()
    for item in body.rstrip(",").split(","):
        found = _parse_item(dim, item.strip())
        if len(values) + len(found) > MOST_VALUES:  # counted before they are listed
            many = f"{text.strip()!r} ({len(values) + len(found):,} values)"
            raise InputError(f"--dim {dim}", many, f"at most {MOST_VALUES:,} values")
        values.update(found)
    if at and len(values) < 2:
        raise InputError(f"--dim {dim}", repr(text), "a range for @edges to look in, such as 1024:4096@edges")
    return Axis(dim, tuple(sorted(values)), edges=bool(at))


def _parse_item(dim: str, item: str) -> range:
    parts = item.split(":")
    expected = f"start:stop[:step] or an integer, all from 1 to {_LARGEST:,}"
    if len(parts) > 3 or not all(re.fullmatch("[0-9]{1,10}", part.strip()) for part in parts):
        raise InputError(f"--dim {dim}", repr(item)[:100], expected)
    numbers = [int(part) for part in parts]
    if len(numbers) == 1:
        numbers = [numbers[0], numbers[0]]
    start, stop = numbers[0], numbers[1]
    step = numbers[2] if len(numbers) == 3 else DEFAULT_STEP[dim]
    if start < 1 or step < 1 or stop > _LARGEST:
        raise InputError(f"--dim {dim}", repr(item)[:100], expected)
    if stop < start:
        raise InputError(f"--dim {dim}", repr(item), f"a stop that is not below the start {start}")
    return range(start, stop + 1, step)
