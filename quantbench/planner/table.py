"""Tables of layouts as people publish them: CSV files with the columns of tests/data/bloom_tables.csv.

Only the columns that a file has are read, and every cell may be empty. Cells keep what was typed. A table of one's own
may have more columns, for what differs between its rows: ffn, kv_heads, head_dim, interleave, recompute, optimizer,
attention (flash or unfused), softmax (megatron or torch), cluster, gated, tied, sequence_parallel and dropout (yes or
no).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from quantbench.errors import InputError
from quantbench.importers.csv_table import CsvFile, CsvRow

_WHO = "plan --rows"
#: our name → the column
_INTEGERS = {
    "line": "line", "nodes": "nodes", "gpus": "gpus", "layers": "nlayers", "hidden": "nhidden", "heads": "nheads",
    "seq": "seq_len", "vocab": "vocab", "zero": "zero_stage", "dp": "dp", "tp": "tp", "pp": "pp", "mbs": "mbs",
    "gbs": "gbs", "duplicate_of_line": "duplicate_of_line", "ffn": "ffn", "kv_heads": "kv_heads",
    "interleave": "interleave", "head_dim": "head_dim",
}  # fmt: skip
_NUMBERS = {"size_b": "size_b", "mem_gb": "mem_gb", "sec_per_it": "sec_per_it", "tflops": "tflops_reported"}
_TEXTS = {
    "row_id": "row_id", "source_file": "source_file", "section": "section", "date": "date_note", "gpu": "gpu",
    "precision": "precision", "calculator": "tflops_calculator", "status": "status", "notes": "notes",
    "source_error": "source_error", "async_launch": "async", "recompute": "recompute", "optimizer": "optimizer",
    "attention": "attention", "softmax": "softmax", "cluster": "cluster",
}  # fmt: skip
_SWITCHES = ("gated", "tied", "sequence_parallel", "dropout")
_SAID = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


@dataclass(frozen=True)
class TableRow:
    """One row. None and "" stand for empty cells. mem_gb: GiB as nvidia-smi shows them. status: ok, oom, fail, …;
    calculator: how `tflops` was computed; async_launch: yes, no or empty (CUDA_LAUNCH_BLOCKING unset or set)."""

    row_id: str
    source_file: str = ""
    line: int | None = None
    section: str = ""
    date: str = ""
    gpu: str = ""
    nodes: int | None = None
    gpus: int | None = None
    size_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    seq: int | None = None
    vocab: int | None = None
    zero: int | None = None
    precision: str = ""
    async_launch: str = ""
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    mbs: int | None = None
    gbs: int | None = None
    mem_gb: float | None = None
    sec_per_it: float | None = None
    tflops: float | None = None
    calculator: str = ""
    status: str = ""
    duplicate_of_line: int | None = None
    notes: str = ""
    source_error: str = ""
    ffn: int | None = None
    kv_heads: int | None = None
    interleave: int | None = None
    recompute: str = ""
    optimizer: str = ""
    attention: str = ""
    softmax: str = ""
    cluster: str = ""
    head_dim: int | None = None
    gated: bool | None = None
    tied: bool | None = None
    sequence_parallel: bool | None = None
    dropout: bool | None = None

    @property
    def place(self) -> str:
        """Where it stands, for messages: its line in the document, or its row number."""
        return f"row {self.row_id}" + (f" (line {self.line})" if self.line is not None else "")


def read_table(path: Path) -> tuple[TableRow, ...]:
    """All rows of a CSV file. Raises InputError for a cell that is no number where one belongs, or no row at all."""
    file = CsvFile(_WHO, path)
    if not set(file.columns) & set(_INTEGERS.values()):
        columns = ", ".join((*_TEXTS.values(), *_INTEGERS.values(), *_NUMBERS.values()))
        raise InputError(_WHO, f"{path.name} has none of the columns of a table of layouts", f"some of {columns}")
    rows = tuple(_row(file, row, number) for number, row in enumerate(file.rows(), start=1))
    if not rows:
        raise InputError(_WHO, f"{path.name} has no rows", "at least one")
    return rows


def _row(file: CsvFile, row: CsvRow, number: int) -> TableRow:
    values: dict[str, object] = {}
    for name, column in _TEXTS.items():
        if column in file.columns:
            values[name] = row.text(column)
    for name, column in _INTEGERS.items():
        if column in file.columns and row.text(column):
            values[name] = row.integer(column)
    for name, column in _NUMBERS.items():
        if column in file.columns and row.text(column):
            found = row.number(column)
            if not math.isfinite(found) or found <= 0:
                raise row.error(column, "a number above 0")
            values[name] = found
    for name in _SWITCHES:
        if name in file.columns and row.text(name):
            said = _SAID.get(row.text(name).lower())
            if said is None:
                raise row.error(name, "yes or no")
            values[name] = said
    values["row_id"] = values.get("row_id") or str(number)
    return TableRow(**values)  # type: ignore[arg-type]


COLUMNS = tuple(f.name for f in fields(TableRow))
