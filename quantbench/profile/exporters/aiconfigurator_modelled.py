"""Builds the modelled rows of aiconfigurator's tables, for shapes that were not measured.

GEMMs and latent attention are predicted by the latency models, and collectives from the link rates.
Linear attention and the kernels that scale FP8 inputs are predicted from the memory bandwidth.
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

#: A collective: op, dtype, number of GPUs, number of elements, time in µs, kernel_source.
Message = tuple[str, str, int, int, float, str]
#: Pairs (attn_dtype, kv_cache_dtype) of attention rows. Measured rows have the first pair. Modelled
#: rows have all pairs, except that decoding has no rows with the last pair.
DTYPE_PAIRS = (("bfloat16", "bfloat16"), ("bfloat16", "fp8"), ("fp8", "fp8"))
#: Decoding with an FP8 cache is modelled as bf16 decoding with this fraction of the keys. In public
#: tables, FP8 takes 0.5 to 0.72 of the bf16 time for long contexts, and the whole bf16 time for
#: short contexts.
FP8_KEYS = 0.6
#: kernel_source of modelled rows on both sides of known cliffs.
AT_CLIFF = "quantbench_model_at_cliff"
#: Maps dtypes to aiconfigurator's names where these differ.
NAMES = {"bf16": "bfloat16", "fp16": "bfloat16"}
# Modelled message sizes in bytes.
_MESSAGES = tuple(2**power for power in range(8, 31))
#: All-reduce of each serving engine. An engine has a one-step algorithm, in which every GPU reads
#: the messages of all other GPUs, and a two-step algorithm, reduce-scatter and all-gather. The
#: values are the one-step and the two-step time in µs of an empty message between two GPUs, and the
#: largest one-step rate in GB/s. They come from aiconfigurator's tables of A100, Hopper and
#: Blackwell with NVLink. There, one step takes 2.5 to 5 µs in SGLang and TensorRT-LLM, and 4.4 to
#: 7 µs in vLLM. Two steps take about 8 µs, and about 18 µs in TensorRT-LLM. vLLM's one-step rate is
#: the same on Blackwell's links as on Hopper's.
_ALL_REDUCE = {
    "sglang": (3.5, 8.0, 600.0),
    "trtllm": (4.0, 18.0, 600.0),
    "vllm": (5.0, 8.0, 270.0),
}
#: Extra time in µs for each doubling of the number of GPUs; 0.2 to 0.6 µs in the same tables.
_DOUBLING_US = 0.4
#: Time in µs of a NCCL collective with an empty message.
_NCCL_US = 15.0
#: Fraction of the link's nominal rate that the one-step and the two-step all-reduce reach in these
#: tables, and the largest two-step rate in GB/s. NCCL is assumed to reach the two-step fraction,
#: without an upper limit.
_ONE_STEP_SHARE = 0.6
_TWO_STEPS_SHARE = 0.75
_TWO_STEPS_MOST = 500.0
#: Numbers of GPUs for which collectives are modelled.
_NUM_GPUS = (2, 4, 8, 16)
#: Assumed time in µs of a small kernel without data, such as one that scales an empty tensor.
_SMALL_KERNEL_US = 2.0
#: The time of a linear-attention kernel is given in passes over its data at the nominal memory
#: bandwidth. In aiconfigurator's tables (L40S to GB300), the convolution takes 0.4 to 2.8 passes,
#: and the recurrence of new tokens 1.1 to 1.3 passes. The recurrence of prompts takes 8 to 29
#: passes in SGLang (Triton kernels), and 2 to 4 passes in vLLM (FlashInfer kernels).
_CONVOLUTION_PASSES = 2.0
_NEW_TOKEN_PASSES = 1.2
_PROMPT_PASSES = {"sglang": 15.0, "trtllm": 7.0, "vllm": 3.0}
#: Further times in µs of the recurrence of prompts: per call (17 to 28 in the tables), and per
#: token of one sequence (4 to 31 for 1,024 tokens).
_PROMPT_US = 25.0
_PROMPT_TOKEN_US = 0.02


def perf_row(
    op: str, source: str, us: float, high_over_latency: float | None = None, **sizes: Any
) -> dict[str, Any]:
    """Returns one row of an aiconfigurator table.

    op, source: operation and kernel_source.
    us: time in µs.
    high_over_latency: upper limit of the 90 % interval, divided by the time; None to omit it.
    sizes: further columns.

    aiconfigurator does not read the columns origin and high_over_latency.
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
    """Yields (workload, source, time in µs, high_over_latency) for each workload."""
    spread = high_us / latency_us
    return zip(works, sources, latency_us.tolist(), spread.tolist(), strict=True)


