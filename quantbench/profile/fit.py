"""Fits the models of a profile to its rows, or selects shipped models if there are too few rows.

Entry points: `models_of`, used by `build`; `known_model`, which selects a shipped model, also used by `tools.shelf`.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.registry import known
from quantbench.device.spec import DeviceSpec
from quantbench.latency.attention import FEWEST_ROWS as FEWEST_ATTENTION_ROWS
from quantbench.latency.attention import AttentionModel
from quantbench.latency.attention_cost_model import AttentionShapes
from quantbench.latency.gemm.distilled import LEAN, distil
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.public import TABLE_EFFORT, TABLE_ROWS
from quantbench.latency.gemm.training import FEWEST_ROWS as FEWEST_PRODUCT_ROWS
from quantbench.latency.libraries import library_of
from quantbench.latency.softmax import SoftmaxModel
from quantbench.launch import Launch, Tile
from quantbench.profile.models import Models, ProductModel
from quantbench.profile.table import Table
from quantbench.workload import Softmax

FloatArray = npt.NDArray[np.float64]

# Most rows that the GEMM model's distilled form is trained on: more rows cost time and hardly change other predictions.
_MOST_DISTILLED = 16_000
# Tables of more rows are fitted with fewer members and trees, because with many rows the members hardly differ.
_MANY_PRODUCT_ROWS = 2000
# Fitting attention's Gaussian process takes time cubic in the rows.
_MOST_ATTENTION_ROWS = 600
# Half-widths are stored at the median times of this many groups of equally many probed shapes.
_POINTS = 8
_PROBED = 3000
_UNFUSED_PROVIDERS = ("torch.eager",)


def models_of(device: DeviceSpec, tables: dict[str, Table], *, fit: bool, seed: int) -> Models:
    """Returns a GEMM model for each dtype and library with rows (if none: for bf16, or fp16 if the device has no bf16),
    and models of softmax and attention. A CPU gets none, because the models describe thread blocks and waves."""
    if device.kind == "cpu":
        return Models()
    usual = "fp16" if device.peak("bf16") is None else "bf16"
    rows_of = tables["gemm"]
    dtypes = [name for name in np.unique(rows_of["dtype"]).tolist() if device.peak(name) is not None]
    products: dict[tuple[str, str], ProductModel] = {}
    for dtype in dtypes:
        of_dtype = rows_of.where(rows_of["dtype"] == dtype)
        libraries = np.array([library_of(name) for name in of_dtype["provider"].tolist()])
        for library, _ in Counter(libraries.tolist()).most_common():
            model = _product(device, of_dtype.where(libraries == library), dtype, library, fit, seed)
            products.setdefault((dtype, model.library), model)
    if not products and device.peak(usual) is not None:
        products["", ""] = _unfitted(device, usual, seed)
    softmax, fused = _softmax(device, tables["softmax"], fit)
    return Models(tuple(products.values()), softmax, fused, _attention(device, tables["attention"], fit, seed))


def _most_of(table: Table, *columns: str) -> Table:
    """Keeps the rows with the most frequent value of each column in turn."""
    for name in columns:
        if len(table):
            table = table.where(table[name] == table.most_frequent(name))
    return table


def _product(device: DeviceSpec, table: Table, dtype: str, library: str, fit: bool, seed: int) -> ProductModel:
    table = _most_of(table, "provider")
    m = table["m"] * table["batch"]
    whole = (m <= LARGEST_SIDE) & (table["n"] <= LARGEST_SIDE) & (table["k"] <= LARGEST_SIDE)
    plain = whole & (table["batch"] == 1)
    # A batched GEMM runs a little differently from one with batch × m rows: used only if there are too few others.
    kept = np.flatnonzero(plain if plain.sum() >= FEWEST_PRODUCT_ROWS else whole)
    if not fit or len(kept) < FEWEST_PRODUCT_ROWS:
        return _unfitted(device, dtype, seed)
    kept = np.sort(np.random.default_rng(seed).permutation(kept)[:TABLE_ROWS])
    chosen = table.where(kept)
    launches = [
        Launch(row["kernel"], tile=Tile(row["block_m"], row["block_n"], split_k=row["split_k"] or 1))
        if row["block_m"] and row["kernel"]
        else None
        for row in chosen.rows()
    ]
    model = GemmModel.fit(
        device, m[kept], chosen["n"], chosen["k"], chosen["latency_us"], dtype=dtype, library=library,
        launches=launches if any(launches) else None, seed=seed,
        effort=TABLE_EFFORT if len(kept) > _MANY_PRODUCT_ROWS else None,
    )  # fmt: skip
    trained = np.flatnonzero(whole)
    if len(trained) > _MOST_DISTILLED:
        trained = np.sort(np.random.default_rng(seed).permutation(trained)[:_MOST_DISTILLED])
    return product_model(model, every=(m[trained], table["n"][trained], table["k"][trained]), seed=seed)


@cache
def known_model(slug: str, dtype: str, seed: int) -> ProductModel:
    """Returns the shipped model of a known GPU. Cached, because distilling takes seconds."""
    return product_model(GemmModel.best(slug, dtype=dtype), seed=seed)


def _unfitted(device: DeviceSpec, dtype: str, seed: int) -> ProductModel:
    if device in known():
        return known_model(device.name, dtype, seed)
    return product_model(GemmModel.best(device, dtype=dtype), seed=seed)


def product_model(
    model: GemmModel, *, every: tuple[npt.NDArray[np.int64], ...] | None = None, seed: int = 0
) -> ProductModel:
    """Returns the distilled form of a model, with the model's interval widened by the distillation error.

    every: (shapes,) arrays m, n, k on which to train a lean distilled form, in addition to random shapes; it answers
    single shapes in half the time. If None, a shipped model keeps its own, more accurate distilled form.
    """
    if every is None and model.fast is not None:
        fast = model.fast
    else:
        also = None if every is None else tuple(size.astype(np.float64) for size in every)
        fast = distil(model.ensemble, also=also, seed=seed, size=LEAN)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    m = np.floor(2.0 ** rng.uniform(0, 14, _PROBED))
    n, k = (8.0 * np.maximum(1, np.round(2.0 ** rng.uniform(2, 12, _PROBED))) for _ in range(2))
    if every is not None:
        rows = rng.integers(0, len(every[0]), _PROBED // 2)
        for size, given in zip((m, n, k), every, strict=True):
            size[: len(rows)] = given[rows]
    whole = model.predict(m, n, k)
    times_us = fast.predict_us(m, n, k, rising=False)
    half = np.log(whole.high_us / whole.latency_us)
    added = np.abs(np.log(times_us / whole.latency_us))
    log_us, points = [], []
    for part in np.array_split(np.argsort(times_us, kind="stable"), _POINTS):
        log_us.append(round(float(np.log(np.median(times_us[part]))), 6))
        points.append(round(float(np.hypot(np.median(half[part]), np.quantile(added[part], 0.9))), 6))
    note = model.note if model.rows == 0 or model.note else ""
    return ProductModel(
        model.dtype, fast, model.rows, tuple(log_us), tuple(points), note,
        {**model.provenance, "prior": model.prior_source}, model.library,
    )  # fmt: skip


def _softmax(device: DeviceSpec, table: Table, fit: bool) -> tuple[SoftmaxModel, bool]:
    table = _most_of(table, "provider", "dtype")
    if not fit or not len(table):
        return SoftmaxModel.best(device), True
    fused = table["provider"][0] not in _UNFUSED_PROVIDERS
    library = "torch" if table["provider"][0] == "torch" else "megatron"
    works: list[Any] = [work for work in table.workloads() if isinstance(work, Softmax)]
    return SoftmaxModel.fit(device, works, table["latency_us"].tolist(), fused=fused, library=library), fused


def _attention(device: DeviceSpec, table: Table, fit: bool, seed: int) -> AttentionModel | None:
    table = _most_of(table, "provider", "dtype")
    dtype = str(table["dtype"][0]) if len(table) else "bf16"
    if device.peak(dtype) is None and device.peak("fp16") is None:
        return None
    if not fit or len(table) < FEWEST_ATTENTION_ROWS:
        return AttentionModel.best(device)
    kept = np.sort(np.random.default_rng(seed).permutation(len(table))[:_MOST_ATTENTION_ROWS])
    chosen = table.where(kept)
    shapes = AttentionShapes(
        chosen["batch"], chosen["heads"], chosen["kv_heads"], chosen["seq_q"], chosen["seq_k"], chosen["head_dim"],
        chosen["causal"], chosen["direction"] == "backward", dtype,
    )  # fmt: skip
    return AttentionModel.fit(device, shapes, chosen["latency_us"], seed=seed)
