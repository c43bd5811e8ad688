"""Reads Vidur's profiling files: attention.csv, mlp.csv, all_reduce.csv and send_recv.csv (plain, .gz or .xz).

Entry points: `read_rows`, `origin_of`. Used by the command `import`; the exporter `profile.exporters.vidur` uses
`GEMM_OPS`.

Times are in ms; each cell of `time_stats.<op>.median` becomes one sample. A row has the sizes of the whole model and
the tensor-parallel degree. Source: vidur/profiling of https://github.com/microsoft/vidur (mlp_impl.py,
attention_wrapper.py, collectives_wrapper.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from quantbench.errors import InputError
from quantbench.importers.csv_table import CsvFile, CsvRow
from quantbench.importers.runs import Origin, Row, Rows, file_origin
from quantbench.store.record import Place
from quantbench.workload import Attention, Collective, Gemm

_WHO = "import vidur"

#: names of a layer's GEMMs: Vidur's, and quantbench's
GEMM_OPS = {"attn_pre_proj": "qkv", "attn_post_proj": "proj", "mlp_up_proj": "mlp_up", "mlp_down_proj": "mlp_down"}
_NOT_OURS = "op {}: no such workload here"
_MLP_KEYS = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp", "num_tokens",
             "num_tensor_parallel_workers")  # fmt: skip
_ATTENTION_KEYS = ("n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers", "batch_size",
                   "prefill_chunk_size", "kv_cache_size", "is_prefill", "attention_backend")  # fmt: skip
_COLLECTIVE_KEYS = ("num_workers", "size", "collective", "devices_per_node")


def read_rows(path: Path, *, dtype: str = "fp16") -> tuple[str, Rows]:
    """Returns the kind of file (`mlp`, `attention`, `collectives`), determined by its columns, and its rows.

    dtype: dtype of all rows, which the file does not state; Vidur profiles in fp16 (mlp_wrapper.py).
    """
    file = CsvFile(_WHO, path)
    for kind, (marker, keys, read) in _KINDS.items():
        if marker in file.columns:
            file.require(keys)
            found = Rows()
            for row in file.rows():
                read(row, dtype, found)
            return kind, found
    expected = "Vidur's mlp, attention, all_reduce or send_recv columns"
    there = f"the columns {', '.join(file.columns)[:120]}" if file.columns else "no columns"
    raise InputError(_WHO, f"{path.name} has {there}", expected)


def _per_gpu(row: CsvRow, column: str, tp: int, *, replicate: bool = False) -> int:
    """Divides a size among the tensor-parallel workers. replicate: return at least 1 (key/value heads are copied)."""
    value = row.integer(column)
    if replicate and value < tp:
        return 1
    if value % tp:
        raise row.error(column, f"a multiple of num_tensor_parallel_workers = {tp}")
    return value // tp


def _medians(row: CsvRow) -> Iterator[tuple[str, float]]:
    """Yields (op, µs) for every operation with a time in the row."""
    for column in row.cells:
        if column.startswith("time_stats.") and column.endswith(".median") and row.text(column):
            yield column.split(".")[1], row.number(column) * 1e3


def _read_mlp(row: CsvRow, dtype: str, found: Rows) -> None:
    tp, tokens, hidden = (row.integer(c) for c in ("num_tensor_parallel_workers", "num_tokens", "n_embd"))
    heads, kv_heads = (_per_gpu(row, c, tp, replicate=c == "n_kv_head") for c in ("n_head", "n_kv_head"))
    head_dim, ffn = hidden // row.integer("n_head"), _per_gpu(row, "n_expanded_embd", tp)
    gated = row.flag("use_gated_mlp")
    shapes = {  # n, k
        "attn_pre_proj": ((heads + 2 * kv_heads) * head_dim, hidden),
        "attn_post_proj": (hidden, heads * head_dim),
        "mlp_up_proj": (2 * ffn if gated else ffn, hidden),  # gate and up in one GEMM
        "mlp_down_proj": (hidden, ffn),
    }
    for op, latency_us in _medians(row):
        if op not in shapes:
            found.left_out[_NOT_OURS.format(op)] += 1
            continue
        n, k = shapes[op]
        name = "mlp_up_gate" if op == "mlp_up_proj" and gated else GEMM_OPS[op]
        work = row.made(Gemm, tokens, n, k, dtype=dtype, layout="nt")
        at = Place({"m": tokens, "n": n, "k": k}, name)
        found.rows.append(Row(work, latency_us, "sarathi", at, where=f"line {row.line}"))


def _read_attention(row: CsvRow, dtype: str, found: Rows) -> None:
    tp, cached = row.integer("num_tensor_parallel_workers"), row.integer("kv_cache_size")
    heads, kv_heads = _per_gpu(row, "n_q_head", tp), _per_gpu(row, "n_kv_head", tp, replicate=True)
    prefill = row.flag("is_prefill")
    new = row.integer("prefill_chunk_size") if prefill else 1
    head_dim = row.integer("n_embd") // row.integer("n_q_head")
    provider = "sarathi." + row.text("attention_backend").removeprefix("AttentionBackend.").lower()
    for op, latency_us in _medians(row):
        if op != ("attn_prefill" if prefill else "attn_decode"):
            found.left_out[_NOT_OURS.format(op)] += 1
        elif prefill and cached:
            found.left_out["a prefix that is cached already"] += 1
        else:
            batch, seq = row.integer("batch_size"), new + cached
            work = row.made(Attention, batch, heads, new, seq, head_dim, kv_heads, dtype, causal=prefill)
            axes = {"mbs": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
            found.rows.append(Row(work, latency_us, provider, Place(axes, "attention"), where=f"line {row.line}"))


def _read_collective(row: CsvRow, dtype: str, found: Rows) -> None:
    op, gpus, size = row.text("collective"), row.integer("num_workers"), row.integer("size")
    nodes = max(1, gpus // max(1, row.integer("devices_per_node")))
    for _, latency_us in _medians(row):
        work = row.made(Collective, op, size, gpus, dtype=dtype, num_nodes=nodes)
        at = Place({"message_bytes": size, "num_gpus": gpus, "num_nodes": nodes}, op)
        found.rows.append(Row(work, latency_us, "nccl", at, where=f"line {row.line}"))


#: kind: (a column that only this kind has, the columns it needs, the reader of a row)
_KINDS: dict[str, tuple[str, tuple[str, ...], Callable[[CsvRow, str, Rows], None]]] = {
    "mlp": ("n_expanded_embd", _MLP_KEYS, _read_mlp),
    "attention": ("kv_cache_size", _ATTENTION_KEYS, _read_attention),
    "collectives": ("collective", _COLLECTIVE_KEYS, _read_collective),
}


def origin_of(path: Path, kind: str, *, run_id: str | None = None) -> Origin:
    caveats = ("imported: one median per shape, its spread, clock and cache state not recorded",)
    what, software = f"Vidur {kind} profile, ", {"vidur": "not stated"}
    return file_origin(path, "vidur", kind, run_id, what, software=software, caveats=caveats)
