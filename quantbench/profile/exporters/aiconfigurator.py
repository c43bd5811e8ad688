"""Exports an aiconfigurator systems folder: YAML files, and Parquet tables of GEMMs, attention,
experts and NCCL. Layout and columns are those of aiconfigurator-core 0.12.0
(`perf_database.get_database` with `systems_paths`); times are in milliseconds. aiconfigurator
interpolates linearly in m, so modelled rows are added on both sides of cliffs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.importers.aiconfigurator import COLLECTIVES, TABLES
from quantbench.latency.attention import AttentionModel
from quantbench.latency.libraries import system_of
from quantbench.profile.exporters.aiconfigurator_modelled import (
    FP8_KEYS,
    LANES,
    Columns,
    Message,
    absorbing_rows,
    lanes_of,
    latent_rows,
    message_rows,
    origins,
    scale_rows,
)
from quantbench.profile.exporters.modelled import (
    MODEL,
    MODEL_SITES,
    GemmRow,
    GemmTimes,
    accuracy_words,
    known_cliff_rows,
    model_rows,
    seen,
)
from quantbench.profile.exporters.options import (
    WHO,
    Exported,
    ExportOptions,
    collectives,
    forward_attention,
    linear_layers,
    of_provider,
    require_gpu,
)
from quantbench.profile.exporters.rates import achieved, link_rates
from quantbench.profile.exporters.served import MODEL_HEADS, Heads, Served, served
from quantbench.profile.file import parquet_bytes
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload import Attention
from quantbench.workload.dtypes import DTYPES

_BACKENDS = ("vllm", "sglang", "trtllm")
_INSTALL = "pip install '.[tables]' in quantbench's checkout"
#: the version under which the NCCL table is stored; not a release of NCCL
_NCCL_VERSION = "quantbench"
_NCCL_DTYPES = {"bf16": "half", "fp16": "half", "int8": "int8", "fp8": "fp8"}
#: aiconfigurator's names of dtypes: common.GEMMQuantMode and common.FMHAQuantMode of
#: aiconfigurator-core 0.12.0
_GEMM_DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
#: common.MoEQuantMode
_MOE_DTYPES = {"bf16": "bfloat16", "mxfp4": "w4a8_mxfp4_mxfp8"} | {
    name: name for name in ("fp8", "fp8_block", "nvfp4")
}
_ATTENTION_DTYPES = {"bf16": "bfloat16"}
#: dtype → name of its peak in the YAML file
_PEAKS = {
    "bf16": "bfloat16_tc_flops",
    "int8": "int8_tc_flops",
    "fp8": "fp8_tc_flops",
    "nvfp4": "fp4_tc_flops",
}
#: latency of a small operation, and memory not used for weights and caches: not measured, copied
#: from aiconfigurator's own YAML files (aiconfigurator-core 0.12.0, a100_sxm.yaml)
_CONSTANT_LATENCY_S = 3e-6
_OTHER_MEMORY_BYTES = 3_758_096_384
_NCCL_MEMORY_BYTES = {1: 0, 2: 358_612_992, 4: 411_041_792, 8: 411_041_792, 16: 411_041_792}
#: tables that only the planner has → their folders
_FAMILIES = {
    "custom_allreduce": "comm",
    "computescale": "quantize",
    "scale_matrix": "quantize",
    "context_mla": "mla",
    "generation_mla": "mla",
    "mla_bmm": "mla_bmm",
}


def export(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes `<system>.yaml` and the tables below `data/<system>/`."""
    require_gpu(profile, "aiconfigurator")
    require_choice(WHO, "--backend", options.backend, _BACKENDS)
    system = system_of(profile.device.name).replace("-", "_")
    wanted = served(options)
    messages = _measured_collectives(profile, out)
    tables: dict[str, Columns] = {
        "gemm": _gemm_rows(profile, options, wanted, out),
        "context_attention": _attention_rows(profile, options, wanted, out, "context_attention"),
        "generation_attention": _attention_rows(
            profile, options, wanted, out, "generation_attention"
        ),
        "moe": _moe_rows(profile, options, wanted, out),
        "nccl": message_rows(profile, wanted, messages, nccl=True),
        "custom_allreduce": message_rows(profile, wanted, messages, nccl=False),
        "computescale": scale_rows(profile, wanted, passes=1),
        "scale_matrix": scale_rows(profile, wanted, passes=2),
        "context_mla": latent_rows(profile, wanted, prompts=True),
        "generation_mla": latent_rows(profile, wanted, prompts=False),
        "mla_bmm": absorbing_rows(profile, wanted, options.kernels),
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
        family = _FAMILIES[kind] if kind in _FAMILIES else TABLES[kind].family
        stem = f"{kind}_perf"
        folder = (family, framework, version)
        stems.setdefault(folder, []).append(stem)
        common = {"framework": options.backend, "version": version, "device": profile.device.name}
        content = parquet_bytes(
            {**{name: [value] * count for name, value in common.items()}, **columns}
        )
        out.write(content, "data", system, *folder, f"{stem}.parquet")
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


def _formats(profile: Profile, options: ExportOptions) -> list[str]:
    """Returns the dtypes of the products to write: those with rows, or all with a peak if the
    planner asks for more than the rows."""
    names = {options.dtype} if options.dtype else {*_GEMM_DTYPES}
    measured = set(profile.tables["gemm"]["dtype"].tolist())
    return sorted(d for d in names if d in measured or profile.device.peak(d) is not None)


def _gemm_rows(profile: Profile, options: ExportOptions, wanted: Served, out: Exported) -> Columns:
    """Returns the GEMM table. fp16 is exported only with --dtype fp16, as bfloat16 (aiconfigurator
    has no fp16).
    """
    names = dict(_GEMM_DTYPES)
    if options.dtype == "fp16":
        names["fp16"] = "bfloat16"
        out.notes.append(
            "fp16 stands in the tables as bfloat16, aiconfigurator's only 16-bit format"
        )
    table = profile.tables["gemm"]
    for dtype in sorted(set(table["dtype"].tolist()) - set(names)):
        hint = " (--dtype fp16 writes it as its bfloat16)" if dtype == "fp16" else ""
        out.leave_out(
            f"{dtype}: no such matrix product there{hint}", int((table["dtype"] == dtype).sum())
        )
    rows: list[GemmRow] = []
    for dtype in _formats(profile, options):
        of_dtype = table.where(table["dtype"] == dtype)
        measured = linear_layers(of_dtype, options, out, options.backend)
        if dtype in names:
            rows += _rows_of_dtype(profile, options, wanted, dtype, measured, out)
    if not rows:
        return {"latency": []}
    m, n, k, us, dtypes, sources, spread = zip(*rows, strict=True)
    return {
        "op_name": ["gemm"] * len(rows),
        "kernel_source": list(sources),
        "origin": origins(sources),
        "high_over_latency": list(spread),
        "gemm_dtype": [names[d] for d in dtypes],
        "m": list(m),
        "n": list(n),
        "k": list(k),
        "latency": [time / 1e3 for time in us],
    }


def _rows_of_dtype(
    profile: Profile,
    options: ExportOptions,
    wanted: Served,
    dtype: str,
    measured: Table,
    out: Exported,
) -> list[GemmRow]:
    rows: list[GemmRow] = [
        (
            row["m"],
            row["n"],
            row["k"],
            row["latency_us"],
            dtype,
            row["kernel"] or row["provider"],
            row["high_us"] / row["latency_us"],
        )
        for row in measured.rows()
    ]
    asked = bool(options.model or options.configs)
    if len(measured) and not asked:
        return rows + known_cliff_rows(profile, measured, out)
    if len(profile.tables["gemm"]) and not asked:
        return []
    times = GemmTimes(profile, dtype, options.kernels)
    out.notes.append(times.note)
    pairs = wanted.products if asked else MODEL_SITES
    return rows + model_rows(times, dtype, pairs, measured)


def _attention_rows(
    profile: Profile, options: ExportOptions, wanted: Served, out: Exported, op: str
) -> Columns:
    """Returns an attention table. context_attention: causal prompts with as many queries as keys.
    generation_attention: decoding; one query (seq_q = 1) attends to seq_k keys, of which seq_k - 1
        were cached."""
    prompts = op == "context_attention"
    # Both tables omit the same rows: count them only once.
    selected = out if prompts else Exported()
    table = forward_attention(profile, options, selected)
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
    table = of_provider(table, options.provider, out, options.backend)
    spread = table["high_us"] / table["latency_us"]
    columns = (table["latency_us"].tolist(), table["provider"].tolist(), spread.tolist())
    measured = zip(table.workloads(), *columns, strict=True)
    rows = [(work, 0, *LANES[0], *values) for work, *values in measured]
    heads = wanted.heads
    if not rows and not heads:
        heads = MODEL_HEADS
        model = profile.models.attention or AttentionModel.best(profile.device)
        held_out = "held_out" if prompts else "held_out_decode"
        accuracy = accuracy_words(model.provenance, held_out)
        out.notes.append(f"{op.replace('_', ' ')} was not measured: modelled{accuracy}")
    dtype = "fp16" if options.dtype == "fp16" else "bf16"
    if heads and profile.device.peak(dtype) is not None:
        measured_works = {row[0] for row in rows}
        rows += _modelled_attention(profile, heads, dtype, prompts, measured_works)
    if not rows:
        return {"latency": []}
    works, windows, dtypes, kv_dtypes, times_us, sources, spreads = zip(*rows, strict=True)
    count = len(rows)
    return {
        "op_name": [op] * count,
        # One name for all: its engine answers from the rows of one kernel.
        "kernel_source": [sources[0]] * count,
        "origin": origins(sources),
        "high_over_latency": list(spreads),
        "batch_size": [work.batch for work in works],
        "isl": [work.seq_q for work in works],
        "num_heads": [work.heads for work in works],
        "num_key_value_heads": [work.kv_heads for work in works],
        "head_dim": [work.head_dim for work in works],
        "beam_width": [1] * count,
        "attn_dtype": list(dtypes),
        "kv_cache_dtype": list(kv_dtypes),
        "step": [0 if prompts else work.seq_k - 1 for work in works],
        "window_size": list(windows),
        "latency": [us / 1e3 for us in times_us],
    }


def _modelled_attention(
    profile: Profile,
    heads: Sequence[Heads],
    dtype: str,
    prompts: bool,
    measured: set[Any],
) -> list[tuple[Any, ...]]:
    """Returns the rows of `_attention_rows` that were not measured, of every window and lane."""
    works: list[Attention] = []
    windows: list[int] = []
    for one in heads:
        shapes = one.prompts(dtype) if prompts else one.decodes(dtype)
        works += shapes
        windows += [one.window] * len(shapes)
    within = [seen(work, window) for work, window in zip(works, windows, strict=True)]
    model = profile.models.attention or AttentionModel.best(profile.device)
    rows: list[tuple[Any, ...]] = []
    for lane in lanes_of(profile, prompts):
        if lane[1] == "fp8" and not prompts:
            within = [replace(one, seq_k=max(1, int(FP8_KEYS * one.seq_k))) for one in within]
        found = model.predict(within)
        spread = found.high_us / found.latency_us
        columns = found.latency_us.tolist(), spread.tolist()
        rows += [
            (work, window, *lane, us, MODEL, high)
            for work, window, us, high in zip(works, windows, *columns, strict=True)
            if window or lane != LANES[0] or work not in measured
        ]
    return rows


def _moe_rows(profile: Profile, options: ExportOptions, wanted: Served, out: Exported) -> Columns:
    table = profile.tables["moe"]
    named = np.isin(table["dtype"], list(_MOE_DTYPES))
    out.leave_out("experts of a dtype that aiconfigurator has no name for", int((~named).sum()))
    table = table.where(named)
    spread = table["high_us"] / table["latency_us"]
    columns = (table["latency_us"].tolist(), table["provider"].tolist(), spread.tolist())
    rows: list[tuple[Any, ...]] = list(zip(table.workloads(), *columns, strict=True))
    measured = {row[0] for row in rows}
    for dtype in _MOE_DTYPES if wanted.experts else ():
        if profile.device.peak(dtype) is not None:
            layers = [replace(layer, dtype=dtype) for layer in wanted.experts]
            layers = [layer for layer in layers if layer not in measured]
            found = profile.experts(dtype, options.kernels).predict(layers)
            spread = found.high_us / found.latency_us
            rows += [
                (layer, us, MODEL, high)
                for layer, us, high in zip(
                    layers, found.latency_us.tolist(), spread.tolist(), strict=True
                )
            ]
    if not rows:
        return {"latency": []}
    works = [row[0] for row in rows]
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
        "kernel_source": [rows[0][2]] * len(rows),
        "origin": origins([row[2] for row in rows]),
        "high_over_latency": [row[3] for row in rows],
        "moe_dtype": [_MOE_DTYPES[work.dtype] for work in works],
        **{theirs: [getattr(work, ours) for work in works] for theirs, ours in names.items()},
        "latency": [row[1] / 1e3 for row in rows],
    }


def _measured_collectives(profile: Profile, out: Exported) -> list[Message]:
    """Returns the measured collectives within a node."""
    table = collectives(profile, out)
    names = {ours: theirs for theirs, ours in COLLECTIVES.items()}
    inside = np.array(table["num_nodes"] == 1, dtype=np.bool_)
    named = np.isin(table["op"], list(names)) & np.isin(table["dtype"], list(_NCCL_DTYPES))
    out.leave_out("a collective between nodes: no place for it there", int((~inside).sum()))
    out.leave_out(
        "a collective or dtype that aiconfigurator has no name for", int((inside & ~named).sum())
    )
    found: dict[tuple[Any, ...], Message] = {}
    for row in table.where(inside & named).rows():
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
