"""Rows of an imported table as workloads with times, and a count of the rows that were left out."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite

from quantbench.errors import InputError
from quantbench.store.record import Place
from quantbench.workload import Workload

#: microseconds in one of each unit that a table may state its times in
UNITS_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}

#: other people's names of number formats → ours
_DTYPES = {
    "bfloat16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16", "torch.float16": "fp16", "half": "fp16",
    "float32": "fp32", "torch.float32": "fp32", "float": "fp32", "single": "fp32", "float8_e4m3fn": "fp8",
    "torch.float8_e4m3fn": "fp8", "fp8_e4m3": "fp8", "torch.int8": "int8",
}  # fmt: skip


def dtype_name(text: str) -> str:
    """Our name of a number format, or the text itself where it is ours already (or nobody's).

    >>> dtype_name("torch.bfloat16")
    'bf16'
    """
    return _DTYPES.get(text.strip().lower(), text.strip().lower())


@dataclass(frozen=True)
class Row:
    """One figure of an imported table.

    latency_us: as the table states it, in microseconds; not a time at all (nan, 0, negative) where the table says so.
    provider: who ran it (`sglang`, `vllm.flash_attn_fa3`). kernel: the kernel's name where the table tells one.
    where: its place in the table, for messages (`line 12`).
    """

    workload: Workload
    latency_us: float
    provider: str
    place: Place
    kernel: str | None = None
    where: str = ""

    @property
    def has_time(self) -> bool:
        """Whether the figure is a time at all."""
        return isfinite(self.latency_us) and self.latency_us > 0


@dataclass
class Rows:
    """Rows in the table's order. left_out: rows that no workload here describes, counted by reason."""

    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Rows that were looked at."""
        return len(self.rows) + sum(self.left_out.values())

    def leave_out(self, reason: str, rows: int = 1) -> None:
        """Count `rows` rows that cannot be represented."""
        self.left_out[reason] += rows

    def add(self, row: Row) -> None:
        """Keep one row."""
        self.rows.append(row)


def place(op: str, **axes: int) -> Place:
    """Where a table's row stands: the sizes that its table varies."""
    return Place(axes=axes, op=op)


def axes_of(rows: Iterable[Row]) -> dict[str, list[int]]:
    """Every axis of the rows with its values, ascending."""
    values: dict[str, set[int]] = {}
    for row in rows:
        for name, value in row.place.axes.items():
            values.setdefault(name, set()).add(value)
    return {name: sorted(found) for name, found in values.items()}


def require_rows(operation: str, found: Rows) -> None:
    """Raise InputError when a table gave nothing at all to keep."""
    if not found.rows:
        reason = ", ".join(f"{reason} ({rows} rows)" for reason, rows in found.left_out.most_common(3))
        raise InputError(operation, f"no row can be kept: {reason or 'the table is empty'}", "at least one row")
