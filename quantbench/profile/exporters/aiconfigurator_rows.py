"""Rows of aiconfigurator's tables of products and attention, from measured rows or, where there are none, a model."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantbench.profile.exporters.cliff_rows import known_cliff_rows, rows_between
from quantbench.profile.exporters.modelled import SITE_SIZES, GemmTimes, attention_us, model_sites
from quantbench.profile.exporters.options import Exported, ExportOptions
from quantbench.profile.exporters.rows import attentions, dtype_of, products
from quantbench.profile.profile import Profile
from quantbench.workload import Attention

Columns = dict[str, list[Any]]

#: its names of number formats: common.GEMMQuantMode and common.FMHAQuantMode of aiconfigurator-core 0.12.0
_GEMM_DTYPES = {"bf16": "bfloat16", "fp8": "fp8"}
_ATTENTION_DTYPES = {"bf16": "bfloat16"}
_MODEL_HEADS = ((8, 1), (8, 8), (16, 2), (16, 16), (32, 4), (32, 8), (32, 32), (64, 8), (64, 64))
_MODEL_BATCHES = tuple(2**power for power in range(9))
_MODEL_HEAD_DIMS = (64, 128)
#: a table made by a model: prompts and contexts of powers of two, and one more: rows of attention are cut into tiles
_MODEL_SEQS = tuple(2**power for power in range(4, 18))
_MOST_MODEL_TOKENS = 2**17
_MOST_CACHED_TOKENS = 2**21


def gemm_rows(profile: Profile, options: ExportOptions, out: Exported) -> Columns:
    """Linear layers. fp16 rows are exported only with --dtype fp16, labelled bfloat16 (aiconfigurator has no fp16)."""
    table = products(profile, options, out)
    names = dict(_GEMM_DTYPES)
    if options.dtype == "fp16":
        names["fp16"] = "bfloat16"
        out.notes.append("fp16 stands in the tables as bfloat16, aiconfigurator's only 16-bit format")
    known = np.isin(table["dtype"], list(names))
    for dtype in sorted(set(table["dtype"][~known].tolist())):
        hint = " (--dtype fp16 writes it as its bfloat16)" if dtype == "fp16" else ""
        out.leave_out(f"{dtype}: no such matrix product there{hint}", int((table["dtype"] == dtype).sum()))
    table = table.where(known)
    if len(table):
        rows = [(r["m"], r["n"], r["k"], r["latency_us"], r["dtype"], _source(r)) for r in table.rows()]
        rows += known_cliff_rows(profile, table, out)
        if options.fill:
            have = {(m, n, k, dtype) for m, n, k, _, dtype, _ in rows}
            rows += rows_between(profile, table, options.bound, have, out)
    else:
        dtype = dtype_of(profile, options)
        if dtype not in names:
            return _columns([], "gemm", {})
        times = GemmTimes(profile, dtype)
        pairs = [(n, k) for n in SITE_SIZES for k in SITE_SIZES]
        rows = [(*row, dtype, "quantbench_model") for row in model_sites(times, pairs, options.bound)]
        out.notes.append(times.note)
    m, n, k, us, dtypes, sources = zip(*rows, strict=True)
    return {
        "op_name": ["gemm"] * len(rows), "kernel_source": list(sources), "gemm_dtype": [names[d] for d in dtypes],
        "m": list(m), "n": list(n), "k": list(k), "latency": [time / 1e3 for time in us],
    }  # fmt: skip


def _source(row: dict[str, Any]) -> str:
    return str(row["kernel"] or row["provider"])


def context_rows(profile: Profile, options: ExportOptions, out: Exported) -> Columns:
    """Prompts: causal, as many queries as keys."""
    return _attention(profile, options, out, "context_attention")


def generation_rows(profile: Profile, options: ExportOptions, out: Exported) -> Columns:
    """Decoding: one query (seq_q = 1) attends to seq_k keys, of which seq_k - 1 were cached."""
    return _attention(profile, options, Exported.nowhere(), "generation_attention", out.notes)


def _attention(
    profile: Profile, options: ExportOptions, out: Exported, op: str, notes: list[str] | None = None
) -> Columns:
    table = attentions(profile, options, out)
    names = dict(_ATTENTION_DTYPES)
    if options.dtype == "fp16":
        names["fp16"] = "bfloat16"
    decodes = (table["seq_q"] == 1) & ~table["causal"]
    prompts = table["causal"]
    known = np.isin(table["dtype"], list(names))
    out.leave_out("attention of a dtype that aiconfigurator has no name for", int((~known).sum()))
    out.leave_out("attention to several keys that is not causal: no place for it there",
                  int((known & ~decodes & ~prompts).sum()))  # fmt: skip
    wanted = table.where(known & (prompts if op == "context_attention" else decodes))
    if len(wanted):
        return _columns([(*_sizes(row, op), row["latency_us"], row["provider"], row["dtype"]) for row in wanted.rows()],
                        op, names)  # fmt: skip
    dtype = dtype_of(profile, options)
    if dtype not in names:
        return _columns([], op, names)
    works = _model_attention(op, dtype)
    (out.notes if notes is None else notes).append(f"{op.replace('_', ' ')} was not measured: modelled")
    found = attention_us(profile, works)
    rows = [
        (*_sizes({name: getattr(work, name) for name in _SIZES}, op), float(us), "quantbench_model", dtype)
        for work, us in zip(works, found, strict=True)
    ]
    return _columns(rows, op, names)


_SIZES = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim")


def _sizes(row: dict[str, Any], op: str) -> tuple[int, ...]:
    """(batch_size, isl, num_heads, num_key_value_heads, head_dim, step)."""
    isl, step = (row["seq_q"], 0) if op == "context_attention" else (1, row["seq_k"] - 1)
    return row["batch"], isl, row["heads"], row["kv_heads"], row["head_dim"], step


def _columns(rows: list[tuple[Any, ...]], op: str, names: dict[str, str]) -> Columns:
    if not rows:
        return {"latency": []}
    batch, isl, heads, kv_heads, head_dim, step, us, sources, dtypes = (list(v) for v in zip(*rows, strict=True))
    written = [names[dtype] for dtype in dtypes]
    return {
        "op_name": [op] * len(rows), "kernel_source": sources, "batch_size": batch, "isl": isl, "num_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "beam_width": [1] * len(rows), "attn_dtype": written,
        "kv_cache_dtype": written, "step": step, "window_size": [0] * len(rows),
        "latency": [time / 1e3 for time in us],
    }  # fmt: skip


def _model_attention(op: str, dtype: str) -> list[Attention]:
    works = []
    for heads, kv_heads in _MODEL_HEADS:
        for head_dim in _MODEL_HEAD_DIMS:
            for batch in _MODEL_BATCHES:
                for power in _MODEL_SEQS:
                    for seq in (power, power + 1):
                        if op == "context_attention" and batch * seq <= _MOST_MODEL_TOKENS:
                            works.append(Attention(batch, heads, seq, seq, head_dim, kv_heads, dtype))
                        elif op != "context_attention" and batch * seq <= _MOST_CACHED_TOKENS:
                            works.append(Attention(batch, heads, 1, seq, head_dim, kv_heads, dtype, causal=False))
    return works
