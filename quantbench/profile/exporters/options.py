"""Defines the options and result of an export, and selects the rows to export: one time per
shape.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.files import write_file
from quantbench.latency.libraries import library_of
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload.dtypes import GEMM_DTYPES
from quantbench.workload.ops import LAYOUTS

Rows = list[dict[str, Any]]

WHO = "profile export"
# Planners expect linear layers, which have layout nt; other layouts are exported only if there are
# no nt rows.
_LAYOUTS = ("nt", "nn", "tn")


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    provider: provider of the rows; "" selects the most frequent.
    dtype: "" exports all (single-dtype formats: the most frequent).
    layout: "" selects nt if measured, else nn or tn.
    backend, version: names under which aiconfigurator finds the tables.
    model, configs: names of models, comma separated, and config.json files of others.
    grid: CSV file of products (m, n, k) that are modelled if the profile has no rows.
    tensor_parallel: degrees of the models; () for the format's own.
    """

    provider: str = ""
    layout: str = ""
    dtype: str = ""
    backend: str = "vllm"
    version: str = "quantbench"
    model: str = ""
    configs: tuple[Path, ...] = ()
    grid: Path | None = None
    tensor_parallel: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for option, value, choices in (
            ("--dtype", self.dtype, GEMM_DTYPES),
            ("--layout", self.layout, LAYOUTS),
        ):
            if value:
                require_choice(WHO, option, value, choices)
        for name in (self.backend, self.version):
            if not name or any(letter in name for letter in "/\\ \0") or name in (".", ".."):
                raise InputError(WHO, f"name {name!r}", "a name without spaces and slashes")
        if min(self.tensor_parallel, default=1) < 1:
            raise InputError(WHO, f"--tp {self.tensor_parallel}", "degrees of at least 1")


@dataclass
class Exported:
    """Result of an export; `write` adds files to it.

    rows: number of written rows by table.
    left_out: number of rows that were not exported, by reason.
    notes: sources and assumptions behind the numbers.
    use: instructions for loading the files in the planner.
    """

    folder: Path = field(default_factory=Path)
    paths: list[Path] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    use: list[str] = field(default_factory=list)

    def leave_out(self, reason: str, rows: int) -> None:
        if rows:
            self.left_out[reason] += rows

    def write(self, content: str | bytes, *parts: str) -> None:
        """Writes a file below the folder. Raises StoreError if that fails."""
        path = self.folder.joinpath(*parts)
        write_file(WHO, path, content)
        self.paths.append(path)


def csv_text(rows: Rows) -> str:
    """Returns rows as CSV, with all of their columns; a cell that a row lacks is empty."""
    text = io.StringIO(newline="")
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def require_gpu(profile: Profile, planner: str) -> None:
    """Raises UnsupportedError for a profile of a CPU."""
    device = profile.device
    if device.kind == "cpu":
        raise UnsupportedError(WHO, f"{device.name} is a {device.kind}", f"a GPU, for {planner}")


def products(profile: Profile, options: ExportOptions, out: Exported) -> Table:
    """Returns unbatched GEMMs of one provider and layout, and of options.dtype if set. Counts the
    omitted rows.
    """
    return linear_layers(_of_dtype(profile.tables["gemm"], options, out), options, out)


def linear_layers(table: Table, options: ExportOptions, out: Exported, library: str = "") -> Table:
    """Returns unbatched GEMMs of one provider and layout. Counts the omitted rows.

    library: whose provider is chosen if options.provider names none.
    """
    table = _keep(table, "batch", 1, "a batched product: no place for it there", out)
    if not len(table):
        return table
    if options.layout and options.layout not in table["layout"]:
        there = ", ".join(sorted(set(table["layout"].tolist())))
        raise InputError(
            WHO, f"--layout {options.layout}: no matrix product has this layout", f"one of {there}"
        )
    layout = options.layout or next(name for name in _LAYOUTS if (table["layout"] == name).any())
    if layout != "nt":
        out.notes.append(
            f"products are of layout {layout}, where consumers mean linear layers (nt)"
        )
    table = _keep(table, "layout", layout, f"a product of another layout than {layout}", out)
    return of_provider(table, options.provider, out, library)


def attentions(profile: Profile, options: ExportOptions, out: Exported) -> Table:
    """Returns forward attention of one provider, and of options.dtype if set. Counts the omitted
    rows.
    """
    return of_provider(forward_attention(profile, options, out), options.provider, out)


def forward_attention(profile: Profile, options: ExportOptions, out: Exported) -> Table:
    """Returns forward attention of all providers, and of options.dtype if set. Counts the omitted
    rows.
    """
    table = _keep(
        profile.tables["attention"],
        "direction",
        "forward",
        "a backward pass: no place for it there",
        out,
    )
    return _of_dtype(table, options, out)


def collectives(profile: Profile, out: Exported) -> Table:
    """Returns the collectives of the provider with the most rows. Counts the omitted rows."""
    return of_provider(profile.tables["collective"], "", out)


def dtype_of(profile: Profile, options: ExportOptions) -> str:
    """Returns the dtype to export: options.dtype, else the most frequent one of GEMMs, else of
    attention, else of softmax, else bf16 (fp16 if the device has no bf16)."""
    if options.dtype:
        return options.dtype
    for kind in ("gemm", "attention", "softmax"):
        found = profile.tables[kind].most_frequent("dtype")
        if found is not None:
            return found
    return "fp16" if profile.device.peak("bf16") is None else "bf16"


def _of_dtype(table: Table, options: ExportOptions, out: Exported) -> Table:
    if not options.dtype:
        return table
    return _keep(table, "dtype", options.dtype, f"another dtype than {options.dtype}", out)


def of_provider(table: Table, provider: str, out: Exported, library: str = "") -> Table:
    """Returns the rows of the provider, of the library's most frequent one, or of the most frequent
    one of all. Counts the omitted rows."""
    if not len(table):
        return table
    names = sorted(set(table["provider"].tolist()))
    # The provider option may name a provider of GEMMs that has no attention rows.
    wanted: str | None = provider
    if provider not in names:
        of_library = np.array([library_of(name) == library for name in table["provider"].tolist()])
        wanted = table.most_frequent("provider", of_library) or table.most_frequent("provider")
    others = ", ".join(name for name in names if name != wanted)
    if others:
        out.notes.append(f"{table.kind}: the figures are {wanted}'s; there are others by {others}")
    return _keep(table, "provider", wanted, f"of another provider than {wanted}", out)


def _keep(table: Table, column: str, value: object, reason: str, out: Exported) -> Table:
    kept = np.asarray(table[column] == value, dtype=np.bool_)
    if not len(table) or kept.all():
        return table
    out.leave_out(reason, int((~kept).sum()))
    return table.where(kept)
