"""Fits models of public tables: those that are shipped, and on first use those of other libraries.

Entry points: `file_name`, `FOLDER` and `model_of_table`, used by `gemm.model`; `fit_table`, `held_out_errors` and
`TABLE_ROWS` of `TABLE_EFFORT`, used by tools/ship_gemm.py.

A fitted model is kept below $XDG_CACHE_HOME (~/.cache) in quantbench/models, under a name that changes with the table
and with quantbench. A damaged file is fitted again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantbench import __version__
from quantbench.errors import QuantbenchError, StoreError, UnsupportedError
from quantbench.files import read_bytes
from quantbench.latency.gemm.distilled import distil
from quantbench.latency.gemm.files import MODEL_VERSION
from quantbench.latency.gemm.training import Effort
from quantbench.latency.gemm.trees import Growth
from quantbench.latency.libraries import TABLES, system_of
from quantbench.latency.scoring import coverage, random_split, summarize
from quantbench.latency.tables import GemmTable, read_table, systems_folder

if TYPE_CHECKING:
    from quantbench.latency.gemm.model import GemmModel

#: folder of the shipped models
FOLDER = Path(__file__).parent.parent / "models"
#: rows of a table that its model is fitted to
TABLE_ROWS = 8000
#: two members of ten trees each keep a file near 0.2 MB
TABLE_EFFORT = Effort(members=2, rows_first=1000, rows_other=600, growth=Growth(trees=10, leaf=3))
_JUDGED_ROWS = 4000


def file_name(slug: str, dtype: str, library: str) -> str:
    """Returns the name of a model's file.

    >>> file_name("h100-sxm5-80gb", "fp8", "vllm")
    'h100-sxm5-80gb-fp8-vllm.gemm'
    """
    return f"{slug}-{dtype}-{library}.gemm"


def model_of_table(made: type[GemmModel], slug: str, dtype: str, library: str) -> GemmModel:
    """Returns the model of a library's public table (`libraries.libraries_of`), fitted on first use.

    Raises UnsupportedError if the extra `tables` is not installed.
    """
    system, folder = system_of(slug), systems_folder()
    release = TABLES[system][library]
    shown = f"{system}/gemm/{library}/{release}/gemm_perf.parquet"
    if folder is None or not (folder / "data" / shown).is_file():
        what = f"no model of {library}'s {dtype} products on {slug} is shipped"
        raise UnsupportedError(
            "GemmModel.best", what, "pip install 'quantbench[tables]', from whose tables it is fitted"
        )
    path = folder / "data" / shown
    sha256 = hashlib.sha256(read_bytes(path)).hexdigest()
    key = hashlib.sha256(f"{sha256} {MODEL_VERSION} {__version__}".encode()).hexdigest()[:12]
    kept = _cache_folder() / f"{key}-{file_name(slug, dtype, library)}"
    with suppress(QuantbenchError):
        if kept.is_file():
            return made.load(kept)
    # Imported here, because few commands fit a model.
    from importlib.metadata import version

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    provenance = {
        "table": shown, "sha256": sha256, "package": f"aiconfigurator-core {version('aiconfigurator-core')}",
        "framework": library, "framework_version": release, "measured_on": slug,
    }  # fmt: skip
    console = Console(stderr=True)
    words = f"fitting {library}'s {dtype} products on {slug}, once (about a minute)"
    if not console.is_terminal:
        console.print(words, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=1.0)
        table = read_table(path, slug, dtype=dtype, library=library)
        model = fit_table(made, table, provenance, lambda done: bar.update(task, completed=done))
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        model.save(kept)
    except (OSError, StoreError) as error:
        console.print(f"not kept for the next time: {error}", soft_wrap=True)
    return model


def _cache_folder() -> Path:
    """Returns the user's folder of models by the XDG base directory specification: only absolute paths count."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "quantbench" / "models"


def fit_table(
    made: type[GemmModel],
    table: GemmTable,
    provenance: Mapping[str, Any],
    progress: Callable[[float], None] = lambda done: None,
) -> GemmModel:
    """Fits the model of a table, with its errors on other rows and its distilled form.

    progress: called with the share of the work that is done.
    """
    split = random_split(len(table), min(TABLE_ROWS, len(table) // 2), seed=0)
    rows = split.train
    progress(0.05)
    model = made.fit(
        table.gpu, table.m[rows], table.n[rows], table.k[rows], table.latency_us[rows], dtype=table.dtype,
        library=table.library, prior="none", effort=TABLE_EFFORT,
    )  # fmt: skip
    progress(0.7)
    test = split.test[:_JUDGED_ROWS]
    sizes = table.m[test], table.n[test], table.k[test]
    held_out = held_out_errors(model, table.latency_us[test], *sizes)
    fast = distil(model.ensemble, also=(table.m.astype(float), table.n.astype(float), table.k.astype(float)))
    quick = summarize(fast.predict_us(*sizes), table.latency_us[test])
    held_out["fast_median_pct"] = round(quick.median_pct, 2)
    progress(1.0)
    told = {**model.provenance, "rows_fitted": model.rows, "held_out": held_out}
    return replace(model, provenance={**provenance, **told}, fast=fast)


def held_out_errors(model: GemmModel, latency_us: npt.NDArray[np.float64], *sizes: Any, **more: Any) -> dict[str, Any]:
    """Returns a model's errors on rows that it was not fitted to, for its provenance. sizes, more: of `predict`."""
    found = model.predict(*sizes, **more)
    errors = summarize(found.latency_us, latency_us)
    return {
        "protocol": f"random rows, {len(latency_us)} not fitted", "median_pct": round(errors.median_pct, 2),
        "mean_pct": round(errors.mean_pct, 2), "p95_pct": round(errors.p95_pct, 2),
        "interval_coverage": round(coverage(latency_us, found.low_us, found.high_us), 4),
    }  # fmt: skip
