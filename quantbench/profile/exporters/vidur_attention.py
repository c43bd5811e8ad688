"""Rows of Vidur's attention.csv: prompts of one sequence, and decoding (one query, seq_q = 1) of many."""

from __future__ import annotations

from typing import Any

from quantbench.profile.exporters.modelled import attention_us
from quantbench.profile.exporters.options import Exported
from quantbench.profile.exporters.vidur_model import VidurModel
from quantbench.profile.exporters.vidur_statistics import statistics
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload import Attention

#: tokens of a block of the key/value cache: Vidur's default (CacheConfig.block_size)
_BLOCK_SIZE = 16
_MODEL_BATCHES = tuple(2**power for power in range(8))
_MODEL_SEQS = tuple(2**power for power in range(4, 13))


def attention_rows(
    profile: Profile, table: Table, model: VidurModel, dtype: str, tensor_parallel: tuple[int, ...], out: Exported
) -> list[dict[str, Any]]:
    """Measured rows of the model's heads on one GPU; where a phase has none, modelled ones."""
    rows: list[dict[str, Any]] = []
    taken = 0
    for tp in tensor_parallel:
        heads, kv_heads = model.heads(tp)
        own = table.where(
            (table["heads"] == heads) & (table["kv_heads"] == kv_heads) & (table["head_dim"] == model.shape.head_dim)
        )
        measured = [
            (_of(row, dtype), row["latency_us"], row["provider"])
            for row in own.rows()
            if (row["causal"] and row["batch"] == 1) or (not row["causal"] and row["seq_q"] == 1)
        ]
        taken += len(measured)
        for prefill in (True, False):
            found = [one for one in measured if one[0].causal is prefill]
            if not found:
                works = _grid(model, tp, dtype, prefill=prefill)
                out.notes.append(f"attention of {'prompts' if prefill else 'decoding'} at TP {tp} is modelled")
                us = attention_us(profile, works).tolist()
                found = [(work, float(time), "quantbench_model") for work, time in zip(works, us, strict=True)]
            rows += [_row(work, time, provider, model, tp) for work, time, provider in found]
    out.leave_out("attention of other heads, of several prompts, or not one query to all keys", len(table) - taken)
    return rows


def _of(row: dict[str, Any], dtype: str) -> Attention:
    names = ("batch", "heads", "seq_q", "seq_k", "head_dim", "kv_heads", "causal")
    return Attention(**{name: row[name] for name in names}, dtype=dtype)


def _grid(model: VidurModel, tp: int, dtype: str, *, prefill: bool) -> list[Attention]:
    heads, kv_heads = model.heads(tp)
    seqs = [s for s in _MODEL_SEQS if s <= model.max_model_len]
    if prefill:
        both = [seq for s in seqs for seq in (s, s + 1)]
        return [Attention(1, heads, seq, seq, model.shape.head_dim, kv_heads, dtype) for seq in both]
    return [
        Attention(batch, heads, 1, seq, model.shape.head_dim, kv_heads, dtype, causal=False)
        for batch in _MODEL_BATCHES
        for seq in (1, *seqs)
    ]


def _row(work: Attention, latency_us: float, provider: str, model: VidurModel, tp: int) -> dict[str, Any]:
    prefill = work.causal
    return {
        **statistics({"attn_prefill" if prefill else "attn_decode": latency_us}),
        "n_embd": model.shape.hidden, "n_q_head": model.shape.heads, "n_kv_head": model.shape.kv_heads,
        "block_size": _BLOCK_SIZE, "num_tensor_parallel_workers": tp, "max_model_len": model.max_model_len,
        "batch_size": work.batch, "prefill_chunk_size": work.seq_q if prefill else 0,
        "kv_cache_size": 0 if prefill else work.seq_k - 1, "is_prefill": prefill, "attention_backend": provider,
    }  # fmt: skip
