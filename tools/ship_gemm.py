"""Write the models that come with the package: `python -m tools.ship_gemm` (needs the extra `tables`).

models/pool.json holds each public GPU's parameters, fitted from the hand prior alone, so that any family can be left
out; models/<slug>.json the whole model of each, with its table and its errors on rows it was not fitted to.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quantbench.device.registry import lookup
from quantbench.latency.families import family
from quantbench.latency.gemm.cost_model import Machine, Menu
from quantbench.latency.gemm.distilled import distil
from quantbench.latency.gemm.ensemble import Ensemble
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.training import (
    POOL_FORMAT,
    POOL_VERSION,
    Effort,
    Known,
    choose,
    fit_parameters,
    pooled,
    shipped_pool,
)
from quantbench.latency.gemm.trees import Growth, Measured, Member
from quantbench.latency.scoring import coverage, random_split, summarize
from tools.accuracy.tables import SHIPPED_GPUS, PackagedTable, read_packaged

POOL_ROWS = 700
MODEL_ROWS = 8000
# Two members of ten trees each keep a file below a megabyte.
_EFFORT = Effort(members=2, rows_first=1000, rows_other=600, growth=Growth(trees=10, leaf=3))
_BLIND_ROWS = 4000


def _pool_entry(slug: str, table: PackagedTable) -> Known:
    device = lookup(slug)
    rows = random_split(len(table), POOL_ROWS, seed=77).train
    measured = Measured(
        table.m[rows].astype(float), table.n[rows].astype(float), table.k[rows].astype(float),
        np.log(table.latency_us[rows]), np.full(len(rows), -1),
    )  # fmt: skip
    vector = fit_parameters(Machine.of(device, "bf16"), Menu.of(), measured, pooled(()), max_iterations=500)
    return Known(slug, family(device), "bf16", vector, len(rows), table.file, 0.0)


def _blind_90(known: Known, pool: list[Known], table: PackagedTable) -> float:
    """How far the other families' pool is off on this GPU: the 90th percentile of |log error|."""
    device = lookup(known.device)
    start, _ = choose(device, known.dtype, pool, family_out=True)
    ensemble = Ensemble(Machine.of(device, known.dtype), Menu.of(), (Member(start.mean, None),))
    rows = random_split(len(table), _BLIND_ROWS, seed=78).train
    m, n, k = (x[rows].astype(float) for x in (table.m, table.n, table.k))
    return float(np.quantile(np.abs(ensemble.physics(m, n, k) - np.log(table.latency_us[rows])), 0.90))


def _model(slug: str, table: PackagedTable) -> GemmModel:
    split = random_split(len(table), MODEL_ROWS, seed=0)
    rows = split.train
    model = GemmModel.fit(
        slug, table.m[rows], table.n[rows], table.k[rows], table.latency_us[rows], prior="none", effort=_EFFORT
    )
    test = split.test[:_BLIND_ROWS]
    found = model.predict(table.m[test], table.n[test], table.k[test])
    errors = summarize(found.latency_us, table.latency_us[test])
    provenance: dict[str, Any] = {
        "table": table.file, "sha256": table.sha256, "package": table.package, "framework": table.framework,
        "framework_version": table.version, "measured_on": table.device, "rows_fitted": len(rows),
        "held_out": {
            "protocol": f"random rows, {len(test)} not fitted", "median_pct": round(errors.median_pct, 2),
            "mean_pct": round(errors.mean_pct, 2), "p95_pct": round(errors.p95_pct, 2),
            "interval_coverage": round(coverage(table.latency_us[test], found.low_us, found.high_us), 4),
        },
    }  # fmt: skip
    fast = distil(model.ensemble, also=(table.m.astype(float), table.n.astype(float), table.k.astype(float)))
    quick = summarize(fast.predict_us(table.m[test], table.n[test], table.k[test]), table.latency_us[test])
    provenance["held_out"]["fast_median_pct"] = round(quick.median_pct, 2)
    return replace(model, provenance=provenance, fast=fast)


def main() -> None:
    """Fit and write everything; minutes on one core."""
    folder = Path(__file__).parent.parent / "quantbench" / "latency" / "models"
    folder.mkdir(exist_ok=True)
    tables = {slug: read_packaged(slug) for slug in SHIPPED_GPUS}
    pool = [_pool_entry(slug, table) for slug, table in tables.items()]
    pool = [replace(k, blind_90=round(_blind_90(k, pool, tables[k.device]), 4)) for k in pool]
    known = [{**vars(k), "parameters": [round(float(z), 5) for z in k.parameters]} for k in pool]
    text = json.dumps({"format": POOL_FORMAT, "version": POOL_VERSION, "known": known}, indent=1)
    (folder / "pool.json").write_text(text + "\n", encoding="utf-8")
    shipped_pool.cache_clear()
    for slug, table in tables.items():
        model = _model(slug, table)
        model.save(folder / f"{slug}.json")
        print(slug, (folder / f"{slug}.json").stat().st_size, model.provenance["held_out"])


if __name__ == "__main__":
    main()
