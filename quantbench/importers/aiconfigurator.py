"""Finds and reads aiconfigurator-core's tables of measured times, for `quantbench import`.

The tables come from the installed package or from a folder with one `<system>.yaml` per system. The
YAML file's `data_dir` names the folder of the system's tables, which are stored as
`<family>/<backend>/<version>/<table>.parquet`. Each row of a table has one shape and its mean time
in ms.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quantbench.errors import InputError, StoreError, UnsupportedError
from quantbench.files import read_text, reason
from quantbench.importers.parquet import read_parquet
from quantbench.importers.runs import Origin, Row, Rows, digest, dtype_name
from quantbench.latency.libraries import DEFAULT_TABLES, MASKED_EXPERTS, MASKED_WORDS, system_of
from quantbench.latency.libraries import TABLES as NEWEST
from quantbench.store.record import GridPosition
from quantbench.workload import Attention, Collective, Gemm, MoE, Workload
from quantbench.workload.dtypes import GEMM_DTYPES, VECTOR_DTYPES, element_bytes

_WHO = "import aiconfigurator"
_INSTALL = "pip install -e '.[tables]' in quantbench's checkout"

# Values of `kernel_source`, in lower case, that name a framework's or library's entry point instead
# of a kernel.
_NOT_KERNELS = {
    "torch.nn.functional.linear",
    "sglang",
    "sglang_torch_linear",
    "vllm_default",
    "torch_flow",
    "nccl",
}
# Timing mode of all tables except NCCL's: the call was captured in a CUDA graph and timed with
# events (collector/helper.py). Whether the cache is cold depends on the shape.
_MODE = "graph"
_CAVEATS: tuple[str, ...] = (
    "imported: one mean of a few runs, its spread, clock and cache state not recorded",
)

#: maps the package's name of each collective to quantbench's name
COLLECTIVES = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}  # fmt: skip


@dataclass(frozen=True)
class TableFile:
    """A table on disk.

    kind: kind of table, a key of TABLES.
    backend: framework whose kernels were measured, such as vllm.
    version: version of the framework.
    package: name and version of the package, or the root folder.
    """

    kind: str
    path: Path
    system: str
    backend: str
    version: str
    package: str

    @property
    def shown(self) -> str:
        """The last five components of the path, from the system's folder to the file."""
        return "/".join(self.path.parts[-5:])


@dataclass(frozen=True)
class _Kind:
    """A kind of table.

    family: folder that contains this kind of table.
    columns: required columns.
    read: function that returns a row's workload, or the reason why quantbench has no such workload.
    """

    family: str
    columns: tuple[str, ...]
    read: Callable[[dict[str, Any]], Workload | str]


def _gemm(row: dict[str, Any]) -> Gemm | str:
    """Returns a row's GEMM, or the reason why quantbench has no such GEMM."""
    dtype = dtype_name(row["gemm_dtype"])
    if dtype not in GEMM_DTYPES:
        return f"gemm_dtype {row['gemm_dtype']}: no such matrix product here"
    # The frameworks time a linear layer, y = x·Wᵀ.
    return Gemm(row["m"], row["n"], row["k"], dtype=dtype, layout="nt")


def _attention(row: dict[str, Any], kind: str) -> Attention | str:
    """Returns a row's attention, or the reason why quantbench has no such attention.

    kind: context, generation or encoder, as in the table's name.
    """
    dtype = dtype_name(row["attn_dtype"])
    if dtype not in VECTOR_DTYPES:
        return f"attn_dtype {row['attn_dtype']}: no such attention here"
    if row.get("kv_cache_dtype", row["attn_dtype"]) != row["attn_dtype"]:
        return f"keys and values in {row['kv_cache_dtype']} beside queries in {row['attn_dtype']}"
    if row.get("window_size", 0) != 0:
        return "a sliding window"
    if row.get("beam_width", 1) != 1:
        return "beam search"
    if kind == "context" and row["step"] != 0:
        return "a prefix that is cached already"
    # One new token attends to `step` cached tokens and to itself, as in the package's loader.
    seq_k = row["isl"]
    if kind == "generation":
        seq_k += row["step"]
    return Attention(
        row["batch_size"],
        row["num_heads"],
        row["isl"],
        seq_k,
        row["head_dim"],
        kv_heads=0 if kind == "encoder" else row["num_key_value_heads"],
        dtype=dtype,
        causal=kind == "context",
    )


