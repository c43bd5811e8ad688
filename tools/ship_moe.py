"""Writes the MoE models that the package ships: `python -m tools.ship_moe [dtype …]`.

Each is fitted to the newest table of its GPU, dtype and library, without references, and then says
how far its own prior, from the other GPUs' models, was off (`transfer`), which becomes the interval
of priors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from quantbench.latency import moe
from quantbench.latency.libraries import TABLES, slug_of
from quantbench.latency.moe import Growth, MoEModel, save_models
from tools.accuracy.moe import MoETable, read_moe

DTYPES = ("bf16", "fp8", "fp8_block", "nvfp4", "mxfp4")
#: boosted trees only: a hundredth of the size of randomised ones
_GROWTH = Growth(randomised=0, boosted=150, depth=5)
_TRANSFER_ROWS = 2000
#: most rows of a fit, drawn at random
_ROWS = 12_000


def ship_moe(folder: Path, dtypes: Sequence[str] = DTYPES) -> Iterator[str]:
    """Fits all models and writes one file per dtype; yields a line on each."""
    rng = np.random.default_rng(0)
    tables: dict[str, list[MoETable]] = {dtype: [] for dtype in dtypes}
    for system, libraries in TABLES.items():
        for library in libraries:
            for dtype, table in read_moe(slug_of(system) or system, library).items():
                if dtype in tables:
                    few = table.take(rng.permutation(len(table.works))[:_ROWS])
                    tables[dtype].append(replace(few, rows=len(table.works)))
    for dtype, measured in tables.items():
        models = list(map(_fit, measured))
        told = []
        for model, table in zip(models, measured, strict=True):
            transfer = _transfer(model, table, models)
            told.append(replace(model, provenance={**model.provenance, "transfer": transfer}))
        save_models(folder / f"{dtype}.moe", told)
        yield from (
            f"{one.note}; prior within a factor of {np.exp(one.provenance['transfer']):.2f}"
            for one in told
        )


def _fit(table: MoETable) -> MoEModel:
    works = table.works
    library = table.library
    model = MoEModel.fit(
        table.gpu, works, table.latency_us, library=library, prior="none", growth=_GROWTH
    )
    fitted = f"fitted to {len(works)} of {table.rows} rows"
    note = f"experts of {library} {table.version} on {table.gpu}: {fitted}"
    provenance = {
        "table": table.file,
        "package": table.package,
        "sha256": table.sha256,
        "rows": table.rows,
    }
    return replace(model, note=note, provenance={**provenance, "transfer": 0.0})


def _transfer(model: MoEModel, table: MoETable, models: list[MoEModel]) -> float:
    """Returns the 90 % quantile of |log(measured / prior)| on a table, the prior knowing other GPUs
    only.
    """
    others = [one for one in models if one.device.name != model.device.name]
    prior = MoEModel.prior(model.device, dtype=model.dtype, library=model.library, prior=others)
    rows = np.random.default_rng(0).permutation(len(table.works))[:_TRANSFER_ROWS]
    predicted = prior.predict([table.works[i] for i in rows]).latency_us
    return round(float(np.quantile(np.abs(np.log(table.latency_us[rows] / predicted)), 0.9)), 3)


if __name__ == "__main__":
    for line in ship_moe(Path(moe.__file__).parent / "models", sys.argv[1:] or DTYPES):
        print(line, flush=True)
