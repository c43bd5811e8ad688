"""Builds the rows of an aiconfigurator system that were not measured.

GEMMs and latent attention come from the latency models, messages from the link rates, and scales
from the memory bandwidth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from quantbench.errors import UnsupportedError
from quantbench.importers.aiconfigurator import COLLECTIVES
from quantbench.latency.libraries import library_of
from quantbench.profile.exporters.modelled import M_GRID, MODEL, GemmTimes, attention_model
from quantbench.profile.exporters.options import Exported, Rows
from quantbench.profile.exporters.rates import link_rates
from quantbench.profile.linear_interpolation import BOUND, FloatArray, IntArray
from quantbench.profile.profile import Profile
from quantbench.profile.schema import KnownCliff
from quantbench.profile.table import Table
from quantbench.workload import Attention, Collective, Gemm
from quantbench.workload.serving import BATCHES, CACHED, MOST_PROMPT_TOKENS, Served

#: op, dtype, number of GPUs, number of elements, time in µs, source
Message = tuple[str, str, int, int, float, str]
#: Pairs (attn_dtype, kv_cache_dtype) of attention rows. Measured rows are only of the first pair,
#: and modelled rows of all pairs; decoding has no rows of the last pair.
LANES = (("bfloat16", "bfloat16"), ("bfloat16", "fp8"), ("fp8", "fp8"))
#: Decoding with an FP8 cache is modelled as decoding with this fraction of the keys in bf16. In
#: public tables, long contexts take 0.5 to 0.72 of the time in bf16, and short contexts take as
#: long as in bf16.
FP8_KEYS = 0.6
#: kernel_source of modelled rows on both sides of known cliffs
AT_CLIFF = "quantbench_model_at_cliff"
#: Maps dtypes to aiconfigurator's names where these differ.
NAMES = {"bf16": "bfloat16", "fp16": "bfloat16"}
# Modelled message sizes in bytes.
_MESSAGES = tuple(2**power for power in range(8, 31))
#: All-reduce of each serving engine: times in µs of an empty message between two GPUs in one step
#: (every GPU reads the messages of all others) and in two steps (reduce-scatter and all-gather),
#: and the cap of the rate of one step in GB/s. In aiconfigurator's tables of A100, Hopper and
#: Blackwell with NVLink, one step takes 2.5 to 5 µs by SGLang and TensorRT-LLM and 4.4 to 7 by
#: vLLM, and 0.2 to 0.6 more for each doubling of the GPUs. Two steps take about 8 µs, and about 18
#: by TensorRT-LLM. One step by vLLM is as fast on Blackwell's links as on Hopper's.
_ALL_REDUCE = {
    "sglang": (3.5, 8.0, 600.0),
    "trtllm": (4.0, 18.0, 600.0),
    "vllm": (5.0, 8.0, 270.0),
}
_DOUBLING_US = 0.4
#: time in µs of NCCL's collectives of an empty message
_NCCL_US = 15.0
#: Fraction of a link's stated rate that an all-reduce of one step, and one of two steps, reaches in
#: these tables, and the cap of the rate of two steps in GB/s. NCCL is assumed to reach
#: _TWO_STEPS_SHARE, without a cap.
_ONE_STEP_SHARE = 0.6
_TWO_STEPS_SHARE = 0.75
_TWO_STEPS_MOST = 500.0
#: numbers of GPUs of modelled collectives
_NUM_GPUS = (2, 4, 8, 16)
#: assumed time of a kernel that scales an empty tensor
_SMALL_KERNEL_US = 2.0
#: Time of a kernel of linear attention in a serving engine, in passes over its data at the stated
#: rate of the memory; in aiconfigurator's tables (L40S to GB300) the convolution takes 0.4 to 2.8,
#: the recurrence of new tokens 1.1 to 1.3, and that of prompts 8 to 29 in SGLang, whose kernels are
#: Triton's, and 2 to 4 in vLLM, with FlashInfer's. Recurrences of prompts also take 17 to 28 µs,
#: and 4 to 31 µs for 1,024 tokens of one sequence.
_CONVOLUTION_PASSES = 2.0
_NEW_TOKEN_PASSES = 1.2
_PROMPT_PASSES = {"sglang": 15.0, "trtllm": 7.0, "vllm": 3.0}
_PROMPT_US = 25.0
_PROMPT_TOKEN_US = 0.02


def perf_row(
    op: str, source: str, us: float, high_over_latency: float | None = None, **sizes: Any
) -> dict[str, Any]:
    """Returns a row of a table.

    op, source: operation and kernel_source.
    us: time in µs.
    high_over_latency: upper end of the 90 % interval, divided by the time.
    sizes: further columns.

    The planner does not read the columns origin and high_over_latency.
    """
    row: dict[str, Any] = {"op_name": op, "kernel_source": source, "origin": "measured"}
    if source.startswith(MODEL):
        row["origin"] = "modelled"
    if high_over_latency is not None:
        row["high_over_latency"] = high_over_latency
    return row | sizes | {"latency": us / 1e3}


def timed(
    works: Iterable[Any], sources: Iterable[str], latency_us: FloatArray, high_us: FloatArray
) -> Iterator[tuple[Any, str, float, float]]:
    """Yields each workload with its source, its time in µs and `perf_row`'s high_over_latency."""
    spread = high_us / latency_us
    return zip(works, sources, latency_us.tolist(), spread.tolist(), strict=True)


