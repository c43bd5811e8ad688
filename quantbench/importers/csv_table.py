"""Anybody's CSV table: `--map` says which column is what, and in which unit the time is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantbench.errors import InputError
from quantbench.files import read_bytes
from quantbench.importers.csv_file import CsvFile, CsvRow
from quantbench.importers.rows import UNITS_US, Row, Rows, dtype_name, place
from quantbench.importers.runs import Origin
from quantbench.workload import Attention, Collective, Gemm, Softmax, Workload

_WHO = "import csv"
_EXAMPLE = "m=M,n=N,k=K,latency=time:ms"
_TIME = "latency"
_COMMON = ("dtype", "kernel", "provider", _TIME)


@dataclass(frozen=True)
class _Kind:
    """A workload that a table can hold. needed, optional: sizes; texts: words; own: those that no other kind has."""

    make: type[Gemm] | type[Softmax] | type[Attention] | type[Collective]
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """Everything that may be mapped."""
        return (*self.needed, *self.optional, *self.texts, *self.flags)


_KINDS = {
    "gemm": _Kind(Gemm, ("m", "n", "k"), ("batch",), ("layout",)),
    "softmax": _Kind(Softmax, ("batch", "rows", "cols"), ("mask_batch",), ("mask", "direction")),
    "attention": _Kind(
        Attention, ("batch", "heads", "seq_q", "seq_k", "head_dim"), ("kv_heads",), ("direction",), ("causal",)
    ),
    "collective": _Kind(Collective, ("message_bytes", "num_gpus"), ("num_nodes",), ("op",)),
}


@dataclass(frozen=True)
class Mapped:
    """A parsed `--map`: which columns are which sizes. unit: of the latency column."""

    kind: str
    columns: Mapping[str, str]
    unit: str


def parse_map(text: str) -> Mapped:
    """`m=M,n=N,k=K,latency=time:ms` to a Mapped; the kind of workload follows from the sizes that are named.

    >>> parse_map("m=M,n=N,k=K,latency=time:ms").unit
    'ms'
    """
    columns: dict[str, str] = {}
    unit = ""
    for item in text.split(","):
        name, equals, column = (part.strip() for part in item.partition("="))
        if not equals or not column:
            raise InputError(_WHO, f"--map {item!r}", f"field=column, as in {_EXAMPLE}")
        if name == _TIME:
            column, _, unit = (part.strip() for part in column.rpartition(":"))
            if unit not in UNITS_US or not column:
                raise InputError(_WHO, f"--map {item!r}", f"latency=column:unit with unit one of {', '.join(UNITS_US)}")
        if name in columns:
            raise InputError(_WHO, f"--map names {name} twice", "each field once")
        columns[name] = column
    if _TIME not in columns:
        raise InputError(_WHO, f"--map {text!r} without latency", f"latency=column:unit, as in {_EXAMPLE}")
    fits = [kind for kind, of in _KINDS.items() if all(name in columns for name in of.needed)]
    kind = next((k for k in fits if columns.keys() <= {*_KINDS[k].fields, *_COMMON}), None)
    if kind is None:
        options = "; ".join(f"{k}: {', '.join(of.fields)}" for k, of in _KINDS.items())
        raise InputError(_WHO, f"--map with {', '.join(columns)}", f"{', '.join(_COMMON)} and the sizes of {options}")
    return Mapped(kind, columns, unit)


def read_rows(path: Path, mapped: Mapped, *, dtype: str | None = None, provider: str = "imported") -> Rows:
    """The rows of `path`. dtype: for all rows, where no column tells it; provider: who ran it, likewise."""
    file = CsvFile(_WHO, path)
    file.require(tuple(mapped.columns.values()))
    if dtype is None and "dtype" not in mapped.columns:
        raise InputError(_WHO, "no dtype", "--dtype bf16, or dtype=column in --map")
    kind = _KINDS[mapped.kind]
    found = Rows()
    for row in file.rows():
        work = _workload(row, mapped, kind, dtype)
        sizes = {name: getattr(work, name) for name in (*kind.needed, *kind.optional)}
        who = row.text(mapped.columns["provider"]) if "provider" in mapped.columns else provider
        kernel = row.text(mapped.columns["kernel"]) if "kernel" in mapped.columns else None
        latency_us = row.number(mapped.columns[_TIME]) * UNITS_US[mapped.unit]
        op = work.op if isinstance(work, Collective) else work.kind
        found.add(Row(work, latency_us, who or provider, place(op, **sizes), kernel or None, f"line {row.line}"))
    return found


def _workload(row: CsvRow, mapped: Mapped, kind: _Kind, dtype: str | None) -> Workload:
    values: dict[str, object] = {"dtype": dtype}
    for name, column in mapped.columns.items():
        if name in kind.texts or name == "dtype":
            values[name] = dtype_name(row.text(column)) if name == "dtype" else row.text(column).lower()
        elif name in kind.flags:
            values[name] = row.flag(column)
        elif name not in _COMMON:
            values[name] = row.integer(column)
    try:
        return kind.make(**values)  # type: ignore[arg-type]
    except InputError as error:
        raise row.reason(error) from None


def origin_of(path: Path, mapped: Mapped, *, run_id: str | None = None) -> Origin:
    """Where the figures come from: the file, by name and content, and how its columns were read."""
    sha256 = hashlib.sha256(read_bytes(path)).hexdigest()
    text = ",".join(f"{name}={column}" for name, column in mapped.columns.items()) + f":{mapped.unit}"
    return Origin(
        run_id=run_id or f"csv-{mapped.kind}-{sha256[:8]}",
        source=f"{path.name} (sha256 {sha256[:8]})",
        software={},
        options={"importer": "csv", "table": mapped.kind, "file": path.name, "sha256": sha256, "map": text},
        caveats=("imported: spread, clock and cache state were not recorded",),
    )
