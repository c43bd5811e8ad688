"""Exports a profile as a systems folder for aiconfigurator, with YAML files and Parquet tables.

aiconfigurator-core 0.12.0 reads the folder by `perf_database.get_database` with `systems_paths`.
Times are in milliseconds. aiconfigurator interpolates linearly in m, so modelled rows are added on
both sides of cliffs (jumps of the time between neighbouring sizes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.importers.aiconfigurator import COLLECTIVES, TABLES
from quantbench.latency.libraries import system_of
from quantbench.profile.exporters.aiconfigurator_modelled import (
    DTYPE_PAIRS,
    FP8_KEYS,
    NAMES,
    Message,
    absorbing_rows,
    known_cliff_rows,
    lanes_of,
    latent_rows,
    linear_rows,
    message_rows,
    model_rows,
    perf_row,
    scale_rows,
    seen,
    timed,
)
from quantbench.profile.exporters.modelled import (
    MODEL,
    MODEL_SITES,
    GemmTimes,
    accuracy_words,
    attention_model,
)
from quantbench.profile.exporters.options import (
    WHO,
    Exported,
    ExportOptions,
    Rows,
    collectives,
    forward_attention,
    keep,
    linear_layers,
    of_provider,
    require_gpu,
)
from quantbench.profile.exporters.rates import achieved, link_rates
from quantbench.profile.file import parquet_bytes
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload import Attention
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.serving import MODEL_HEADS, Served, served

_BACKENDS = ("vllm", "sglang", "trtllm")
_INSTALL = "pip install -e '.[tables]' in quantbench's checkout"
#: Version under which the NCCL table is stored. It is not a release of NCCL.
_NCCL_VERSION = "quantbench"
#: Maps a dtype to its name in aiconfigurator's NCCL table.
_NCCL_DTYPES = {"bf16": "half", "fp16": "half", "int8": "int8", "fp8": "fp8"}
#: Dtypes of GEMMs that aiconfigurator-core 0.12.0 has (common.GEMMQuantMode).
PRODUCT_DTYPES = ("bf16", "fp8", "fp8_block", "nvfp4")
#: Maps a dtype to aiconfigurator's name for experts in this dtype (common.MoEQuantMode).
_MOE_DTYPES = {
    "bf16": "bfloat16",
    "mxfp4": "w4a8_mxfp4_mxfp8",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
}
#: Provider of TensorRT-LLM's NVFP4 experts for few tokens. aiconfigurator looks up their rows by
#: the part of this name after the dot, as kernel_source.
FEW_TOKENS = "trtllm.moe_torch_flow_min_latency"
#: Maps the size columns of aiconfigurator's table of experts to the fields of `MoE`.
_MOE_SIZES = {
    "num_tokens": "tokens",
    "hidden_size": "hidden",
    "inter_size": "expert_ffn",
    "topk": "top_k",
    "num_experts": "num_experts",
    "moe_tp_size": "tp",
    "moe_ep_size": "ep",
    "distribution": "distribution",
}
#: Maps a dtype to the name of its peak in the YAML file.
_PEAKS = {
    "bf16": "bfloat16_tc_flops",
    "int8": "int8_tc_flops",
    "fp8": "fp8_tc_flops",
    "nvfp4": "fp4_tc_flops",
    "fp16": "bfloat16_tc_flops",  # aiconfigurator's only 16-bit peak, if the device has no bf16
}
#: Latency of a small operation, and memory that is not used for weights and caches (for NCCL, by
#: number of GPUs). The values are not measured. They are copied from aiconfigurator-core 0.12.0's
#: own a100_sxm.yaml.
_CONSTANT_LATENCY_S = 3e-6
_OTHER_MEMORY_BYTES = 3_758_096_384
_NCCL_MEMORY_BYTES = {1: 0, 2: 358_612_992, 4: 411_041_792, 8: 411_041_792, 16: 411_041_792}
#: Maps each of aiconfigurator's tables that quantbench does not import to its folder.
_FAMILIES = {
    "custom_allreduce": "comm",
    "computescale": "quantize",
    "scale_matrix": "quantize",
    "context_mla": "mla",
    "generation_mla": "mla",
    "mla_bmm": "mla_bmm",
    "gdn": "linear_attention",
}


def export(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes `<system>.yaml`, and the tables below `data/<system>/`.

    Raises InputError if no row can be exported, or if no GEMM can be although models are named.
    """
    require_gpu(profile, "aiconfigurator")
    require_choice(WHO, "--backend", options.backend, _BACKENDS)
    system = system_of(profile.device.name).replace("-", "_")
    wanted = served(WHO, options.model, options.configs, options.tensor_parallel)
    messages = _measured_collectives(profile, out)
    tables = {
        "gemm": _gemm_rows(profile, options, wanted, out),
        "context_attention": _attention_rows(profile, options, wanted, out, prompts=True),
        "generation_attention": _attention_rows(profile, options, wanted, out, prompts=False),
        "moe": _moe_rows(profile, options, wanted, out),
        "nccl": message_rows(profile, wanted, messages),
        "custom_allreduce": message_rows(profile, wanted, messages, options.backend),
        "computescale": scale_rows(profile, wanted, passes=1),
        "scale_matrix": scale_rows(profile, wanted, passes=2),
        "context_mla": latent_rows(profile, wanted, prompts=True),
        "generation_mla": latent_rows(profile, wanted, prompts=False),
        "gdn": linear_rows(profile, wanted, options.backend),
        "mla_bmm": absorbing_rows(profile, wanted, options.kernels),
    }
    tables = {kind: rows for kind, rows in tables.items() if rows}
    unjudged = []
    for kind in ("nccl", *_FAMILIES):
        if any(row["origin"] == "modelled" for row in tables.get(kind, ())):
            unjudged.append(kind)
    if unjudged:
        how = "modelled from stated rates or from models of other ops; errors not known"
        out.notes.append(f"{', '.join(unjudged)}: {how}")
    if not tables or (wanted.heads and "gemm" not in tables):
        reasons = "; ".join(out.left_out) or "no rows"
        raise InputError(
            WHO, f"nothing that it has a table for ({reasons})", "bf16 or fp8, or --dtype fp16"
        )
    out.leave_out("softmax: no place for it there", len(profile.tables["softmax"]))
    out.write(
        _yaml(_description(profile, options, system, out, nccl="nccl" in tables)), f"{system}.yaml"
    )
    stems: dict[tuple[str, str, str], list[str]] = {}
    for kind, rows in tables.items():
        out.rows[kind] = len(rows)
        framework = options.backend
        version = options.version
        if kind == "nccl":
            framework = "nccl"
            version = _NCCL_VERSION
        folder = (_FAMILIES.get(kind) or TABLES[kind].family, framework, version)
        stem = f"{kind}_perf"
        stems.setdefault(folder, []).append(stem)
        common = {"framework": options.backend, "version": version, "device": profile.device.name}
        content = parquet_bytes([common | row for row in rows])
        out.write(content, "data", system, *folder, f"{stem}.parquet")
    for folder, names in stems.items():
        # Without this file the loader warns, or fails in strict mode. "legacy" marks tables that
        # were not made by aiconfigurator's own collector.
        data = {
            "schema_version": 1,
            "provenance": "legacy",
            "runtime": {"framework": folder[1], "version": folder[2]},
            "tables": {stem: {"status": "complete"} for stem in names},
        }
        out.write(_yaml(data), "data", system, *folder, "collection_meta.yaml")
    out.use.append(
        f'perf_database.get_database("{system}", "{options.backend}", "{options.version}", '
        f'systems_paths="{out.folder}", shared_layer=False)'
    )