def gemm_rows(
    times: GemmTimes, source: str, m: IntArray, n: int, k: int, latency_us: FloatArray
) -> Rows:
    """Returns rows of GEMMs that were not measured, with the model's intervals.

    source: kernel_source of the rows.
    m: (rows,), sizes at one (n, k).
    latency_us: (rows,), times in µs.
    """
    rows = []
    dtype = NAMES.get(times.dtype, times.dtype)
    columns = (m.tolist(), latency_us.tolist(), times.spread(m, n, k))
    for size, us, spread in zip(*columns, strict=True):
        rows.append(perf_row("gemm", source, us, spread, gemm_dtype=dtype, m=size, n=n, k=k))
    return rows


def model_rows(times: GemmTimes, pairs: Iterable[tuple[int, int]], measured: Table) -> Rows:
    """Returns modelled rows of each (n, k) at M_GRID and at edges.

    Sizes m at edges are added until linear interpolation is within BOUND. Rows that are in
    `measured` are left out, and the modelled times are scaled to match the measured rows.

    pairs: pairs of (n, k).
    measured: measured GEMMs of the same dtype.
    """
    found: Rows = []
    for n, k in pairs:
        rows = measured.matching(n=n, k=k)
        site = times.site(n, k, np.union1d(M_GRID, rows["m"]).astype(np.int64), rows)
        kept = (site.in_table | site.rows_to_add(BOUND)) & ~np.isin(site.m, rows["m"])
        if kept.any():
            found += gemm_rows(times, times.source, site.m[kept], n, k, site.expected_us[kept])
    return found


def known_cliff_rows(profile: Profile, table: Table, out: Exported) -> Rows:
    """Predicts the rows on both sides of known cliffs that `table` lacks.

    table: measured GEMMs of one provider, dtype and layout.
    """
    dtype = str(table["dtype"][0])
    try:
        times = GemmTimes(profile, dtype, library_of(str(table["provider"][0])))
    except UnsupportedError as error:
        out.notes.append(f"both sides of cliffs that were not measured are left out: {error}")
        return []
    found: Rows = []
    for (n, k), wanted in sorted(_cliff_sides(profile.cliffs, table).items()):
        site = table.matching(n=n, k=k)
        m = np.setdiff1d(list(wanted), site["m"])
        if len(m):
            found += gemm_rows(times, AT_CLIFF, m, n, k, times.through(m, n, k, site))
    if found:
        out.notes.append(
            f"{len(found):,} rows on both sides of known cliffs are modelled "
            f"(kernel_source {AT_CLIFF})"
        )
    return found


def _cliff_sides(cliffs: Sequence[KnownCliff], rows: Table) -> dict[tuple[int, int], set[int]]:
    """Returns the sizes m on both sides of known cliffs, by (n, k).

    Only cliffs of the rows' provider, dtype and layout count. A cliff of a single curve contributes
    its two measured workloads. A cliff along m that is common to a family of curves contributes
    both sides at every (n, k) whose rows lie on both sides.
    """
    measured = defaultdict(list)
    for m, n, k in zip(*(rows[name].tolist() for name in "mnk"), strict=True):
        measured[n, k].append(m)
    variant = f"gemm {rows['dtype'][0]} {rows['layout'][0]}"
    wanted = defaultdict(set)
    for cliff in cliffs:
        if cliff.provider != rows["provider"][0] or cliff.variant != variant:
            continue
        for work in (cliff.before, cliff.after):
            if isinstance(work, Gemm) and work.batch == 1:
                wanted[work.n, work.k].add(work.m)
        if cliff.before is None and cliff.axis == "m":
            for pair, sizes in measured.items():
                if sizes[0] <= cliff.at and cliff.next <= sizes[-1]:
                    wanted[pair] |= {cliff.at, cliff.next}
    return wanted