def gemm_rows(
    times: GemmTimes, source: str, m: IntArray, n: int, k: int, latency_us: FloatArray
) -> Rows:
    """Returns modelled rows of one (n, k), with the model's intervals.

    source: kernel_source of the rows.
    m: (rows,), sizes.
    latency_us: (rows,), times in µs.
    """
    rows = []
    dtype = NAMES.get(times.dtype, times.dtype)
    columns = (m.tolist(), latency_us.tolist(), times.spread(m, n, k))
    for size, us, spread in zip(*columns, strict=True):
        rows.append(perf_row("gemm", source, us, spread, gemm_dtype=dtype, m=size, n=n, k=k))
    return rows


def model_rows(times: GemmTimes, pairs: Iterable[tuple[int, int]], measured: Table) -> Rows:
    """Returns modelled rows for each (n, k), at the sizes m of M_GRID and at tile edges.

    So many tile edges (sizes m after which a GEMM needs another row of tiles) are added that linear
    interpolation errs by at most BOUND. Measured sizes are left out, and the modelled times are
    scaled to match the measured rows.

    pairs: pairs (n, k).
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
    """Predicts rows on both sides of known cliffs, where `table` has none.

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

    Only cliffs of the rows' provider, dtype and layout are used. A cliff of a single curve adds its
    two measured workloads. A cliff in m that a family of curves has in common adds its two sizes m
    to every (n, k) whose rows reach from one side of the cliff to the other.

    rows: measured GEMMs of one provider, dtype and layout.
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
    """Returns attention without a window that costs about as much as `work` with the window.

    Attention to at most twice as many keys as the window is returned unchanged. In longer decoding,
    seq_k becomes the window. A longer prompt is cut into causal pieces of two windows each, which
    together have about as many query-key pairs as the windowed prompt.

    window: number of keys that a query sees; 0 for all.
    """
    if not window or work.seq_k <= 2 * window:
        return work
    if work.seq_q == 1:
        return replace(work, seq_k=window)
    pieces = -(-work.seq_k // (2 * window))
    return replace(work, batch=work.batch * pieces, seq_q=2 * window, seq_k=2 * window)


def lanes_of(profile: Profile, prompts: bool) -> tuple[tuple[str, str], ...]:
    """Returns the entries of DTYPE_PAIRS that the device supports, for prompts or for decoding."""
    if profile.device.peak("fp8") is None:
        return DTYPE_PAIRS[:1]
    return DTYPE_PAIRS if prompts else DTYPE_PAIRS[:2]


def message_rows(
    profile: Profile, wanted: Served, measured: list[Message], engine: str = ""
) -> Rows:
    """Returns the rows of NCCL's collectives, or of a serving engine's own all-reduce.

    Message sizes are in elements. If models are named, each op and number of GPUs without measured
    rows gets modelled rows.

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

    For each message, the engine uses the faster one of its one-step and two-step algorithms.
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
    """Returns the bytes that each GPU sends for each message size, (len(_MESSAGES),)."""
    return np.array([float(Collective(op, size, num_gpus).bus_bytes) for size in _MESSAGES])


def scale_rows(profile: Profile, wanted: Served, *, passes: int) -> Rows:
    """Returns the rows of a kernel that scales the inputs of FP8 GEMMs.

    The inputs are 16-bit tensors of m×k elements.

    passes: 1 for the kernel that only reads the input, to find its largest value; 2 for the kernel
        that reads the input and writes the scaled input.
    """
    if profile.device.peak("fp8") is None:
        return []
    bytes_per_us = profile.device.memory_gb_per_s * 1e3
    rows = []
    for k, m in product(sorted({k for _, k in wanted.products}), M_GRID):
        # Each element is read as two bytes. With passes = 2, it is also written as one byte.
        us = _SMALL_KERNEL_US + (1 + passes) * m * k / bytes_per_us
        rows.append(perf_row("scale", MODEL, us, quant_dtype="fp8", m=m, k=k))
    return rows


def linear_rows(profile: Profile, wanted: Served, backend: str) -> Rows:
    """Returns the rows of linear attention's two kernels: the convolution and the recurrence."""
    bytes_per_us = profile.device.memory_gb_per_s * 1e3
    rows: Rows = []
    for one, batch, seq in product(wanted.linear, BATCHES, CACHED):
        tokens = batch * seq
        if tokens > MOST_PROMPT_TOKENS:
            continue
        # The convolution reads and writes two bytes per channel. For a new token, the recurrence
        # reads and writes four bytes per element of its state.
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
    """Returns the rows of latent attention, for prompts or for decoding."""
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
    """Returns the rows of the batched GEMMs before and after absorbed latent attention (decoding).

    The GEMM before attention projects a new token's queries to the width of the latents. The GEMM
    after attention projects the result to the width of the values. The batch is the heads.

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
