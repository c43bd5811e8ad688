"""Defines an export's options and result, and selects the rows of a profile to export.

Planners need one time per shape, so the rows of one provider and one layout are selected.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.files import write_file
from quantbench.latency.libraries import LIBRARIES
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload.dtypes import GEMM_DTYPES
from quantbench.workload.ops import LAYOUTS

Rows = list[dict[str, Any]]

WHO = "profile export"
# Layouts in order of preference. Planners expect linear layers, which have the layout nt.
_LAYOUTS = ("nt", "nn", "tn")


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    provider: provider of the rows; "" selects the most frequent provider.
    layout: layout of the GEMMs; "" selects nt if it was measured, or else nn or tn.
    dtype: dtype of the rows; "" selects all dtypes, or the most frequent one for a format that has
        room for a single dtype.
    backend, version: names under which aiconfigurator finds the tables.
    model: names of models, separated by commas. Rows for the models' sizes are added.
    configs: config.json files of further models.
    grid: CSV file of GEMMs to add as modelled rows, unless they were measured.
    tensor_parallel: tensor-parallel degrees of the models; () selects the format's own degrees.
    library: library whose kernels are modelled; "" selects the backend's library. If no GEMM model
        of the library is shipped for a dtype, another library's model is used, and the notes name
        that library.
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
    library: str = ""

    def __post_init__(self) -> None:
        require_choice(WHO, "--dtype", self.dtype, ("", *GEMM_DTYPES))
        require_choice(WHO, "--layout", self.layout, ("", *LAYOUTS))
        require_choice(WHO, "--library", self.library, ("", *LIBRARIES))
        for name in (self.backend, self.version):
            if not name or any(letter in name for letter in "/\\ \0") or name in (".", ".."):
                raise InputError(WHO, f"name {name!r}", "a name without spaces and slashes")
        if min(self.tensor_parallel, default=1) < 1:
            raise InputError(WHO, f"--tp {self.tensor_parallel}", "degrees of at least 1")

    @property
    def kernels(self) -> str:
        """Library whose kernels the modelled times represent."""
        return self.library or self.backend


@dataclass
class Exported:
    """Result of an export; `write` adds files to it.

    folder: folder to write into.
    paths: written files.
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
        """Writes a file below the folder. Raises StoreError if the file cannot be written.

        parts: parts of the file's path below the folder.
        """
        path = self.folder.joinpath(*parts)
        write_file(WHO, path, content)
        self.paths.append(path)


def csv_text(rows: Rows) -> str:
    """Returns rows as CSV text. A column exists if any row has it; missing cells are empty."""
    text = io.StringIO(newline="")
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def require_gpu(profile: Profile, planner: str) -> None:
    """Raises UnsupportedError for a profile of a CPU.

    planner: name of the format's planner, for the error message.
    """
    if profile.device.kind == "cpu":
        raise UnsupportedError(WHO, f"{profile.device.name} is a cpu", f"a GPU, for {planner}")


def products(profile: Profile, options: ExportOptions, out: Exported) -> Table:
    """Returns unbatched GEMMs of one provider and layout, and of options.dtype if it is set.

    Omitted rows are counted in `out`.
    """
    return linear_layers(_of_dtype(profile.tables["gemm"], options, out), options, out)


def linear_layers(table: Table, options: ExportOptions, out: Exported, library: str = "") -> Table:
    """Returns unbatched GEMMs of one provider and layout. Omitted rows are counted in `out`.

    library: library whose provider is selected if options.provider names none.

    Raises InputError if options.layout is set and no GEMM has it.
    """
    table = keep(table, table["batch"] == 1, "a batched product: no place for it there", out)
    if not len(table):
        return table
    if options.layout and options.layout not in table["layout"]:
        raise InputError(
            WHO,
            f"--layout {options.layout}: no matrix product has this layout",
            f"one of {', '.join(sorted(set(table['layout'].tolist())))}",
        )
    layout = options.layout or next(name for name in _LAYOUTS if (table["layout"] == name).any())
    if layout != "nt":
        out.notes.append(
            f"products are of layout {layout}, where consumers mean linear layers (nt)"
        )
    table = keep(
        table, table["layout"] == layout, f"a product of another layout than {layout}", out
    )
    return of_provider(table, options.provider, out, library)


def forward_attention(profile: Profile, options: ExportOptions, out: Exported) -> Table:
    """Returns forward attention of all providers, and of options.dtype if it is set.

    Omitted rows are counted in `out`.
    """
    table = profile.tables["attention"]
    table = keep(
        table, table["direction"] == "forward", "a backward pass: no place for it there", out
    )
    return _of_dtype(table, options, out)


def collectives(profile: Profile, out: Exported) -> Table:
    """Returns the collectives of the provider with the most rows. `out` counts omitted rows."""
    return of_provider(profile.tables["collective"], "", out)


def dtype_of(profile: Profile, options: ExportOptions) -> str:
    """Returns the dtype to export.

    If options.dtype is not set, the dtype is the most frequent one in the GEMM rows, or else in the
    attention rows, or else in the softmax rows. Without such rows, the dtype is bf16, or fp16 on a
    device without bf16.
    """
    if options.dtype:
        return options.dtype
    for kind in ("gemm", "attention", "softmax"):
        found = profile.tables[kind].most_frequent("dtype")
        if found is not None:
            return found
    return "fp16" if profile.device.peak("bf16") is None else "bf16"


def _of_dtype(table: Table, options: ExportOptions, out: Exported) -> Table:
    """Returns the rows of options.dtype, or all rows if it is "". `out` counts omitted rows."""
    if not options.dtype:
        return table
    return keep(table, table["dtype"] == options.dtype, f"another dtype than {options.dtype}", out)


def of_provider(table: Table, provider: str, out: Exported, library: str = "") -> Table:
    """Returns the rows of one provider. Omitted rows are counted in `out`.

    provider: preferred provider. Without rows by it, the library's most frequent provider is used,
        or else the table's. For attention, it is the one that is fastest for the most workloads,
        because engines run the fastest kernel.
    library: library for the case that `provider` has no rows; "" for none.
    """
    if not len(table):
        return table
    names = sorted(set(table["provider"].tolist()))
    # `provider` may name a provider of GEMMs that has no attention rows.
    if provider not in names:
        provider = table.most_frequent("provider", table.by_library(library)) or ""
    if not provider and table.kind == "attention":
        works = table.workloads()
        slow_first = np.argsort(-table["latency_us"])
        provider = mode({works[i]: table["provider"][i] for i in slow_first}.values())
    provider = provider or str(table.most_frequent("provider"))
    names.remove(provider)
    if names:
        out.notes.append(
            f"{table.kind}: the figures are {provider}'s; there are others by {', '.join(names)}"
        )
    return keep(table, table["provider"] == provider, f"of another provider than {provider}", out)


def keep(table: Table, rows: npt.NDArray[np.bool_], reason: str, out: Exported) -> Table:
    """Returns the table's rows where `rows` is True, and counts the omitted rows in `out`.

    reason: why the rows are omitted, for the user.
    """
    if rows.all():
        return table
    out.leave_out(reason, int((~rows).sum()))
    return table.where(rows)