def seen(work: Attention, window: int) -> Attention:
    """Returns attention without a window that costs about as much as `work` does with one.

    If `work` has at most twice as many keys as the window, it is returned as it is. Otherwise
    decoding sees only the keys of the window, and a prompt is cut into causal pieces as long as two
    windows. All pieces together have about as many query-key pairs as the prompt has with the
    window.

    window: number of keys that a query sees; 0 for all.
    """
    if not window or work.seq_k <= 2 * window:
        return work
    if work.seq_q == 1:
        return replace(work, seq_k=window)
    pieces = -(-work.seq_k // (2 * window))
    return replace(work, batch=work.batch * pieces, seq_q=2 * window, seq_k=2 * window)


def lanes_of(profile: Profile, prompts: bool) -> tuple[tuple[str, str], ...]:
    """Returns the entries of LANES that the device supports, for prompts or for decoding."""
    if profile.device.peak("fp8") is None:
        return LANES[:1]
    return LANES if prompts else LANES[:2]


def message_rows(
    profile: Profile, wanted: Served, measured: list[Message], engine: str = ""
) -> Rows:
    """Returns the table of NCCL's collectives, or of the serving engine's own all-reduce.

    Message sizes are in elements. If models are named, modelled rows are added for each op and
    number of GPUs without measured rows.

    wanted: work of the named models.
    measured: measured collectives.
    engine: serving engine whose all-reduce is returned; "" for NCCL's collectives.
    """
    nccl = not engine
    messages = [one for one in measured if nccl or one[:2] == ("all_reduce", "half")]
    known = {(op, num_gpus) for op, _, num_gpus, *_ in messages}
    link_gb_per_s = link_rates(profile, Exported()).inside_gb_per_s
    for op, num_gpus in product(COLLECTIVES if nccl else ("all_reduce",), _NUM_GPUS):
        if not wanted.heads or (op, num_gpus) in known:
            continue
        if nccl:
            times_us = _nccl_us(COLLECTIVES[op], link_gb_per_s, num_gpus)
        else:
            times_us = _all_reduce_us(link_gb_per_s, num_gpus, engine)
        for size, us in zip(_MESSAGES, times_us.tolist(), strict=True):
            messages.append((op, "half", num_gpus, size // 2, us, MODEL))
    rows = []
    for op, dtype, num_gpus, elements, us, source in messages:
        named: Any = {"nccl_dtype": dtype} if nccl else {"allreduce_dtype": "bfloat16"}
        rows.append(perf_row(op, source, us, **named, num_gpus=num_gpus, message_size=elements))
    return rows


def _all_reduce_us(link_gb_per_s: float, num_gpus: int, engine: str) -> FloatArray:
    """Returns the times of a serving engine's all-reduce in µs, (len(_MESSAGES),).

    The engine uses the faster of the algorithms with one step and with two steps.
    """
    message_bytes = np.array(_MESSAGES, dtype=np.float64)
    one_step_us, two_steps_us, most = _ALL_REDUCE[engine]
    one_step = min(_ONE_STEP_SHARE * link_gb_per_s, most)
    two_steps = min(_TWO_STEPS_SHARE * link_gb_per_s, _TWO_STEPS_MOST)
    read_us = (num_gpus - 1) * message_bytes / (one_step * 1e3)
    shared_us = _bus_bytes("all_reduce", num_gpus) / (two_steps * 1e3)
    more_us = _DOUBLING_US * np.log2(num_gpus / 2)
    return np.asarray(more_us + np.minimum(one_step_us + read_us, two_steps_us + shared_us))


def _nccl_us(op: str, link_gb_per_s: float, num_gpus: int) -> FloatArray:
    """Returns the times of NCCL's collective `op` in µs, (len(_MESSAGES),)."""
    return _NCCL_US + _bus_bytes(op, num_gpus) / (_TWO_STEPS_SHARE * link_gb_per_s * 1e3)


def _bus_bytes(op: str, num_gpus: int) -> FloatArray:
    """Returns the bytes that each GPU sends for each size of _MESSAGES."""
    return np.array([float(Collective(op, size, num_gpus).bus_bytes) for size in _MESSAGES])


def scale_rows(profile: Profile, wanted: Served, *, passes: int) -> Rows:
    """Returns a table of the kernels that scale the inputs of FP8 GEMMs.

    The inputs are 16-bit tensors of m×k elements.

    passes: 1 for the kernel that finds the largest value of the input, 2 for the kernel that reads
        the input and writes it scaled.
    """
    if profile.device.peak("fp8") is None:
        return []
    bytes_per_us = profile.device.memory_gb_per_s * 1e3
    rows = []
    for k, m in product(sorted({k for _, k in wanted.products}), M_GRID):
        # Two bytes are read per element, and with two passes one byte is written.
        us = _SMALL_KERNEL_US + (1 + passes) * m * k / bytes_per_us
        rows.append(perf_row("scale", MODEL, us, quant_dtype="fp8", m=m, k=k))
    return rows


def linear_rows(profile: Profile, wanted: Served, backend: str) -> Rows:
    """Returns the table of the convolution and the recurrence of linear attention."""
    bytes_per_us = profile.device.memory_gb_per_s * 1e3
    rows: Rows = []
    for one, batch, seq in product(wanted.linear, BATCHES, CACHED):
        tokens = batch * seq
        if tokens > MOST_PROMPT_TOKENS:
            continue
        # Two bytes per channel are read and written, and so are four of each new token's state.
        convolved_us = 4 * tokens * one.channels / bytes_per_us
        values_us = 4 * tokens * one.values / bytes_per_us
        convolution_us = _SMALL_KERNEL_US + _CONVOLUTION_PASSES * convolved_us
        times_us = {
            ("context", "causal_conv1d_fn"): convolution_us,
            ("context", "chunk_gated_delta_rule"): (
                _PROMPT_US + _PROMPT_TOKEN_US * seq + _PROMPT_PASSES[backend] * values_us
            ),
        }
        if seq == 1:
            states_us = 2 * one.key_dim * values_us
            times_us |= {
                ("generation", "causal_conv1d_update"): convolution_us,
                ("generation", "fused_sigmoid_gating_delta_rule_update"): (
                    2 * _SMALL_KERNEL_US + _NEW_TOKEN_PASSES * states_us
                ),
            }
        for (phase, kernel), us in times_us.items():
            row = perf_row(
                "gdn",
                kernel,
                us,
                phase=phase,
                batch_size=batch,
                seq_len=seq,
                num_tokens=tokens,
                d_model=one.hidden,
                d_conv=one.conv_width,
                num_k_heads=one.key_heads,
                head_k_dim=one.key_dim,
                num_v_heads=one.value_heads,
                head_v_dim=one.value_dim,
            )
            rows.append(row | {"origin": "modelled"})
    return rows


def latent_rows(profile: Profile, wanted: Served, *, prompts: bool) -> Rows:
    """Returns the table of latent attention of prompts, or of the decoding of new tokens."""
    heads: list[int] = []
    works: list[Any] = []
    for one in wanted.latent:
        shapes = one.expanded.prompts("bf16") if prompts else one.absorbed.decodes("bf16")
        works += shapes
        heads += [one.heads] * len(shapes)
    if not works:
        return []
    times_us = attention_model(profile).predict(works).latency_us.tolist()
    rows = []
    for lane in lanes_of(profile, prompts):
        for num_heads, work, us in zip(heads, works, times_us, strict=True):
            sizes = {
                "mla_dtype": lane[0],
                "kv_cache_dtype": lane[1],
                "num_heads": num_heads,
                "batch_size": work.batch,
                "isl": work.seq_q,
                "tp_size": 1,
                "step": work.seq_k - work.seq_q,
            }
            op = "mla_context" if prompts else "mla_generation"
            rows.append(perf_row(op, MODEL, us, **sizes))
    return rows


def absorbing_rows(profile: Profile, wanted: Served, library: str) -> Rows:
    """Returns the table of the batched GEMMs that surround absorbed latent attention.

    One GEMM per head takes a new token's queries to the latents, and another takes the result back.

    library: library whose GEMMs are preferred; "" for any.
    """
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
                times_us = times.latency_us(M_GRID, n, k, batch=one.heads).tolist()
                for m, us in zip(M_GRID, times_us, strict=True):
                    sizes = {"num_tokens": m, "num_heads": one.heads}
                    bmm_dtype = NAMES.get(dtype, dtype)
                    rows.append(perf_row(op, MODEL, us, bmm_dtype=bmm_dtype, **sizes))
    return rows
