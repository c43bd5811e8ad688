"""Write the models that come with the package: `python -m tools.ship_gemm [--pool] [--model
<device>:<dtype>]`.

models/pool.json holds the parameters of each measured GPU and dtype, fitted from the hand prior
alone, so that any family can be left out; models/<slug>-<dtype>-<library>.gemm the whole model of
each GPU and dtype, of its default library, with its table and its errors on rows it was not fitted
to. Models that are there already, of the same tables, are skipped. Needs the extra `tables` and the
published files (`tables.PUBLISHED`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.registry import lookup
from quantbench.errors import QuantbenchError
from quantbench.latency.families import family
from quantbench.latency.gemm.cost_model import Machine, Menu, hand_prior
from quantbench.latency.gemm.ensemble import Ensemble
from quantbench.latency.gemm.member import Growth, Member
from quantbench.latency.gemm.model import FOLDER, GemmModel, file_name
from quantbench.latency.gemm.training import (
    POOL_FORMAT,
    POOL_VERSION,
    TABLE_EFFORT,
    TABLE_ROWS,
    Effort,
    Known,
    choose,
)
from quantbench.latency.libraries import SYSTEMS, default_library, libraries_of
from quantbench.workload.dtypes import GEMM_DTYPES
from tools.accuracy.scoring import coverage, random_split, summarize
from tools.accuracy.tables import (
    SHIPPED_GPUS,
    PackagedTable,
    read_packaged,
)
from tools.published_tables import PUBLISHED, PublishedTable, read_published

POOL_ROWS = 700
_BLIND_ROWS = 4000
#: tables of aiconfigurator-core in the pool: fp8 so that a GPU's fp8 can be told from the others'
POOLED = (
    *((slug, "bf16") for slug in SHIPPED_GPUS),
    *((slug, "fp8") for slug in SHIPPED_GPUS if slug != "a100-sxm4-80gb"),
)


Table = PackagedTable | PublishedTable


def _arguments(table: Table, rows: npt.NDArray[np.intp]) -> dict[str, Any]:
    if isinstance(table, PublishedTable):
        return table.take(rows)
    return {"m": table.m[rows], "n": table.n[rows], "k": table.k[rows]}


def _pool_entry(table: Table) -> Known:
    """The parameters of one table, fitted from the hand prior alone."""
    device = lookup(table.gpu)
    if isinstance(table, PublishedTable):
        # For batched products the libraries take one or two tiles, whatever is fastest; the cost
        # model chooses.
        table = table.where(table.batch == 1)
    rows = random_split(len(table), min(POOL_ROWS, len(table) - 1), seed=77).train
    one_model = Effort(members=1, rows_first=POOL_ROWS, growth=Growth(trees=1))
    model = GemmModel.fit(
        device,
        **_arguments(table, rows),
        latency_us=table.latency_us[rows],
        dtype=table.dtype,
        prior="none",
        effort=one_model,
    )
    vector = model.ensemble.members[0].parameters[: len(hand_prior()[0])]
    return Known(
        table.gpu, family(device), table.dtype, vector, len(rows), _provenance(table)["table"], 0.0
    )


def _blind_90(known: Known, pool: list[Known], table: Table) -> float:
    """How far the other families' pool is off on this GPU: the 90th percentile of |log error|."""
    device = lookup(known.device)
    start, _ = choose(device, known.dtype, pool, family_out=True)
    ensemble = Ensemble(Machine.of(device, known.dtype), Menu.of(), (Member(start.mean, None),))
    rows = random_split(len(table), min(_BLIND_ROWS, len(table) - 1), seed=78).train
    arguments = _arguments(table, rows)
    arguments.pop("layout", None)
    log_us = ensemble.physics(*np.array(list(arguments.values()), dtype=float))
    return float(np.quantile(np.abs(log_us - np.log(table.latency_us[rows])), 0.90))