def _gemm_rows(profile: Profile, options: ExportOptions, wanted: Served, out: Exported) -> Rows:
    """Returns the rows of the GEMM table, for dtypes with measured rows or a peak on the device.

    fp16 is exported only with --dtype fp16. It is then labelled bfloat16, because aiconfigurator
    has no fp16.
    """
    names = list(PRODUCT_DTYPES)
    if options.dtype == "fp16":
        names.append("fp16")
        out.notes.append(
            "fp16 stands in the tables as bfloat16, aiconfigurator's only 16-bit format"
        )
    table = profile.tables["gemm"]
    measured = set(table["dtype"].tolist())
    for dtype in sorted(measured - set(names)):
        hint = " (--dtype fp16 writes it as its bfloat16)" if dtype == "fp16" else ""
        others = table["dtype"] != dtype
        keep(table, others, f"{dtype}: no such matrix product there{hint}", out)
    found: Rows = []
    for dtype in [options.dtype] if options.dtype else PRODUCT_DTYPES:
        if dtype in measured or profile.device.peak(dtype) is not None:
            of_dtype = table.matching(dtype=dtype)
            rows = linear_layers(of_dtype, options, out, options.backend)
            if dtype in names:
                found += _rows_of_dtype(profile, options, wanted, dtype, rows, out)
    return found


