"""Writes the attention models that the package ships: `python -m tools.ship_attention`.

Each is fitted on rows of half the sites of its tables and states its error on the other half; what
the other architectures' models predict for it, before anything is measured on it, becomes the
interval of priors.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device import lookup
from quantbench.latency import attention
from quantbench.latency.attention import AttentionModel
from tools.accuracy.attention import (
    AttentionTable,
    held_out,
    held_out_decode,
    read_attention,
    read_decode,
)
from tools.accuracy.scoring import coverage, summarize
from tools.accuracy.tables import SHIPPED_GPUS

#: rows of the shipped fits: more make the files larger and predictions slower, for little
TRAIN_ROWS = 800
DECODE_ROWS = 500
_SEED = 0


def ship_attention(folder: Path) -> list[str]:
    """Fit and write one model for each device of the public tables; one line on each, for
    people.
    """
    tables = {slug: read_attention(slug) for slug in SHIPPED_GPUS}
    models = {slug: _fit(slug, table) for slug, table in tables.items()}
    # Two passes: priors need every model's parameters before their errors elsewhere can be known.
    for slug, model in models.items():
        _write(folder, slug, model, {"log_low": 0.0, "log_high": 0.0})
    _forget()
    lines = []
    for slug, model in models.items():
        transfer = _transfer(slug, tables[slug])
        _write(folder, slug, model, transfer)
        lines.append(model.note)
    _forget()
    return lines


def _fit(slug: str, table: AttentionTable) -> AttentionModel:
    device = lookup(slug)
    decode = read_decode(slug)
    train, test = held_out(table.shapes, TRAIN_ROWS, _SEED)
    model = AttentionModel.fit(
        device,
        table.shapes[train],
        table.latency_us[train],
        cache_write=table.cache_write[train],
        seed=_SEED,
    )
    errors = _errors(model, table, test)
    note = (
        f"{model.note}, {errors['median_pct']:.1f} % off (median) on held-out heads and head_dims"
    )
    decode_train, decode_test = held_out_decode(decode, _SEED)
    rows = decode_train[:DECODE_ROWS]
    decoding = AttentionModel.fit(device, decode.shapes[rows], decode.latency_us[rows], seed=_SEED)
    model = replace(model, decode=decoding.decode)
    decode_errors = _errors(model, decode, decode_test)
    provenance: dict[str, Any] = {
        "tables": {**table.sources, **decode.sources},
        "rows": len(train),
        "decode_rows": len(rows),
        "seed": _SEED,
        "compute_capability": list(device.compute_capability or ()),
        "held_out": errors,
        "held_out_decode": decode_errors,
    }
    note += f", decoding {decode_errors['median_pct']:.1f} % on held-out heads and batches"
    return replace(model, note=note, provenance=provenance)


def _errors(
    model: AttentionModel, table: AttentionTable, test: npt.NDArray[np.int64]
) -> dict[str, float]:
    predicted = model.predict(table.shapes[test], cache_write=table.cache_write[test])
    errors = summarize(predicted.latency_us, table.latency_us[test])
    covered = coverage(table.latency_us[test], predicted.low_us, predicted.high_us)
    return {**errors.rounded(), "coverage": round(covered, 3)}


def _transfer(slug: str, table: AttentionTable) -> dict[str, float]:
    """5th and 95th percentile of log(measured / prior) on a device, the prior knowing other
    architectures only.
    """
    prior = AttentionModel.prior(lookup(slug), prior="family-out")
    predicted = prior.predict(table.shapes, cache_write=table.cache_write)
    low, high = np.quantile(np.log(table.latency_us / predicted.latency_us), (0.05, 0.95))
    return {"log_low": round(float(low), 3), "log_high": round(float(high), 3)}


def _write(folder: Path, slug: str, model: AttentionModel, transfer: dict[str, float]) -> None:
    data = replace(model, provenance={**model.provenance, "transfer": transfer}).to_json()
    path = folder / f"attention-{slug}.json"
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")


def _forget() -> None:
    attention.shipped_slugs.cache_clear()
    attention.shipped_json.cache_clear()


if __name__ == "__main__":
    print("\n".join(ship_attention(Path(attention.__file__).parent / "models")))