# Models whose experts have no gate, as (hidden, expert_ffn, top_k, num_experts). All tables include
# these models, but only TRT-LLM's tables mark them (kernel_source moe_torch_flow_nongated).
_UNGATED = {
    (1024, 2688, 22, 512),
    (2048, 5120, 22, 512),
    (2688, 1856, 6, 128),
    (4096, 2688, 22, 512),
    (8192, 5120, 22, 512),
}
# Maps a table's name of a format to the dtype in which experts multiply. The tables' other formats
# that are named after weights and activations multiply in dtypes that quantbench does not have.
_MOE_DTYPES = {"w4a8_mxfp4_mxfp8": "mxfp4"}


def _moe(row: dict[str, Any]) -> MoE | str:
    """Returns a row's MoE layer, or the reason why quantbench has no such layer."""
    dtype = _MOE_DTYPES.get(row["moe_dtype"], dtype_name(row["moe_dtype"]))
    if dtype not in GEMM_DTYPES:
        return f"moe_dtype {row['moe_dtype']}: no such matrix product here"
    hidden = row["hidden_size"]
    expert_ffn = row["inter_size"]
    top_k = row["topk"]
    num_experts = row["num_experts"]
    return MoE(
        row["num_tokens"],
        hidden,
        expert_ffn,
        num_experts,
        top_k,
        dtype,
        tp=row["moe_tp_size"],
        ep=row["moe_ep_size"],
        gated=(hidden, expert_ffn, top_k, num_experts) not in _UNGATED,
        distribution=row["distribution"],
    )


def _collective(row: dict[str, Any]) -> Collective | str:
    """Returns a row's collective, or the reason why quantbench has no such collective."""
    op = COLLECTIVES.get(row["op_name"])
    dtype = dtype_name(row["nccl_dtype"])
    if op is None:
        return f"op_name {row['op_name']}: no such collective here"
    # The table's sizes are numbers of elements, although nccl-tests was run with sizes in bytes
    # (collector/collect_nccl.py).
    message_bytes = row["message_size"] * element_bytes(dtype)
    return Collective(op, message_bytes, row["num_gpus"], dtype=dtype)


# Maps a workload to the fields that its tables vary. Each of these fields is an axis of the run.
_VARIED: dict[type, tuple[str, ...]] = {
    Attention: ("batch", "seq_k", "heads", "kv_heads", "head_dim"),
    Collective: ("message_bytes", "num_gpus"),
    MoE: ("tokens", "hidden", "expert_ffn", "top_k", "num_experts", "tp", "ep"),
    Gemm: ("m", "n", "k"),
}
# Maps a field to the name of its axis, if the two names differ.
_AXES = {"batch": "mbs", "seq_k": "seq"}


_ATTENTION_COLUMNS = ("batch_size", "isl", "num_heads", "head_dim", "attn_dtype", "latency")
_MOE_COLUMNS = (
    "moe_dtype", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size",
    "moe_ep_size",
    "distribution", "latency",
)  # fmt: skip
_CACHED_COLUMNS = (*_ATTENTION_COLUMNS, "num_key_value_heads", "kv_cache_dtype", "step")

TABLES = {
    "gemm": _Kind("gemm", ("gemm_dtype", "m", "n", "k", "latency"), _gemm),
    "context_attention": _Kind("attention", _CACHED_COLUMNS, partial(_attention, kind="context")),
    "nccl": _Kind(
        "comm",
        ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency"),
        _collective,
    ),
    "encoder_attention": _Kind(
        "encoder_attention",
        _ATTENTION_COLUMNS,
        partial(_attention, kind="encoder"),
    ),
    "generation_attention": _Kind(
        "attention",
        _CACHED_COLUMNS,
        partial(_attention, kind="generation"),
    ),
    "moe": _Kind("moe", _MOE_COLUMNS, _moe),
}
#: tables that are imported by default
DEFAULT_KINDS = ("gemm", "context_attention", "nccl")


