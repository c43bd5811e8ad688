"""Exports the profile's tables as CSV or Parquet files, one per kind, with unchanged columns and
units; a profile without rows gives modelled rows of a grid, each with its interval.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quantbench.latency.attention import AttentionModel
from quantbench.latency.model_times import ModelTimes
from quantbench.profile.exporters.modelled import M_GRID, MODEL_SITES
from quantbench.profile.exporters.options import (
    Exported,
    ExportOptions,
    Rows,
    csv_text,
    dtype_of,
    require_gpu,
)
from quantbench.profile.exporters.served import MODEL_HEADS, served
from quantbench.profile.file import parquet_bytes, to_parquet
from quantbench.profile.profile import Profile
from quantbench.profile.table import LAYOUTS
from quantbench.sweep.shape_file import read_shapes
from quantbench.workload import Attention, Gemm, MoE

#: columns that `quantbench import csv` names differently, and columns that it does not read
_MAPPED = {"latency_us": "latency=latency_us:us"}
_UNMAPPED = ("low_us", "high_us", "grade", "origin", "block_m", "block_n", "split_k")


def export_csv(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes `<kind>.csv` for every kind with rows. Numbers round-trip exactly."""
    for kind, rows in _tables(profile, options, out).items():
        out.write(csv_text(rows), f"{kind}.csv")
    if profile.device.kind == "cpu":  # `import csv` knows GPUs only
        return
    for kind in (kind for kind in out.rows if len(profile.tables[kind])):
        if kind == "moe":  # `import csv` reads no experts
            continue
        names = [name for name in profile.tables[kind].columns if name not in _UNMAPPED]
        mapped = ",".join(_MAPPED.get(name, f"{name}={name}") for name in names)
        out.use.append(
            f"quantbench import csv {out.folder / kind}.csv "
            f"--gpu {profile.device.name} --map {mapped}"
        )


def export_parquet(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes `<kind>.parquet` for every kind with rows."""
    for kind, rows in _tables(profile, options, out).items():
        table = profile.tables[kind]
        content = to_parquet(table) if len(table) else parquet_bytes(rows)
        out.write(content, f"{kind}.parquet")
    out.use.append(f"pandas.read_parquet('{out.paths[0]}')")


def _tables(profile: Profile, options: ExportOptions, out: Exported) -> dict[str, Rows]:
    """Returns the rows of each kind: measured ones, or, if there are none at all, modelled ones."""
    found = {kind: list(table.rows()) for kind, table in profile.tables.items() if len(table)}
    if not found:
        found = _modelled(profile, options, out)
    out.rows = {kind: len(rows) for kind, rows in found.items()}
    return found


def _modelled(profile: Profile, options: ExportOptions, out: Exported) -> dict[str, Rows]:
    """Returns modelled rows of the products in options.grid, else of the sizes that a planner looks
    up: of the named models, or of a grid."""
    require_gpu(profile, "rows that are modelled")
    dtype = dtype_of(profile, options)
    wanted = served(options)
    pairs = wanted.products or MODEL_SITES
    works: dict[str, list[Any]] = {
        "gemm": [Gemm(m, n, k, dtype=dtype, layout="nt") for n, k in pairs for m in M_GRID]
    }
    if options.grid is not None:
        works["gemm"] = [
            Gemm(m, n, k, batch, dtype, "nt") for m, n, k, batch in read_shapes(options.grid)
        ]
    else:
        half = "fp16" if profile.device.peak("bf16") is None else "bf16"
        heads = [one for one in wanted.heads or MODEL_HEADS if not one.window]
        works["attention"] = [
            work for one in heads for work in (*one.prompts(half), *one.decodes(half))
        ]
        works["moe"] = [replace(one, dtype=dtype) for one in wanted.experts]
    times = ModelTimes(profile.device)
    accuracy = {
        Gemm: times.products(dtype)[0].provenance,
        Attention: AttentionModel.best(profile.device).provenance,
        MoE: {},
    }
    found = {
        kind: [
            {
                **{name: getattr(work, name) for name in LAYOUTS[kind].keys[:-1]},
                "latency_us": one.latency_us,
                "low_us": one.low_us,
                "high_us": one.high_us,
                "origin": "modelled",
                "held_out_median_pct": accuracy[type(work)].get("held_out", {}).get("median_pct"),
            }
            for work, one in zip(of_kind, times.estimates(of_kind), strict=True)
        ]
        for kind, of_kind in works.items()
        if of_kind
    }
    out.notes += [f"every row is modelled: {note}" for note in times.note.split("; ")]
    return found