def _rows_of_dtype(
    profile: Profile,
    options: ExportOptions,
    wanted: Served,
    dtype: str,
    measured: Table,
    out: Exported,
) -> Rows:
    """Returns the GEMM rows of one dtype: measured rows first, then modelled rows.

    If models are named, modelled rows are added at the models' (n, k). Otherwise, modelled rows are
    added on both sides of known cliffs. A profile without any GEMM gets modelled rows at
    MODEL_SITES.

    measured: measured GEMMs of the dtype, of one provider and layout.
    """
    rows = []
    for row in measured.rows():
        us = row["latency_us"]
        sizes = {"gemm_dtype": NAMES.get(dtype, dtype), "m": row["m"], "n": row["n"], "k": row["k"]}
        source = row["kernel"] or row["provider"]
        rows.append(perf_row("gemm", source, us, row["high_us"] / us, **sizes))
    asked = bool(options.model or options.configs)
    if rows and not asked:
        return rows + known_cliff_rows(profile, measured, out)
    if len(profile.tables["gemm"]) and not asked:
        return []
    times = GemmTimes(profile, dtype, options.kernels)
    out.notes.append(times.note)
    return rows + model_rows(times, wanted.products if asked else MODEL_SITES, measured)


def _attention_rows(
    profile: Profile, options: ExportOptions, wanted: Served, out: Exported, *, prompts: bool
) -> Rows:
    """Returns the rows of one attention table: measured rows first, then modelled rows.

    Modelled rows are added for the shapes of the named models, in each pair of dtypes (DTYPE_PAIRS)
    that the device supports. A shape that was measured gets no modelled row in the first pair. If
    nothing was measured and no model is named, the modelled heads are MODEL_HEADS.

    prompts: True for causal prompts with equal numbers of queries and keys. False for decoding,
        where one query (seq_q = 1) attends to seq_k keys, of which seq_k - 1 were cached.
    """
    op = "context_attention" if prompts else "generation_attention"
    table = _measured_attention(profile, options, out, prompts)
    rows = [_attention_row(op, *one) for one in _timed_rows(table)]
    measured = set(table.workloads())
    heads = wanted.heads
    if not rows and not heads:
        heads = MODEL_HEADS
    dtype = "fp16" if options.dtype == "fp16" else "bf16"
    shapes: list[tuple[Attention, int]] = []
    if profile.device.peak(dtype) is not None:
        for one in heads:
            of_heads = one.prompts(dtype) if prompts else one.decodes(dtype)
            shapes += [(work, one.window) for work in of_heads]
    if shapes:
        held_out = "held_out" if prompts else "held_out_decode"
        accuracy = accuracy_words(attention_model(profile).provenance, held_out)
        out.notes.append(
            f"{op.replace('_', ' ')} that was not measured is modelled{accuracy} with 16-bit caches"
        )
    within = [seen(*shape) for shape in shapes]
    for lane in lanes_of(profile, prompts) if shapes else ():
        if lane[1] == "fp8" and not prompts:
            within = [replace(one, seq_k=max(1, int(FP8_KEYS * one.seq_k))) for one in within]
        found = attention_model(profile).predict(within, cache_write=prompts)
        sources = [MODEL] * len(shapes)
        for shape, source, us, spread in timed(shapes, sources, found.latency_us, found.high_us):
            work, window = shape
            if window or lane != DTYPE_PAIRS[0] or work not in measured:
                rows.append(_attention_row(op, work, source, us, spread, window, lane))
    return _of_one_kernel(rows)


