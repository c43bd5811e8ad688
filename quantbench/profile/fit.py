"""Fits a profile's models to its rows, or selects shipped models where rows are too few.

`models_of` is the entry point.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.registry import known as known_devices
from quantbench.device.spec import DeviceSpec
from quantbench.latency.attention import FEWEST_ROWS as FEWEST_ATTENTION_ROWS
from quantbench.latency.attention import AttentionModel
from quantbench.latency.attention_cost_model import AttentionShapes
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.training import FEWEST_ROWS as FEWEST_PRODUCT_ROWS
from quantbench.latency.gemm.training import TABLE_EFFORT, TABLE_ROWS
from quantbench.latency.libraries import library_of, writes_cache
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile.models import Models
from quantbench.profile.table import Table

FloatArray = npt.NDArray[np.float64]

# A GEMM model is an ensemble. If it is fitted to more rows than this, its members hardly differ, so
# TABLE_EFFORT fits fewer members and trees.
_MANY_PRODUCT_ROWS = 2000
# Largest number of prompt rows, and of decoding rows, to which attention's Gaussian process is
# fitted. The time of the fit is cubic in the number of rows.
_MOST_ATTENTION_ROWS = 600
# Providers that run softmax as several kernels.
_UNFUSED_PROVIDERS = ("torch.eager",)


def models_of(device: DeviceSpec, tables: dict[str, Table], *, fit: bool, seed: int) -> Models:
    """Returns a profile's models for GEMMs, softmax and attention.

    There is one GEMM model for each measured pair of a dtype and a library, if the device has a
    peak for the dtype. Without such a pair, there is one GEMM model, for bf16, or for fp16 if the
    device has no bf16. A CPU gets no models, because the models describe thread blocks and waves
    (sets of blocks that run at once).

    tables: tables by kind.
    fit: whether to fit the models to the rows; if False, the shipped models are used.
    seed: the same rows and seed give the same models.
    """
    if device.kind == "cpu":
        return Models()
    usual = "fp16" if device.peak("bf16") is None else "bf16"
    rows_of = tables["gemm"]
    products: dict[tuple[str, str], GemmModel] = {}
    for dtype in np.unique(rows_of["dtype"]).tolist():
        if device.peak(dtype) is None:
            continue
        of_dtype = rows_of.matching(dtype=dtype)
        libraries = Counter(map(library_of, of_dtype["provider"].tolist()))
        for library, _ in libraries.most_common():
            table = of_dtype.where(of_dtype.by_library(library))
            model = _product(device, table, dtype, library, fit, seed)
            products.setdefault((dtype, model.library), model)
    if not products and device.peak(usual) is not None:
        products["", ""] = _unfitted(device, usual)
    softmax, fused = _softmax(device, tables["softmax"], fit)
    return Models(
        tuple(products.values()), softmax, fused, _attention(device, tables["attention"], fit, seed)
    )


def _most_of(table: Table, *columns: str) -> Table:
    """Keeps the rows with the most frequent value of each column, applied column by column."""
    for name in columns:
        if len(table):
            table = table.matching(**{name: table.most_frequent(name)})
    return table


def _product(
    device: DeviceSpec, table: Table, dtype: str, library: str, fit: bool, seed: int
) -> GemmModel:
    """Returns the GEMM model for one dtype and library.

    The model is fitted to at most TABLE_ROWS random rows, all of the provider with the most rows.
    With fewer than FEWEST_PRODUCT_ROWS rows, or if `fit` is False, the model is a shipped one.

    table: rows of the dtype and library.
    """
    table = _most_of(table, "provider")
    m = table["m"] * table["batch"]  # the limit on m applies to the whole batch
    whole = (m <= LARGEST_SIDE) & (table["n"] <= LARGEST_SIDE) & (table["k"] <= LARGEST_SIDE)
    plain = whole & (table["batch"] == 1)
    # Batched GEMMs are added only if the GEMMs with batch 1 are too few for a fit.
    kept = np.flatnonzero(plain if plain.sum() >= FEWEST_PRODUCT_ROWS else whole)
    if not fit or len(kept) < FEWEST_PRODUCT_ROWS:
        return _unfitted(device, dtype)
    kept = np.sort(np.random.default_rng(seed).permutation(kept)[:TABLE_ROWS])
    chosen = table.where(kept)
    return GemmModel.fit(
        device,
        chosen["m"],
        chosen["n"],
        chosen["k"],
        chosen["latency_us"],
        batch=chosen["batch"],
        layout=chosen["layout"].tolist(),
        dtype=dtype,
        library=library,
        seed=seed,
        effort=TABLE_EFFORT if len(kept) > _MANY_PRODUCT_ROWS else None,
    )


def _unfitted(device: DeviceSpec, dtype: str) -> GemmModel:
    """Returns the best GEMM model for a dtype without using the profile's rows."""
    return GemmModel.best(device.name if device in known_devices() else device, dtype=dtype)


def _softmax(device: DeviceSpec, table: Table, fit: bool) -> tuple[SoftmaxModel, bool]:
    """Returns the softmax model, and whether it describes one fused kernel.

    The model is fitted to the rows of the most frequent provider, and of that provider's most
    frequent dtype. Without rows, or if `fit` is False, it is the shipped model.
    """
    table = _most_of(table, "provider", "dtype")
    if not fit or not len(table):
        return SoftmaxModel.best(device), True
    provider = table["provider"][0]
    fused = provider not in _UNFUSED_PROVIDERS
    library = "torch" if provider == "torch" else "megatron"
    works: Any = table.workloads()
    times_us = table["latency_us"].tolist()
    return SoftmaxModel.fit(device, works, times_us, fused=fused, library=library), fused


def _attention(device: DeviceSpec, table: Table, fit: bool, seed: int) -> AttentionModel | None:
    """Returns the attention model, or None if the device supports neither its dtype nor fp16.

    The dtype is the most frequent one in the table, or bf16 without rows. The model is fitted to
    random rows of the dtype. With fewer than FEWEST_ATTENTION_ROWS rows, or if `fit` is False, it
    is the shipped model.
    """
    table = _most_of(table, "dtype")
    dtype = str(table["dtype"][0]) if len(table) else "bf16"
    if device.peak(dtype) is None and device.peak("fp16") is None:
        return None
    if not fit or len(table) < FEWEST_ATTENTION_ROWS:
        return AttentionModel.best(device)
    # Prompts (seq_q equal to seq_k) and decoding may run different kernels, so the provider with
    # the most rows is selected separately for prompts and for decoding.
    kept = np.zeros(len(table), dtype=bool)
    for phase in (table["seq_q"] == table["seq_k"], table["seq_q"] != table["seq_k"]):
        usual = table.most_frequent("provider", phase)
        rows = np.flatnonzero(phase & (table["provider"] == usual))
        kept[np.random.default_rng(seed).permutation(rows)[:_MOST_ATTENTION_ROWS]] = True
    chosen = table.where(kept)
    names = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim", "causal")
    columns: Any = [chosen[name] for name in names]
    columns += [chosen["direction"] == "backward", dtype]
    shapes = AttentionShapes(*columns)
    writes = chosen["causal"] & np.array(list(map(writes_cache, chosen["provider"])))
    return AttentionModel.fit(device, shapes, chosen["latency_us"], seed=seed, cache_write=writes)