def find_tables(
    system: str,
    *,
    backend: str | None = None,
    version: str | None = None,
    kinds: Sequence[str] = DEFAULT_KINDS,
    root: Path | None = None,
) -> tuple[list[TableFile], list[str]]:
    """Returns the tables of a system, and a message for each of `kinds` that is missing.

    system: the package's name of the system, or a device slug.
    backend, version: framework and its version. If both are None, the default is the framework and
        version in `libraries.DEFAULT_TABLES`, or the system's only ones. For the NCCL table, the
        version is instead the NCCL version in the system's YAML file.
    kinds: kinds of tables, keys of TABLES.
    root: folder with the systems' YAML files, or a folder in which that folder is `systems`; None
        for the installed package.

    Raises UnsupportedError if the package is not installed, and InputError if the system is unknown
    or has none of the tables.
    """
    for kind in kinds:
        if kind not in TABLES:
            raise InputError(_WHO, f"--table {kind!r}", "one of " + ", ".join(TABLES))
    system = system_of(system)
    data, nccl_version = _system_data(system, root)
    if backend is None and version is None:
        backend, version = DEFAULT_TABLES.get(system, (None, None))
    package = str(root)
    if root is None:
        package = f"aiconfigurator-core {installed_version('aiconfigurator-core')}"
    of = f" of {backend} {version}" if backend else ""
    found = []
    missing = []
    for kind in kinds:
        wanted = nccl_version if kind == "nccl" else version
        path = _find(data, kind, backend, wanted, system)
        if path is None:
            missing.append(f"{system} has no {kind} table{of}")
        else:
            *_, its_backend, its_version, _ = path.parts
            found.append(TableFile(kind, path, system, its_backend, its_version, package))
    if not found:
        raise InputError(_WHO, "; ".join(missing), f"a table below {data}")
    return found, missing


def _find(
    data: Path, kind: str, backend: str | None, version: str | None, system: str
) -> Path | None:
    """Returns the path of a table; None if the system has no such table.

    If no NCCL table has the wanted version, another version is accepted. If a backend has several
    versions, the version in `latency.libraries.TABLES` is selected.

    Raises InputError if several tables match, or if GEMM tables exist but none matches.
    """
    known = sorted(data.glob(f"{TABLES[kind].family}/*/*/{kind}_perf.parquet"))
    if kind == "nccl":
        exact = [path for path in known if path.parts[-2] == version]
        return next(iter((*exact, *reversed(known))), None)
    of_backend = [path for path in known if backend in (None, path.parts[-3])]
    matching = [path for path in of_backend if version in (None, path.parts[-2])]
    if len(matching) > 1 and backend is not None:
        newest = NEWEST.get(system, {}).get(backend)
        matching = [path for path in matching if path.parts[-2] == newest] or matching
    if not known or (not matching and kind != "gemm"):
        return None
    if len(matching) != 1:
        have = ", ".join(f"{path.parts[-3]} {path.parts[-2]}" for path in known)
        given = f"--backend {backend} --version {version} for {system}"
        raise InputError(_WHO, given.replace(" None", " (not given)"), f"one of {have}")
    return matching[0]


def systems_folder() -> Path | None:
    """Returns the installed aiconfigurator-core's folder of systems; None without the package."""
    spec = find_spec("aiconfigurator_core")
    found = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(found))) / "systems" if found else None


