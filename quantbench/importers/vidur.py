"""Vidur's profiling files: attention.csv, mlp.csv, all_reduce.csv and send_recv.csv (plain, .gz or .xz).

Times are in milliseconds; each cell of `time_stats.<op>.median` becomes one sample (Vidur itself uses the medians
only). A row holds the model's whole sizes and the tensor-parallel degree; what one GPU computed follows from both.
Source: vidur/profiling of https://github.com/microsoft/vidur (mlp_impl.py, attention_wrapper.py,
collectives_wrapper.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from quantbench.errors import InputError
from quantbench.files import read_bytes
from quantbench.importers.csv_file import CsvFile, CsvRow
from quantbench.importers.rows import Row, Rows, place
from quantbench.importers.runs import Origin
from quantbench.workload import Attention, Collective, Gemm, Workload

_WHO = "import vidur"
#: what Vidur profiles in (mlp_wrapper.py: the model is cast to float16)
DEFAULT_DTYPE = "fp16"

#: Vidur's names of a layer's products → ours
GEMM_OPS = {"attn_pre_proj": "qkv", "attn_post_proj": "proj", "mlp_up_proj": "mlp_up", "mlp_down_proj": "mlp_down"}
_MLP_KEYS = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp", "num_tokens",
             "num_tensor_parallel_workers")  # fmt: skip
_ATTENTION_KEYS = ("n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers", "batch_size",
                   "prefill_chunk_size", "kv_cache_size", "is_prefill", "attention_backend")  # fmt: skip
_COLLECTIVE_KEYS = ("num_workers", "size", "collective", "devices_per_node")


def read_rows(path: Path, *, dtype: str = DEFAULT_DTYPE) -> tuple[str, Rows]:
    """The kind of file (`mlp`, `attention`, `collectives`), told by its columns, and its rows."""
    file = CsvFile(_WHO, path)
    for kind, (marker, keys, read) in _KINDS.items():
        if marker in file.columns:
            file.require(keys)
            found = Rows()
            for row in file.rows():
                read(file, row, dtype, found)
            return kind, found
    expected = "Vidur's mlp, attention, all_reduce or send_recv columns"
    there = f"the columns {', '.join(file.columns)[:120]}" if file.columns else "no columns"
    raise InputError(_WHO, f"{path.name} has {there}", expected)


def _per_gpu(row: CsvRow, column: str, tp: int, *, replicate: bool = False) -> int:
    """A size divided among the tensor-parallel workers; key/value heads are replicated where they are too few."""
    value = row.integer(column)
    if replicate and value < tp:
        return 1
    if value % tp:
        raise row.error(column, f"a multiple of num_tensor_parallel_workers = {tp}")
    return value // tp


def _medians(file: CsvFile, row: CsvRow) -> Iterator[tuple[str, float]]:
    """(op, µs) of every operation that the row has a time of."""
    for column in file.columns:
        if column.startswith("time_stats.") and column.endswith(".median") and row.text(column):
            yield column.split(".")[1], row.number(column) * 1e3


def _read_mlp(file: CsvFile, row: CsvRow, dtype: str, found: Rows) -> None:
    tp, tokens, hidden = (row.integer(c) for c in ("num_tensor_parallel_workers", "num_tokens", "n_embd"))
    heads, kv_heads = (_per_gpu(row, c, tp, replicate=c == "n_kv_head") for c in ("n_head", "n_kv_head"))
    head_dim, ffn = hidden // row.integer("n_head"), _per_gpu(row, "n_expanded_embd", tp)
    # A gated MLP computes gate and up in one product of twice the width.
    up = 2 * ffn if row.flag("use_gated_mlp") else ffn
    shapes = {
        "attn_pre_proj": ((heads + 2 * kv_heads) * head_dim, hidden), "attn_post_proj": (hidden, heads * head_dim),
        "mlp_up_proj": (up, hidden), "mlp_down_proj": (hidden, ffn),
    }  # fmt: skip
    for op, latency_us in _medians(file, row):
        if op not in shapes:
            found.leave_out(f"op {op}: no such workload here")
            continue
        n, k = shapes[op]
        name = "mlp_up_gate" if op == "mlp_up_proj" and row.flag("use_gated_mlp") else GEMM_OPS[op]
        work = _make(row, lambda n=n, k=k: Gemm(tokens, n, k, dtype=dtype, layout="nt"))  # type: ignore[misc]
        at = place(name, m=tokens, n=n, k=k)
        found.add(Row(work, latency_us, "sarathi", at, where=f"line {row.line}"))


def _read_attention(file: CsvFile, row: CsvRow, dtype: str, found: Rows) -> None:
    tp, cached = row.integer("num_tensor_parallel_workers"), row.integer("kv_cache_size")
    heads, kv_heads = _per_gpu(row, "n_q_head", tp), _per_gpu(row, "n_kv_head", tp, replicate=True)
    prefill = row.flag("is_prefill")
    new = row.integer("prefill_chunk_size") if prefill else 1
    head_dim = row.integer("n_embd") // row.integer("n_q_head")
    provider = "sarathi." + row.text("attention_backend").removeprefix("AttentionBackend.").lower()
    for op, latency_us in _medians(file, row):
        if op != ("attn_prefill" if prefill else "attn_decode"):
            found.leave_out(f"op {op}: no such workload here")
        elif prefill and cached:
            found.leave_out("a prefix that is cached already")
        else:
            work = _make(row, lambda: Attention(
                batch=row.integer("batch_size"), heads=heads, kv_heads=kv_heads, seq_q=new, seq_k=new + cached,
                head_dim=head_dim, dtype=dtype, causal=prefill,
            ))  # fmt: skip
            at = place("attention", mbs=row.integer("batch_size"), seq=new + cached, heads=heads, kv_heads=kv_heads,
                       head_dim=head_dim)  # fmt: skip
            found.add(Row(work, latency_us, provider, at, where=f"line {row.line}"))


def _read_collective(file: CsvFile, row: CsvRow, dtype: str, found: Rows) -> None:
    op, gpus = row.text("collective"), row.integer("num_workers")
    nodes = max(1, gpus // max(1, row.integer("devices_per_node")))
    for _, latency_us in _medians(file, row):
        work = _make(row, lambda: Collective(op, row.integer("size"), gpus, dtype=dtype, num_nodes=nodes))
        at = place(op, message_bytes=row.integer("size"), num_gpus=gpus, num_nodes=nodes)
        found.add(Row(work, latency_us, "nccl", at, where=f"line {row.line}"))


def _make(row: CsvRow, make: Callable[[], Workload]) -> Workload:
    try:
        return make()
    except InputError as error:
        raise row.reason(error) from None


#: kind → (a column that only this kind has, the columns it needs, how a row is read)
_KINDS: dict[str, tuple[str, tuple[str, ...], Callable[[CsvFile, CsvRow, str, Rows], None]]] = {
    "mlp": ("n_expanded_embd", _MLP_KEYS, _read_mlp),
    "attention": ("kv_cache_size", _ATTENTION_KEYS, _read_attention),
    "collectives": ("collective", _COLLECTIVE_KEYS, _read_collective),
}


def origin_of(path: Path, kind: str, *, run_id: str | None = None) -> Origin:
    """Where the figures come from: the file, by name and content."""
    sha256 = hashlib.sha256(read_bytes(path)).hexdigest()
    return Origin(
        run_id=run_id or f"vidur-{kind}-{sha256[:8]}",
        source=f"{path.name} (Vidur {kind} profile, sha256 {sha256[:8]})",
        software={"vidur": "not stated"},
        options={"importer": "vidur", "table": kind, "file": path.name, "sha256": sha256},
        caveats=("imported: one median per shape, its spread, clock and cache state not recorded",),
    )