def _attention_row(
    op: str,
    work: Any,
    source: str,
    us: float,
    spread: float,
    window: int = 0,
    lane: tuple[str, str] = DTYPE_PAIRS[0],
) -> dict[str, Any]:
    """Returns one row of an attention table.

    op, source: operation and kernel_source.
    work: shape of the attention. Its number of cached tokens, seq_k - seq_q, is the column `step`.
    us: time in µs.
    spread: upper limit of the 90 % interval, divided by the time.
    window: number of keys that a query sees; 0 for all.
    lane: pair of dtypes, one of DTYPE_PAIRS.
    """
    return perf_row(
        op,
        source,
        us,
        spread,
        batch_size=work.batch,
        isl=work.seq_q,
        num_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        head_dim=work.head_dim,
        beam_width=1,
        attn_dtype=lane[0],
        kv_cache_dtype=lane[1],
        step=work.seq_k - work.seq_q,
        window_size=window,
    )


def _measured_attention(
    profile: Profile, options: ExportOptions, out: Exported, prompts: bool
) -> Table:
    """Returns one provider's measured attention of prompts, or of decoding."""
    # The tables of prompts and of decoding omit the same rows, so they are counted only once.
    selected = out if prompts else Exported()
    table = forward_attention(profile, options, selected)
    names = ["bf16", options.dtype if options.dtype == "fp16" else ""]
    named = np.isin(table["dtype"], names)
    what = "attention of a dtype that aiconfigurator has no name for"
    table = keep(table, named, what, selected)
    one_query = (table["seq_q"] == 1) | table["causal"]
    what = "attention to several keys that is not causal: no place for it there"
    table = keep(table, one_query, what, selected).matching(causal=prompts)
    return of_provider(table, options.provider, out, options.backend)


def _timed_rows(table: Table) -> Iterator[tuple[Any, str, float, float]]:
    """Yields a measured table's rows in the form of `timed`."""
    return timed(
        table.workloads(), table["provider"].tolist(), table["latency_us"], table["high_us"]
    )


def _of_one_kernel(rows: Rows) -> Rows:
    """Gives all rows the first row's kernel_source.

    aiconfigurator's engine uses only the rows of a single kernel.
    """
    return [row | {"kernel_source": rows[0]["kernel_source"]} for row in rows]


def _moe_rows(profile: Profile, options: ExportOptions, wanted: Served, out: Exported) -> Rows:
    """Returns the rows of the table of experts (MoE layers).

    Rows by FEW_TOKENS keep their own kernel_source, under which aiconfigurator looks for them.
    """
    table = profile.tables["moe"]
    named = np.isin(table["dtype"], list(_MOE_DTYPES))
    table = keep(table, named, "experts of a dtype that aiconfigurator has no name for", out)
    few_tokens = table["provider"] == FEW_TOKENS
    rows = _layer_rows(profile, wanted, table.where(~few_tokens), options.kernels, out)
    rows = _of_one_kernel(rows)
    if few_tokens.any():
        for row in _layer_rows(profile, wanted, table.where(few_tokens), FEW_TOKENS, out):
            rows.append(row | {"kernel_source": FEW_TOKENS.partition(".")[2]})
    return rows


