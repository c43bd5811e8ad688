"""Exports a profile's tables as CSV or Parquet files, one per kind, with unchanged columns.

If models or a file of GEMMs are named, their unmeasured sizes are added as modelled rows with
intervals. A profile without rows gets modelled rows of a default grid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from quantbench.latency.attention import AttentionModel
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import OpTimes
from quantbench.profile.exporters.aiconfigurator_modelled import model_rows
from quantbench.profile.exporters.modelled import MODEL_SITES, GemmTimes, accuracy_words
from quantbench.profile.exporters.options import (
    WHO,
    Exported,
    ExportOptions,
    Rows,
    csv_text,
    dtype_of,
    linear_layers,
    require_gpu,
)
from quantbench.profile.file import parquet_bytes
from quantbench.profile.profile import Profile
from quantbench.profile.table import LAYOUTS
from quantbench.sweep.shape_file import read_shapes
from quantbench.workload import Attention, Gemm
from quantbench.workload.serving import MODEL_HEADS, served

#: Mapping of columns for `quantbench import csv --map`, and columns that the import does not read.
_MAPPED = {"latency_us": "latency=latency_us:us"}
_UNMAPPED = ("low_us", "high_us", "grade", "origin", "block_m", "block_n", "split_k")


def export_csv(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes `<kind>.csv` for every kind with rows. Numbers round-trip exactly."""
    for kind, rows in _tables(profile, options, out).items():
        out.write(csv_text(rows), f"{kind}.csv")
    if profile.device.kind == "cpu":  # `import csv` knows GPUs only
        return
    for kind in out.rows:
        if kind == "moe" or not len(profile.tables[kind]):  # `import csv` reads no experts
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
        names = dict.fromkeys(chain.from_iterable(rows))
        whole = [{name: row.get(name) for name in names} for row in rows]
        out.write(parquet_bytes(whole, compression="zstd"), f"{kind}.parquet")
    out.use.append(f"pandas.read_parquet('{out.paths[0]}')")


def _tables(profile: Profile, options: ExportOptions, out: Exported) -> dict[str, Rows]:
    """Returns the rows of each kind: measured rows first, then modelled rows.

    Modelled rows are added if the options name models or a file of GEMMs, or if the profile has no
    rows. A size with a measured row gets no modelled row.
    """
    found = {kind: list(table.rows()) for kind, table in profile.tables.items() if len(table)}
    if not found or options.model or options.configs or options.grid is not None:
        for kind, rows in _modelled(profile, options, out).items():
            measured = {_sizes(kind, row) for row in found.get(kind, ())}
            new = [row for row in rows if _sizes(kind, row) not in measured]
            found[kind] = [*found.get(kind, ()), *new]
    out.rows = {kind: len(rows) for kind, rows in found.items()}
    return found


def _sizes(kind: str, row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a row's workload: the values of all key columns except the last, the provider."""
    return tuple(row[name] for name in LAYOUTS[kind].keys[:-1])


def _modelled(profile: Profile, options: ExportOptions, out: Exported) -> dict[str, Rows]:
    """Returns modelled rows by kind.

    With options.grid, the rows are the GEMMs in that file. Otherwise, they are the GEMMs, attention
    and experts that a planner looks up for the named models. If no model is named, they are the
    GEMMs of MODEL_SITES and the attention of MODEL_HEADS.
    """
    require_gpu(profile, "rows that are modelled")
    dtype = dtype_of(profile, options)
    wanted = served(WHO, options.model, options.configs, options.tensor_parallel)
    has_rows = any(map(len, profile.tables.values()))
    # With rows, the profile selects the model by their library.
    products = GemmTimes(profile, dtype, "" if has_rows else options.kernels)
    models = ModelTimes(profile.device, gemm=lambda _: (products.model, ""), cache_write=True)
    times: OpTimes = profile if has_rows else models
    notes = [products.note]
    works: dict[str, list[Any]] = {"gemm": [], "attention": []}
    if options.grid is not None:
        for m, n, k, batch in read_shapes(options.grid, "--grid"):
            works["gemm"].append(Gemm(m, n, k, batch, dtype, "nt"))
    else:
        pairs = wanted.products or MODEL_SITES
        of_dtype = profile.tables["gemm"].matching(dtype=dtype)
        measured = linear_layers(of_dtype, options, Exported())
        for row in model_rows(products, pairs, measured):
            works["gemm"].append(Gemm(row["m"], row["n"], row["k"], dtype=dtype, layout="nt"))
        half = "fp16" if profile.device.peak("bf16") is None else "bf16"
        if dtype != half:
            notes.append(f"attention is of {half}, not of {dtype}")
        for one in wanted.heads or MODEL_HEADS:
            if not one.window:
                works["attention"] += [*one.prompts(half), *one.decodes(half)]
    libraries = {"gemm": "" if products.fitted_to_profile else products.model.library}
    accuracy: dict[Any, Mapping[str, Any]] = {Gemm: products.model.provenance}
    if not has_rows:
        accuracy[Attention] = AttentionModel.best(profile.device).provenance
    found: dict[str, Rows] = defaultdict(list)
    answers = [(kind, of_kind, times.estimates(of_kind)) for kind, of_kind in works.items()]
    notes += times.note.split("; ")
    if wanted.experts and options.grid is None:
        experts = profile.experts(dtype, options.kernels)
        layers = [replace(one, dtype=dtype) for one in wanted.experts]
        answers.append(("moe", layers, list(experts.predict(layers))))
        libraries["moe"] = experts.library
        notes.append(f"{dtype} {experts.note}{accuracy_words(experts.provenance)}")
    for kind, of_kind, estimates in answers:
        for work, time in zip(of_kind, estimates, strict=True):
            # The last key column is the provider, which a modelled row does not have.
            row = {name: getattr(work, name) for name in LAYOUTS[kind].keys[:-1]}
            decodes = isinstance(work, Attention) and work.seq_q == 1
            judged = "held_out_decode" if decodes else "held_out"
            held_out = accuracy.get(type(work), {}).get(judged, {})
            library = libraries.get(kind, "")
            if time.source != "modelled":  # interpolated between rows of the profile
                held_out = {}
                library = ""
            row |= {
                "latency_us": time.latency_us,
                "low_us": time.low_us,
                "high_us": time.high_us,
                "origin": "modelled",
                "device": profile.device.name,
                "library": library,
                "held_out_median_pct": held_out.get("median_pct"),
                "held_out_p95_pct": held_out.get("p95_pct"),
            }
            found[kind].append(row)
    out.notes += [f"modelled rows: {note}" for note in notes if note]
    return found