def _system_data(system: str, root: Path | None) -> tuple[Path, str | None]:
    """Returns the folder of a system's tables, and the NCCL version in the system's YAML file.

    The NCCL version is None if the file does not name it.
    """
    if root is None:
        root = systems_folder()
        if root is None:
            raise UnsupportedError(
                _WHO, "the package aiconfigurator-core is not installed", f"{_INSTALL}, or --root"
            )
    elif os.path.isdir(root / "systems"):
        root = root / "systems"
    description = root / f"{system}.yaml"
    if not os.path.isfile(description):
        stems = [path.stem for path in sorted(root.glob("*.yaml"))]
        systems = ", ".join(stem for stem in stems if os.path.isdir(root / "data" / stem))
        raise InputError(
            _WHO, f"--system {system}: no {description}", f"one of {systems or 'the systems there'}"
        )
    try:
        import yaml
    except ImportError as error:
        raise UnsupportedError(_WHO, "PyYAML is not installed", _INSTALL) from error
    try:
        content = yaml.safe_load(read_text(description))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise StoreError(_WHO, f"{description} ({reason(error)})", "a YAML file") from None
    if not isinstance(content, dict) or not isinstance(content.get("data_dir"), str):
        raise StoreError(
            _WHO, f"{description} has no data_dir", "a text: the folder of the system's tables"
        )
    data = root / content["data_dir"]
    misc = content.get("misc")
    if not isinstance(misc, dict):
        return data, None
    return data, misc.get("nccl_version")


def read_rows(table: TableFile, *, dtypes: Sequence[str] = ()) -> Rows:
    """Reads the rows of one table. `Rows.left_out` counts the rows that are not used, by reason.

    dtypes: quantbench's names of the dtypes to keep; () for all. Collectives are always kept.

    Raises StoreError if the file cannot be read, and InputError for a missing column or an
    impossible value.
    """
    kind = TABLES[table.kind]
    found = Rows()
    content = read_parquet(_WHO, table.path)
    missing = next((name for name in kind.columns if name not in content.column_names), None)
    if missing is not None:
        columns = ", ".join(content.column_names)
        raise InputError(
            _WHO,
            f"{table.path.name} has no column {missing!r} (it has {columns})",
            ", ".join(kind.columns),
        )
    try:
        rows = content.to_pylist()
    except UnicodeDecodeError as error:
        raise StoreError(_WHO, f"{table.path} ({error})", "a Parquet file") from None
    for number, raw in enumerate(rows):
        try:
            workload = kind.read(raw)
        except (InputError, KeyError, AttributeError, TypeError) as error:
            raise InputError(
                _WHO, f"{table.shown}, row {number}: {error}", "sizes of at least 1"
            ) from None
        if isinstance(workload, str):
            found.left_out[workload] += 1
        elif dtypes and workload.dtype not in dtypes and not isinstance(workload, Collective):
            found.left_out[f"dtype {workload.dtype} was not asked for"] += 1
        else:
            source = str(raw.get("kernel_source", ""))
            kernel = None
            if source and source.lower() not in _NOT_KERNELS:
                kernel = source
            # The provider is the framework, with its variant if the table names one: `sglang`,
            # `vllm.flash_attn_fa3`.
            provider = table.backend
            variant = source.lower().removeprefix(f"{table.backend}_")
            if variant and variant not in _NOT_KERNELS:
                provider += f".{variant}"
            axes = {}
            for name in _VARIED[type(workload)]:
                axes[_AXES.get(name, name)] = getattr(workload, name)
            place = GridPosition(axes, getattr(workload, "op", workload.kind))
            latency_us = raw["latency"] * 1e3
            row = Row(workload, latency_us, provider, place, kernel, f"row {number}")
            found.rows.append(row)
    return found


def origin_of(table: TableFile, *, run_id: str | None = None) -> Origin:
    """Returns the provenance of a table.

    run_id: name of the run; None for a name made of the package, table, framework and version.
    """
    package = table.package.split("/")[-1].replace(" ", "-").replace("aiconfigurator-core", "aic")
    caveats = _CAVEATS
    if table.kind == "moe" and table.backend in MASKED_EXPERTS:
        caveats += (MASKED_WORDS,)
    return Origin(
        run_id=run_id or f"{package}-{table.kind}-{table.backend}-{table.version}",
        source=f"{table.package}: {table.shown} ({table.backend} {table.version})",
        software={"aiconfigurator": table.package, table.backend: table.version},
        options={
            "importer": "aiconfigurator",
            "table": table.kind,
            "file": table.shown,
            "sha256": digest(table.path),
        },
        mode="unknown" if table.kind == "nccl" else _MODE,
        caveats=caveats,
    )
