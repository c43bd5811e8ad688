"""Builds the tables of an aiconfigurator system that no profile has rows of: messages, scales and
latent attention, from the links, the memory and the models of products and attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantbench.importers.aiconfigurator import COLLECTIVES
from quantbench.latency.attention import AttentionModel
from quantbench.profile.exporters.communication import MESSAGES, all_reduce_us, nccl_us
from quantbench.profile.exporters.modelled import M_GRID, MODEL, GemmTimes
from quantbench.profile.exporters.options import Exported
from quantbench.profile.exporters.rates import link_rates
from quantbench.profile.exporters.served import Served
from quantbench.profile.profile import Profile

Columns = dict[str, list[Any]]
#: op, dtype, GPUs, elements, µs, source
Message = tuple[str, str, int, int, float, str]
#: (attn_dtype, kv_cache_dtype): measured is the first, modelled are all, prompts only in the last.
LANES = (("bfloat16", "bfloat16"), ("bfloat16", "fp8"), ("fp8", "fp8"))
#: an FP8 cache is read as so many of bf16's keys: large contexts take 0.5 to 0.72 of bf16's time in
#: public tables, short ones as long
FP8_KEYS = 0.6
_NUM_GPUS = (2, 4, 8, 16)
_SMALL_KERNEL_US = 2.0


def lanes_of(profile: Profile, prompts: bool) -> tuple[tuple[str, str], ...]:
    """Returns the LANES that the device has."""
    if profile.device.peak("fp8") is None:
        return LANES[:1]
    return LANES if prompts else LANES[:2]


def origins(sources: Sequence[str]) -> list[str]:
    """Returns a mark for each row, in a column that the planner does not read."""
    return ["modelled" if source.startswith(MODEL) else "measured" for source in sources]


def message_rows(
    profile: Profile, wanted: Served, measured: list[Message], *, nccl: bool
) -> Columns:
    """Returns the table of NCCL's collectives, or of the engine's own all-reduce, with message
    sizes in elements: measured, or, for named models, modelled if the op was not measured between
    so many GPUs."""
    rows = [row for row in measured if nccl or row[:2] == ("all_reduce", "half")]
    known = {(row[0], row[2]) for row in rows}
    rates = link_rates(profile, Exported())
    for op in (*COLLECTIVES,) if nccl else ("all_reduce",):
        for num_gpus in _NUM_GPUS if wanted.heads else ():
            if (op, num_gpus) in known:
                continue
            if nccl:
                times_us = nccl_us(COLLECTIVES[op], rates.inside_gb_per_s, num_gpus)
            else:
                times_us = all_reduce_us(rates.inside_gb_per_s, num_gpus)
            rows += [
                (op, "half", num_gpus, size // 2, us, MODEL)
                for size, us in zip(MESSAGES, times_us.tolist(), strict=True)
            ]
    dtype_column = "nccl_dtype" if nccl else "allreduce_dtype"
    return {
        "op_name": [row[0] for row in rows],
        "kernel_source": [row[5] for row in rows],
        "origin": origins([row[5] for row in rows]),
        dtype_column: [row[1] if nccl else "bfloat16" for row in rows],
        "num_gpus": [row[2] for row in rows],
        "message_size": [row[3] for row in rows],
        "latency": [row[4] / 1e3 for row in rows],
    }


def scale_rows(profile: Profile, wanted: Served, *, passes: int) -> Columns:
    """Returns a table of what FP8 products wait for: so many passes over their m×k inputs.

    passes: 1 for the largest value of a tensor, 2 for reading it and writing it scaled.
    """
    bytes_per_us = profile.device.memory_gb_per_s * 1e3
    ks = sorted({k for _, k in wanted.products}) if profile.device.peak("fp8") else []
    sizes = [(m, k) for k in ks for m in M_GRID]
    return {
        "op_name": ["scale"] * len(sizes),
        "kernel_source": [MODEL] * len(sizes),
        "origin": origins([MODEL] * len(sizes)),
        "quant_dtype": ["fp8"] * len(sizes),
        "m": [m for m, _ in sizes],
        "k": [k for _, k in sizes],
        "latency": [
            (_SMALL_KERNEL_US + (1 + passes) * m * k / bytes_per_us) / 1e3 for m, k in sizes
        ],
    }


def latent_rows(profile: Profile, wanted: Served, *, prompts: bool) -> Columns:
    """Returns the table of latent attention of prompts, or of new tokens."""
    heads: list[int] = []
    works: list[Any] = []
    for one in wanted.latent:
        shapes = one.expanded.prompts("bf16") if prompts else one.absorbed.decodes("bf16")
        works += shapes
        heads += [one.heads] * len(shapes)
    if not works:
        return {"latency": []}
    model = profile.models.attention or AttentionModel.best(profile.device)
    ms = (model.predict(works).latency_us / 1e3).tolist()
    lanes = lanes_of(profile, prompts)
    count = len(works) * len(lanes)
    return {
        "op_name": ["mla_context" if prompts else "mla_generation"] * count,
        "kernel_source": [MODEL] * count,
        "origin": origins([MODEL] * count),
        "mla_dtype": [lane[0] for lane in lanes for _ in works],
        "kv_cache_dtype": [lane[1] for lane in lanes for _ in works],
        "num_heads": heads * len(lanes),
        "batch_size": [work.batch for work in works] * len(lanes),
        "isl": [work.seq_q for work in works] * len(lanes),
        "tp_size": [1] * count,
        "step": [work.seq_k - work.seq_q for work in works] * len(lanes),
        "latency": ms * len(lanes),
    }


def absorbing_rows(profile: Profile, wanted: Served, library: str) -> Columns:
    """Returns the table of the products, one a head, that take a new token's queries to the latents
    and the result back."""
    rows = []
    for dtype in ("bf16", "fp8") if wanted.latent else ():
        if profile.device.peak(dtype) is None:
            continue
        times = GemmTimes(profile, dtype, library)
        for one in wanted.latent:
            nope = one.head_dim - one.rope_dim
            for op, n, k in (
                ("mla_gen_pre", one.kv_rank, nope),
                ("mla_gen_post", one.value_dim, one.kv_rank),
            ):
                us = times.latency_us(M_GRID, n, k, batch=one.heads).tolist()
                rows += [(op, dtype, one.heads, m, t) for m, t in zip(M_GRID, us, strict=True)]
    names = {"bf16": "bfloat16", "fp8": "fp8"}
    return {
        "op_name": [row[0] for row in rows],
        "kernel_source": [MODEL] * len(rows),
        "origin": origins([MODEL] * len(rows)),
        "bmm_dtype": [names[row[1]] for row in rows],
        "num_tokens": [row[3] for row in rows],
        "num_heads": [row[2] for row in rows],
        "latency": [row[4] / 1e3 for row in rows],
    }
