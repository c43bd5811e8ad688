"""aiconfigurator's systems folder: one YAML file, and Parquet tables of products, attention and NCCL.

Layout and columns are those that aiconfigurator-core 0.12.0 loads (`perf_database.get_database` with `systems_paths`);
times are in milliseconds. Its engine draws straight lines between rows in m, so rows on both sides of every known cliff
are there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.importers.aiconfigurator import COLLECTIVES, TABLES
from quantbench.latency.tables import system_of
from quantbench.profile.exporters.achieved import achieved
from quantbench.profile.exporters.aiconfigurator_rows import Columns, context_rows, gemm_rows, generation_rows
from quantbench.profile.exporters.link_rates import LinkRates, link_rates
from quantbench.profile.exporters.options import WHO, Exported, ExportOptions
from quantbench.profile.exporters.rows import collectives
from quantbench.profile.profile import Profile
from quantbench.workload.dtypes import DTYPES

_BACKENDS = ("vllm", "sglang", "trtllm")
_INSTALL = "pip install 'quantbench[tables]'"
#: only the place where the tables are looked up: no release of NCCL is meant
_NCCL_VERSION = "quantbench"
_NCCL_DTYPES = {"bf16": "half", "fp16": "half", "int8": "int8", "fp8": "fp8"}
#: dtype → the YAML's name of its peak
_PEAKS = {"bf16": "bfloat16_tc_flops", "int8": "int8_tc_flops", "fp8": "fp8_tc_flops"}
#: what its own systems' YAML files say of what nobody measured (aiconfigurator-core 0.12.0, a100_sxm.yaml): seconds of
#: a small operation, and bytes beside weights and caches
_CONSTANT_LATENCY_S = 3e-6
_OTHER_MEMORY_BYTES = 3_758_096_384


def export(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Write `<system>.yaml` and the tables below `data/<system>/`."""
    if profile.device.kind != "cuda":
        raise UnsupportedError(WHO, f"{profile.device.name} is a {profile.device.kind}", "a GPU, for aiconfigurator")
    require_choice(WHO, "--backend", options.backend, _BACKENDS)
    system = system_of(profile.device.name).replace("-", "_")
    tables: dict[str, Columns] = {
        "gemm": gemm_rows(profile, options, out),
        "context_attention": context_rows(profile, options, out),
        "generation_attention": generation_rows(profile, options, out),
        "nccl": _nccl_rows(profile, out),
    }
    if not any(columns["latency"] for columns in tables.values()):
        reasons = "; ".join(out.left_out) or "no rows"
        raise InputError(WHO, f"nothing that it has a table for ({reasons})", "bf16 or fp8, or --dtype fp16")
    out.leave_out("softmax: no place for it there", len(profile.tables["softmax"]))
    nccl = bool(tables["nccl"]["latency"])
    out.write(_yaml(_description(profile, options, system, link_rates(profile, out), out, nccl=nccl)), f"{system}.yaml")
    for kind, columns in tables.items():
        count = len(columns["latency"])
        if not count:
            continue
        own = ("nccl", _NCCL_VERSION) if kind == "nccl" else (options.backend, options.version)
        common: Columns = {
            "framework": [options.backend] * count,
            "version": [own[1]] * count,
            "device": [profile.device.name] * count,
        }  # fmt: skip
        where = ("data", system, TABLES[kind].family, *own, f"{TABLES[kind].stem}.parquet")
        _write_parquet({**common, **columns}, out, where)
        out.rows[kind] = count
    _write_metadata(tables, options, system, out)
    out.use.append(
        f'perf_database.get_database("{system}", "{options.backend}", "{options.version}", '
        f'systems_paths="{out.folder}", shared_layer=False)'
    )


def _write_metadata(tables: dict[str, Columns], options: ExportOptions, system: str, out: Exported) -> None:
    """A collection_meta.yaml in each folder of tables: its loader warns where there is none, and refuses to load
    where it was asked to be strict. "legacy" is its word for tables that its own collector did not make."""
    folders: dict[tuple[str, ...], list[str]] = {}
    for kind, columns in tables.items():
        if columns["latency"]:
            own = ("nccl", _NCCL_VERSION) if kind == "nccl" else (options.backend, options.version)
            folders.setdefault((TABLES[kind].family, *own), []).append(TABLES[kind].stem)
    for folder, stems in folders.items():
        data = {
            "schema_version": 1,
            "provenance": "legacy",
            "runtime": {"framework": folder[1], "version": folder[2]},
            "tables": {stem: {"status": "complete"} for stem in stems},
        }
        out.write(_yaml(data), "data", system, *folder, "collection_meta.yaml")


def _nccl_rows(profile: Profile, out: Exported) -> Columns:
    """Collectives inside a node, in elements: the consumer's table knows no nodes."""
    table = collectives(profile, out)
    names = {ours: theirs for theirs, ours in COLLECTIVES.items()}
    inside = np.array(table["num_nodes"] == 1, dtype=np.bool_)
    known = np.isin(table["op"], list(names)) & np.isin(table["dtype"], list(_NCCL_DTYPES))
    out.leave_out("a collective between nodes: no place for it there", int((~inside).sum()))
    out.leave_out("a collective or dtype that aiconfigurator has no name for", int((inside & ~known).sum()))
    columns: Columns = {
        name: [] for name in ("op_name", "kernel_source", "nccl_dtype", "num_gpus", "message_size", "latency")
    }
    seen: set[tuple[Any, ...]] = set()
    for row in table.where(inside & known).rows():
        elements = row["message_bytes"] // DTYPES[row["dtype"]].element_bytes
        key = (_NCCL_DTYPES[row["dtype"]], row["op"], row["num_gpus"], elements)
        if key in seen:  # bf16 beside fp16: both are its "half", and both move the same bytes
            out.leave_out("the same bytes in another dtype of the same width", 1)
            continue
        seen.add(key)
        values = (names[row["op"]], "NCCL", key[0], row["num_gpus"], elements, row["latency_us"] / 1e3)
        for name, value in zip(columns, values, strict=True):
            columns[name].append(value)
    return columns


def _description(
    profile: Profile, options: ExportOptions, system: str, links: LinkRates, out: Exported, *, nccl: bool
) -> dict[str, Any]:
    device = profile.device
    reached = achieved(profile, options, Exported.nowhere())
    major, minor = device.compute_capability or (0, 0)
    peaks = {key: int(peak * 1e12) for dtype, key in _PEAKS.items() if (peak := device.peak(dtype)) is not None}
    if "bfloat16_tc_flops" not in peaks and (half := device.peak("fp16")) is not None:
        peaks["bfloat16_tc_flops"] = int(half * 1e12)  # its only name for 16 bits
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


def _write_parquet(columns: Columns, out: Exported, where: tuple[str, ...]) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UnsupportedError(WHO, "pyarrow is not installed", _INSTALL) from None
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    out.write(sink.getvalue().to_pybytes(), *where)
