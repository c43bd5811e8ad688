"""Exports an aiconfigurator systems folder: YAML files, and Parquet tables of GEMMs, attention,
experts and NCCL. Layout and columns are those of aiconfigurator-core 0.12.0
(`perf_database.get_database` with `systems_paths`); times are in milliseconds. aiconfigurator
interpolates linearly in m, so modelled rows are added on both sides of cliffs."""

from __future__ import annotations

from typing import Any

import numpy as np

from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.importers.aiconfigurator import COLLECTIVES, TABLES
from quantbench.latency.libraries import system_of
from quantbench.profile.exporters.modelled import (
    GemmRow,
    GemmTimes,
    attention_times,
    known_cliff_rows,
    model_rows,
)
from quantbench.profile.exporters.options import (
    WHO,
    Exported,
    ExportOptions,
    attentions,
    collectives,
    dtype_of,
    products,
    require_gpu,
)
from quantbench.profile.exporters.rates import achieved, link_rates
from quantbench.profile.file import parquet_bytes
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload import Attention
from quantbench.workload.dtypes import DTYPES

Columns = dict[str, list[Any]]

_BACKENDS = ("vllm", "sglang", "trtllm")
_INSTALL = "pip install 'quantbench[tables]'"
#: the version under which the NCCL table is stored; not a release of NCCL
_NCCL_VERSION = "quantbench"
_NCCL_DTYPES = {"bf16": "half", "fp16": "half", "int8": "int8", "fp8": "fp8"}
#: aiconfigurator's names of dtypes: common.GEMMQuantMode and common.FMHAQuantMode of
#: aiconfigurator-core 0.12.0
_GEMM_DTYPES = {"bf16": "bfloat16", "fp8": "fp8"}
#: common.MoEQuantMode
_MOE_DTYPES = {"bf16": "bfloat16", "mxfp4": "w4a8_mxfp4_mxfp8"} | {
    name: name for name in ("fp8", "fp8_block", "nvfp4")
}
_ATTENTION_DTYPES = {"bf16": "bfloat16"}
#: dtype → name of its peak in the YAML file
_PEAKS = {"bf16": "bfloat16_tc_flops", "int8": "int8_tc_flops", "fp8": "fp8_tc_flops"}
#: latency of a small operation, and memory not used for weights and caches: not measured, copied
#: from aiconfigurator's own YAML files (aiconfigurator-core 0.12.0, a100_sxm.yaml)
_CONSTANT_LATENCY_S = 3e-6
_OTHER_MEMORY_BYTES = 3_758_096_384

_MODEL_HEADS = ((8, 1), (8, 8), (16, 2), (16, 16), (32, 4), (32, 8), (32, 32), (64, 8), (64, 64))
_MODEL_BATCHES = tuple(2**power for power in range(9))
_MODEL_HEAD_DIMS = (64, 128)
#: modelled prompt and context lengths: powers of two and one more, because attention is tiled
_MODEL_SEQS = tuple(seq for power in range(4, 18) for seq in (2**power, 2**power + 1))
_MOST_MODEL_TOKENS = 2**17
_MOST_CACHED_TOKENS = 2**21