def _provenance(table: Table) -> dict[str, Any]:
    if isinstance(table, PublishedTable):
        return table.provenance
    return {
        "table": table.file,
        "sha256": table.sha256,
        "package": table.package,
        "framework": table.framework,
        "framework_version": table.version,
        "measured_on": table.device,
    }


def _fit(table: Table, rows: npt.NDArray[np.intp]) -> GemmModel:
    library = default_library(table.gpu, table.dtype)
    return GemmModel.fit(
        table.gpu,
        **_arguments(table, rows),
        latency_us=table.latency_us[rows],
        dtype=table.dtype,
        prior="none",
        effort=TABLE_EFFORT,
        library=library,
    )


def _model(table: Table) -> GemmModel:
    """Fits at most TABLE_ROWS rows. A small table is fitted whole, and judged by a fit to two
    thirds of it.
    """
    few = len(table) < 2 * TABLE_ROWS
    split = random_split(len(table), 2 * len(table) // 3 if few else TABLE_ROWS, seed=0)
    judged = _fit(table, split.train)
    model = _fit(table, np.arange(len(table))) if few else judged
    provenance = {
        **model.provenance,
        **_provenance(table),
        "rows_fitted": model.rows,
        "held_out": _held_out(judged, table, split.test[:_BLIND_ROWS]),
    }
    return replace(model, provenance=provenance)


def _held_out(model: GemmModel, table: Table, rows: npt.NDArray[np.intp]) -> dict[str, Any]:
    """Returns the errors on rows that the model was not fitted to."""
    found = model.predict(**_arguments(table, rows))
    measured_us = table.latency_us[rows]
    errors = summarize(found.latency_us, measured_us).rounded()
    words = f"random rows, {errors.pop('rows')} not fitted"
    covered = round(coverage(measured_us, found.low_us, found.high_us), 4)
    return {"protocol": words, **errors, "interval_coverage": covered}


def _done(file: Path, sha256: str) -> bool:
    """Whether a file of the current version holds a model of this table."""
    try:
        return bool(GemmModel.load(file).provenance["sha256"] == sha256)
    except (QuantbenchError, KeyError):
        return False


def main() -> None:
    """Fit and write what is asked for; half a minute a model on one idle core."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", action="store_true", help="fit models/pool.json")
    parser.add_argument(
        "--model", action="append", default=[], help="<device>:<dtype> to fit; default: all"
    )
    parser.add_argument(
        "--force", action="store_true", help="fit models again that the same tables gave"
    )
    asked = parser.parse_args()
    if asked.pool:
        tables: list[Table] = [read_packaged(slug, dtype=dtype) for slug, dtype in POOLED]
        tables += [read_published(*pair) for pair in PUBLISHED]
        pool = list(map(_pool_entry, tables))
        entries = []
        for known, of in zip(pool, tables, strict=True):
            blind_90 = round(_blind_90(known, pool, of), 4)
            parameters = [round(float(one), 5) for one in known.parameters]
            entries.append({**vars(known), "parameters": parameters, "blind_90": blind_90})
        data = {"format": POOL_FORMAT, "version": POOL_VERSION, "known": entries}
        (FOLDER / "pool.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    wanted = [tuple(name.split(":")) for name in asked.model]
    if not wanted and not asked.pool:
        wanted = [pair for pair in product(SYSTEMS, GEMM_DTYPES) if libraries_of(*pair)]
        wanted += [pair for pair in PUBLISHED if pair not in wanted]
    for slug, dtype in wanted:
        pair = (slug, dtype)
        packaged = pair not in PUBLISHED
        table = read_packaged(slug, dtype=dtype) if packaged else read_published(*pair)
        file = FOLDER / file_name(slug, dtype, default_library(slug, dtype))
        if asked.force or not _done(file, _provenance(table)["sha256"]):
            start = perf_counter()
            model = _model(table)
            model.save(file)
            size = f"{file.stat().st_size} bytes, {perf_counter() - start:.0f} s"
            print(f"{file.name}: {size}, {model.provenance['held_out']}", flush=True)


if __name__ == "__main__":
    main()