def _layer_rows(
    profile: Profile, wanted: Served, table: Table, library: str, out: Exported
) -> Rows:
    """Returns rows of experts: the measured layers, then the named models' other layers, modelled.

    The layers are modelled in every dtype that has a peak on the device. For FEW_TOKENS, they are
    modelled only in the dtypes that were measured.

    table: measured layers.
    library: library or provider whose model predicts the layers.
    """

    def row(layer: Any, source: str, us: float, spread: float) -> dict[str, Any]:
        sizes = {theirs: getattr(layer, ours) for theirs, ours in _MOE_SIZES.items()}
        return perf_row("moe", source, us, spread, moe_dtype=_MOE_DTYPES[layer.dtype], **sizes)

    rows = [row(*one) for one in _timed_rows(table)]
    measured = set(table.workloads())
    dtypes = sorted(set(table["dtype"].tolist()))
    if library != FEW_TOKENS:
        dtypes = [dtype for dtype in _MOE_DTYPES if profile.device.peak(dtype) is not None]
    for dtype in dtypes if wanted.experts else ():
        layers = [replace(layer, dtype=dtype) for layer in wanted.experts]
        layers = [layer for layer in layers if layer not in measured]
        model = profile.experts(dtype, library)
        out.notes.append(f"{dtype} {model.note}{accuracy_words(model.provenance)}")
        found = model.predict(layers)
        sources = [MODEL] * len(layers)
        rows += [row(*one) for one in timed(layers, sources, found.latency_us, found.high_us)]
    return rows


def _measured_collectives(profile: Profile, out: Exported) -> list[Message]:
    """Returns the measured collectives within a node. `out` counts the rows that are left out."""
    table = collectives(profile, out)
    names = {ours: theirs for theirs, ours in COLLECTIVES.items()}
    inside = table["num_nodes"] == 1
    table = keep(table, inside, "a collective between nodes: no place for it there", out)
    named = np.isin(table["op"], list(names)) & np.isin(table["dtype"], list(_NCCL_DTYPES))
    what = "a collective or dtype that aiconfigurator has no name for"
    table = keep(table, named, what, out)
    found: dict[tuple[Any, ...], Message] = {}
    for row in table.rows():
        elements = row["message_bytes"] // DTYPES[row["dtype"]].element_bytes
        key = (names[row["op"]], _NCCL_DTYPES[row["dtype"]], row["num_gpus"], elements)
        if key in found:  # aiconfigurator calls both bf16 and fp16 "half"
            out.leave_out("the same bytes in another dtype of the same width", 1)
        else:
            found[key] = (*key, row["latency_us"], "NCCL")
    return list(found.values())


def _description(
    profile: Profile, options: ExportOptions, system: str, out: Exported, *, nccl: bool
) -> dict[str, Any]:
    """Returns the content of the system's YAML file: rates, peaks and memory sizes.

    nccl: whether the system has a table of NCCL's collectives.
    """
    device = profile.device
    links = link_rates(profile, out)
    reached = achieved(profile, options, Exported())
    major, minor = device.compute_capability or (0, 0)
    peaks: dict[str, int] = {}
    for dtype, key in _PEAKS.items():
        peak = device.peak(dtype)
        if peak is not None and key not in peaks:
            peaks[key] = int(peak * 1e12)
    return {
        "data_dir": f"data/{system}",
        "gpu": {
            "mem_bw": int(device.memory_gb_per_s * 1e9),
            "mem_bw_empirical_scaling_factor": reached.gb_per_s / device.memory_gb_per_s,
            "mem_empirical_constant_latency": _CONSTANT_LATENCY_S,
            "mem_capacity": device.memory_bytes,
            **peaks,
            "sm_version": 10 * major + minor,
        },
        "node": {
            "num_gpus_per_node": links.gpus_per_node,
            "inter_node_bw": int(links.between_gb_per_s * 1e9),
            "intra_node_bw": int(links.inside_gb_per_s * 1e9),
            "pcie_bw": int(links.host_gb_per_s * 1e9),
            "p2p_latency": links.inside_latency_s,
        },
        "misc": {
            "nccl_mem": _NCCL_MEMORY_BYTES,
            "other_mem": _OTHER_MEMORY_BYTES,
            **({"nccl_version": _NCCL_VERSION} if nccl else {}),
        },
    }


def _yaml(data: dict[str, Any]) -> str:
    try:
        import yaml
    except ImportError:
        raise UnsupportedError(WHO, "PyYAML is not installed", _INSTALL) from None
    text: str = yaml.safe_dump(data, sort_keys=False)
    return text