def export(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes `<system>.yaml` and the tables below `data/<system>/`."""
    require_gpu(profile, "aiconfigurator")
    require_choice(WHO, "--backend", options.backend, _BACKENDS)
    system = system_of(profile.device.name).replace("-", "_")
    tables: dict[str, Columns] = {
        "gemm": _gemm_rows(profile, options, out),
        "context_attention": _attention_rows(profile, options, out, "context_attention"),
        "generation_attention": _attention_rows(profile, options, out, "generation_attention"),
        "moe": _moe_rows(profile.tables["moe"], out),
        "nccl": _nccl_rows(profile, out),
    }
    tables = {kind: columns for kind, columns in tables.items() if columns["latency"]}
    if not tables:
        reasons = "; ".join(out.left_out) or "no rows"
        raise InputError(
            WHO, f"nothing that it has a table for ({reasons})", "bf16 or fp8, or --dtype fp16"
        )
    out.leave_out("softmax: no place for it there", len(profile.tables["softmax"]))
    out.write(
        _yaml(_description(profile, options, system, out, nccl="nccl" in tables)), f"{system}.yaml"
    )
    stems: dict[tuple[str, str, str], list[str]] = {}
    for kind, columns in tables.items():
        out.rows[kind] = count = len(columns["latency"])
        framework, version = (
            ("nccl", _NCCL_VERSION) if kind == "nccl" else (options.backend, options.version)
        )
        folder = (TABLES[kind].family, framework, version)
        stems.setdefault(folder, []).append(TABLES[kind].stem)
        common = {"framework": options.backend, "version": version, "device": profile.device.name}
        content = parquet_bytes(
            {**{name: [value] * count for name, value in common.items()}, **columns}
        )
        out.write(content, "data", system, *folder, f"{TABLES[kind].stem}.parquet")
    for folder, names in stems.items():
        # Without this file the loader warns, or fails in strict mode. "legacy" marks tables that
        # aiconfigurator's own collector did not make.
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


def _gemm_rows(profile: Profile, options: ExportOptions, out: Exported) -> Columns:
    """Returns the GEMM table. fp16 is exported only with --dtype fp16, as bfloat16 (aiconfigurator
    has no fp16).
    """
    table = products(profile, options, out)
    names = dict(_GEMM_DTYPES)
    if options.dtype == "fp16":
        names["fp16"] = "bfloat16"
        out.notes.append(
            "fp16 stands in the tables as bfloat16, aiconfigurator's only 16-bit format"
        )
    named = np.isin(table["dtype"], list(names))
    for dtype in sorted(set(table["dtype"][~named].tolist())):
        hint = " (--dtype fp16 writes it as its bfloat16)" if dtype == "fp16" else ""
        out.leave_out(
            f"{dtype}: no such matrix product there{hint}", int((table["dtype"] == dtype).sum())
        )
    table = table.where(named)
    rows: list[GemmRow]
    if len(table):
        rows = [
            (
                row["m"],
                row["n"],
                row["k"],
                row["latency_us"],
                row["dtype"],
                row["kernel"] or row["provider"],
            )
            for row in table.rows()
        ]
        rows += known_cliff_rows(profile, table, out)
    else:
        dtype = dtype_of(profile, options)
        if dtype not in names:
            return {"latency": []}
        times = GemmTimes(profile, dtype)
        rows = model_rows(times, dtype)
        out.notes.append(times.note)
    m, n, k, us, dtypes, sources = zip(*rows, strict=True)
    return {
        "op_name": ["gemm"] * len(rows),
        "kernel_source": list(sources),
        "gemm_dtype": [names[d] for d in dtypes],
        "m": list(m),
        "n": list(n),
        "k": list(k),
        "latency": [time / 1e3 for time in us],
    }


def _attention_rows(profile: Profile, options: ExportOptions, out: Exported, op: str) -> Columns:
    """Returns an attention table. context_attention: causal prompts with as many queries as keys.
    generation_attention: decoding; one query (seq_q = 1) attends to seq_k keys, of which seq_k - 1
        were cached."""
    prompts = op == "context_attention"
    # Both tables omit the same rows: count them only once.
    table = attentions(profile, options, selected := out if prompts else Exported())
    names = {**_ATTENTION_DTYPES, **({"fp16": "bfloat16"} if options.dtype == "fp16" else {})}
    decodes = (table["seq_q"] == 1) & ~table["causal"]
    named = np.isin(table["dtype"], list(names))
    selected.leave_out(
        "attention of a dtype that aiconfigurator has no name for", int((~named).sum())
    )
    several = int((named & ~decodes & ~table["causal"]).sum())
    selected.leave_out(
        "attention to several keys that is not causal: no place for it there", several
    )
    table = table.where(named & (table["causal"] if prompts else decodes))
    dtype = dtype_of(profile, options)
    if not len(table):
        if dtype not in names:
            return {"latency": []}
        out.notes.append(f"{op.replace('_', ' ')} was not measured: modelled")
    works, times_us, sources = attention_times(
        profile, table, _model_attention(dtype, prompts=prompts)
    )
    count, dtypes = len(works), [names[work.dtype] for work in works]
    return {
        "op_name": [op] * count,
        "kernel_source": sources,
        "batch_size": [work.batch for work in works],
        "isl": [work.seq_q for work in works],
        "num_heads": [work.heads for work in works],
        "num_key_value_heads": [work.kv_heads for work in works],
        "head_dim": [work.head_dim for work in works],
        "beam_width": [1] * count,
        "attn_dtype": dtypes,
        "kv_cache_dtype": dtypes,
        "step": [0 if prompts else work.seq_k - 1 for work in works],
        "window_size": [0] * count,
        "latency": [us / 1e3 for us in times_us],
    }


def _model_attention(dtype: str, *, prompts: bool) -> list[Attention]:
    most_tokens = _MOST_MODEL_TOKENS if prompts else _MOST_CACHED_TOKENS
    return [
        Attention(
            batch, heads, seq if prompts else 1, seq, head_dim, kv_heads, dtype, causal=prompts
        )
        for heads, kv_heads in _MODEL_HEADS
        for head_dim in _MODEL_HEAD_DIMS
        for batch in _MODEL_BATCHES
        for seq in _MODEL_SEQS
        if batch * seq <= most_tokens
    ]


def _moe_rows(table: Table, out: Exported) -> Columns:
    named = np.isin(table["dtype"], list(_MOE_DTYPES))
    out.leave_out("experts of a dtype that aiconfigurator has no name for", int((~named).sum()))
    rows = table.where(named)
    names = {
        "num_tokens": "tokens",
        "hidden_size": "hidden",
        "inter_size": "expert_ffn",
        "topk": "top_k",
        "num_experts": "num_experts",
        "moe_tp_size": "tp",
        "moe_ep_size": "ep",
        "distribution": "distribution",
    }
    return {
        "op_name": ["moe"] * len(rows),
        "kernel_source": rows["provider"].tolist(),
        "moe_dtype": [_MOE_DTYPES[dtype] for dtype in rows["dtype"].tolist()],
        **{theirs: rows[ours].tolist() for theirs, ours in names.items()},
        "latency": (rows["latency_us"] / 1e3).tolist(),
    }


def _nccl_rows(profile: Profile, out: Exported) -> Columns:
    """Returns the NCCL table: collectives within a node, with message sizes in elements."""
    table = collectives(profile, out)
    names = {ours: theirs for theirs, ours in COLLECTIVES.items()}
    inside = np.array(table["num_nodes"] == 1, dtype=np.bool_)
    named = np.isin(table["op"], list(names)) & np.isin(table["dtype"], list(_NCCL_DTYPES))
    out.leave_out("a collective between nodes: no place for it there", int((~inside).sum()))
    out.leave_out(
        "a collective or dtype that aiconfigurator has no name for", int((inside & ~named).sum())
    )
    found: dict[tuple[Any, ...], float] = {}
    for row in table.where(inside & named).rows():
        elements = row["message_bytes"] // DTYPES[row["dtype"]].element_bytes
        key = (names[row["op"]], _NCCL_DTYPES[row["dtype"]], row["num_gpus"], elements)
        if key in found:  # aiconfigurator calls both bf16 and fp16 "half"
            out.leave_out("the same bytes in another dtype of the same width", 1)
        else:
            found[key] = row["latency_us"] / 1e3
    ops, dtypes, gpus, sizes = ([key[i] for key in found] for i in range(4))
    return {
        "op_name": ops,
        "kernel_source": ["NCCL"] * len(found),
        "nccl_dtype": dtypes,
        "num_gpus": gpus,
        "message_size": sizes,
        "latency": list(found.values()),
    }


def _description(
    profile: Profile, options: ExportOptions, system: str, out: Exported, *, nccl: bool
) -> dict[str, Any]:
    device, links = profile.device, link_rates(profile, out)
    reached = achieved(profile, options, Exported())
    major, minor = device.compute_capability or (0, 0)
    peaks = {
        key: int(peak * 1e12)
        for dtype, key in _PEAKS.items()
        if (peak := device.peak(dtype)) is not None
    }
    if "bfloat16_tc_flops" not in peaks and (half := device.peak("fp16")) is not None:
        peaks["bfloat16_tc_flops"] = int(half * 1e12)  # aiconfigurator's only 16-bit peak
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
            "nccl_mem": {1: 0},
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
