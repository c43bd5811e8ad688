"""Exports a profile as Vidur's profiling files, with times in milliseconds.

The files are compressed CSV files with a config.json, as Vidur's PyPI release 0.0.26 downloads
them. Vidur needs the time of each operation in every row. GEMM times are measured, or predicted and
scaled to match measured times. Times of memory-bound operations are computed from the bytes that
the operations move.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from quantbench.errors import InputError
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile.exporters.modelled import GemmTimes, attention_times
from quantbench.profile.exporters.options import (
    WHO,
    Exported,
    ExportOptions,
    Rows,
    collectives,
    csv_text,
    dtype_of,
    forward_attention,
    keep,
    of_provider,
    products,
    require_gpu,
)
from quantbench.profile.exporters.rates import achieved
from quantbench.profile.linear_interpolation import BOUND, IntArray
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload import Attention, Gemm, TransformerShape
from quantbench.workload.presets import preset

# Names and sizes are from vidur/config/{model,device_sku,node_sku}_config.py of Vidur 0.0.26.
#: Maps a preset to Vidur's (name, vocab_size, max_model_len).
MODELS = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", 32768, 4096),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", 32768, 4096),
    "llama-3-8b": ("meta-llama/Llama-3-8B", 128256, 4096),
    "llama-3-70b": ("meta-llama/Llama-3-70B", 128256, 8192),
}
#: Maps a device slug to Vidur's names of the device and the node. For another device, the files
#: have the slug as both names, which must first be added to Vidur.
_SKUS = {
    "a100-sxm4-80gb": ("a100", "a100_dgx"), "h100-sxm5-80gb": ("h100", "h100_dgx"),
    "l40-48gb": ("l40", "l40_pcie"),
    "a40-48gb": ("a40", "a40_pairwise_nvlink"),
}  # fmt: skip


#: Maps quantbench's name of a layer's GEMM to Vidur's name.
_GEMM_OPS = {
    "qkv": "attn_pre_proj",
    "proj": "attn_post_proj",
    "mlp_up": "mlp_up_proj",
    "mlp_up_gate": "mlp_up_proj",
    "mlp_down": "mlp_down_proj",
}
#: Collectives for which Vidur has files.
_NETWORK_OPS = ("all_reduce", "send_recv")
#: Numbers of tokens in mlp.csv, before measured sizes and sizes at tile edges are added.
_TOKENS = tuple(2**power for power in range(13))
#: Tokens per block of the key/value cache. This is Vidur's default (CacheConfig.block_size).
_BLOCK_SIZE = 16
#: Batch sizes of modelled decoding, and sequence lengths of modelled prompts and decoding.
_MODEL_BATCHES = tuple(2**power for power in range(8))
_MODEL_SEQS = tuple(2**power for power in range(4, 13))


def export(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Writes Vidur's profiling files to the folders `compute/` and `network/`.

    Raises InputError if options.model is not a model that Vidur has.
    """
    require_gpu(profile, "Vidur")
    slug = profile.device.name
    model = VidurModel.of(options.model)
    device_sku, node_sku = _SKUS.get(slug, (slug.replace("-", "_"),) * 2)
    if slug not in _SKUS:
        out.notes.append(f"Vidur 0.0.26 has no SKU for {slug}: the files say {device_sku}")
    dtype = dtype_of(profile, options)
    options = replace(options, dtype=dtype, tensor_parallel=options.tensor_parallel or (1,))
    mlp = _mlp_rows(profile, products(profile, options, out), model, options, out)
    measured = of_provider(forward_attention(profile, options, out), options.provider, out)
    attention = _attention_rows(profile, measured, model, options, out)
    _write_csv(mlp, out, "compute", "mlp")
    _write_csv(attention, out, "compute", "attention")
    out.leave_out("softmax: no place for it there", len(profile.tables["softmax"]))
    out.write(
        json.dumps({"model": model.name, "device_sku": device_sku}) + "\n", "compute", "config.json"
    )
    _write_network(profile, node_sku, out)
    out.notes.append(f"{dtype} figures, where Vidur profiles in fp16")
    out.use.append(
        f"snapshot_download of vidur must return {out.folder}/compute and {out.folder}/network: "
        "upload both as datasets"
    )


def _mlp_rows(
    profile: Profile, table: Table, model: VidurModel, options: ExportOptions, out: Exported
) -> Rows:
    """Returns the rows of mlp.csv, one for each number of tokens and tensor-parallel degree.

    A row has the times of the model's GEMMs and memory-bound ops.

    table: measured GEMMs.
    """
    times = GemmTimes(profile, options.dtype)
    # The time of a memory-bound op is the launch time of a small kernel plus the op's bytes at the
    # achieved bandwidth. The log of the launch time is the first parameter of the softmax model's
    # prior (its parameters before it is fitted to rows).
    bytes_per_us = achieved(profile, options, Exported()).gb_per_s * 1e3
    launch_us = float(np.exp(SoftmaxModel.prior(profile.device).parameters[0]))
    rows: Rows = []
    measured = 0
    total = 0
    for tp in options.tensor_parallel:
        of_op: dict[str, tuple[int, int, Table]] = {}
        grid = np.array(_TOKENS)
        for op, (n, k) in model.products(tp).items():
            timed = table.matching(n=n, k=k)
            of_op[op] = (n, k, timed)
            grid = np.union1d(grid, timed["m"])
        grid = grid[grid <= model.max_model_len]
        sites = {op: times.site(n, k, grid, timed) for op, (n, k, timed) in of_op.items()}
        kept = np.logical_or.reduce(
            [one.in_table | one.rows_to_add(BOUND) for one in sites.values()]
        )
        tokens = sites["attn_pre_proj"].m[kept]
        latency_us = {op: site.expected_us[kept] for op, site in sites.items()}
        for op, moved in model.passes_bytes(tokens, tp).items():
            latency_us[op] = launch_us + moved / bytes_per_us
        for _, _, timed in of_op.values():
            measured += int(np.isin(tokens, timed["m"]).sum())
            total += len(tokens)
        for i, count in enumerate(tokens.tolist()):
            of_row = {op: float(us[i]) for op, us in latency_us.items()}
            rows.append({**_statistics(of_row), **model.keys(tp), "num_tokens": count})
    out.notes.append(
        f"of the products' times {measured:,} were measured and {total - measured:,} are modelled"
    )
    out.notes.append(
        "emb, layernorm, attn_rope, mlp_act and add are a pass over memory each, modelled"
    )
    return rows


def _attention_rows(
    profile: Profile, table: Table, model: VidurModel, options: ExportOptions, out: Exported
) -> Rows:
    """Returns the rows of attention.csv: prompts of one sequence, and batched decoding (seq_q = 1).

    The rows of prompts are modelled if no prompt was measured with the model's heads per GPU. The
    same holds for decoding.

    table: measured attention.
    """
    rows: Rows = []
    taken = 0
    for tp in options.tensor_parallel:
        heads, kv_heads = model.heads(tp)
        head_dim = model.shape.head_dim
        of_model = table.matching(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        prompts = of_model.matching(causal=True, batch=1)
        decodes = of_model.matching(causal=False, seq_q=1)
        for prefill, phase in ((True, prompts), (False, decodes)):
            taken += len(phase)
            if not len(phase):
                what = "prompts" if prefill else "decoding"
                out.notes.append(f"attention of {what} at TP {tp} is modelled")
            shapes = _model_attention(model, tp, options.dtype, prefill=prefill)
            timed = attention_times(profile, phase, shapes)
            for work, us, provider in zip(*timed, strict=True):
                row = {
                    **_statistics({"attn_prefill" if prefill else "attn_decode": us}),
                    "n_embd": model.shape.hidden,
                    "n_q_head": model.shape.heads,
                    "n_kv_head": model.shape.kv_heads,
                    "block_size": _BLOCK_SIZE,
                    "num_tensor_parallel_workers": tp,
                    "max_model_len": model.max_model_len,
                    "batch_size": work.batch,
                    "prefill_chunk_size": work.seq_q if prefill else 0,
                    "kv_cache_size": work.seq_k - work.seq_q,
                    "is_prefill": prefill,
                    "attention_backend": provider,
                }
                rows.append(row)
    out.leave_out(
        "attention of other heads, of several prompts, or not one query to all keys",
        len(table) - taken,
    )
    return rows


def _model_attention(model: VidurModel, tp: int, dtype: str, *, prefill: bool) -> list[Attention]:
    """Returns the attention shapes to model.

    Prompts have each length in _MODEL_SEQS, and one token more, where an additional tile starts.
    Decoding has each batch in _MODEL_BATCHES, with 1 key and with each number of keys in
    _MODEL_SEQS. Lengths above the model's max_model_len are left out.

    prefill: True for prompts, False for decoding.
    """
    heads, kv_heads = model.heads(tp)
    common: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": model.shape.head_dim,
        "dtype": dtype,
        "causal": prefill,
    }
    seqs = [seq for seq in _MODEL_SEQS if seq <= model.max_model_len]
    if prefill:
        pairs = product(seqs, (0, 1))
        return [Attention(1, seq_q=s + more, seq_k=s + more, **common) for s, more in pairs]
    sizes = product(_MODEL_BATCHES, (1, *seqs))
    return [Attention(batch, seq_q=1, seq_k=seq, **common) for batch, seq in sizes]


def _write_network(profile: Profile, sku: str, out: Exported) -> None:
    """Writes the measured collectives that Vidur has files for, and their config.json.

    Vidur's files have no dtype. If rows of several dtypes have equal bytes and GPUs, only the first
    row is written.

    sku: Vidur's name of the node.
    """
    table = collectives(profile, out)
    per_node = table["num_gpus"] // table["num_nodes"]
    for op in _NETWORK_OPS:
        rows: dict[tuple[int, ...], dict[str, Any]] = {}
        for row in table.matching(op=op).rows():
            key = (row["num_gpus"], row["num_gpus"] // row["num_nodes"], row["message_bytes"])
            if key in rows:
                out.leave_out("the same bytes in another dtype", 1)
                continue
            rows[key] = {
                **_statistics({op: row["latency_us"]}),
                "rank": 0,
                "num_workers": key[0],
                "size": key[2],
                "collective": op,
                "devices_per_node": key[1],
                "max_devices_per_node": int(per_node.max()),
            }
        if not rows:
            out.notes.append(f"{op} was not measured: no {op}.csv (Vidur needs it beyond one GPU)")
            continue
        _write_csv(list(rows.values()), out, "network", op)
    if out.rows.keys() & _NETWORK_OPS:
        out.write(json.dumps({"sku": sku}) + "\n", "network", "config.json")
    keep(table, np.isin(table["op"], _NETWORK_OPS), "a collective that Vidur has no file for", out)


def _statistics(latency_us: dict[str, float]) -> dict[str, float]:
    """Returns Vidur's columns min, max, mean, median and std for each op's time, in ms.

    Each op has a single time, so its standard deviation is 0.

    latency_us: time of each op in µs.
    """
    columns = {}
    for op, us in latency_us.items():
        for name in ("min", "max", "mean", "median"):
            columns[f"time_stats.{op}.{name}"] = us / 1e3
        columns[f"time_stats.{op}.std"] = 0.0
    return columns


def _write_csv(rows: Rows, out: Exported, folder: str, name: str) -> None:
    out.write(lzma.compress(csv_text(rows).encode()), folder, f"{name}.csv.xz")
    out.rows[name] = len(rows)


@dataclass(frozen=True)
class VidurModel:
    """A model, with the sizes that Vidur's configuration gives it.

    name: name in Vidur.
    shape: sizes of the model's layers.
    vocab: vocabulary size in Vidur.
    max_model_len: longest sequence in Vidur.
    """

    name: str
    shape: TransformerShape
    vocab: int
    max_model_len: int

    @classmethod
    def of(cls, text: str) -> VidurModel:
        """Returns the model of a preset. Raises InputError if Vidur has no such model."""
        if text not in MODELS:
            given = f"--model {text}" if text else "no --model (a row is of one model there)"
            raise InputError(WHO, given, "one of " + ", ".join(MODELS))
        name, vocab, max_model_len = MODELS[text]
        shape = preset(text)
        return cls(name, replace(shape, gate_fused=shape.gated), vocab, max_model_len)

    def keys(self, tp: int) -> dict[str, int | bool]:
        """Returns the columns that identify the model in mlp.csv."""
        shape = self.shape
        return {
            "n_head": shape.heads,
            "n_kv_head": shape.kv_heads,
            "n_embd": shape.hidden,
            "n_expanded_embd": shape.ffn,
            "vocab_size": self.vocab,
            "use_gated_mlp": shape.gated,
            "num_tensor_parallel_workers": tp,
        }

    def products(self, tp: int) -> dict[str, tuple[int, int]]:
        """Returns (n, k) of each op's GEMM on one GPU, by Vidur's name of the op."""
        found = {}
        for op in replace(self.shape, tp=tp).ops(backward=False):
            if op.name in _GEMM_OPS and isinstance(op.workload, Gemm):
                found[_GEMM_OPS[op.name]] = (op.workload.n, op.workload.k)
        return found

    def heads(self, tp: int) -> tuple[int, int]:
        """Returns the numbers of query heads and of key/value heads per GPU."""
        return self.shape.heads // tp, replace(self.shape, tp=tp).kv_heads_per_gpu

    def passes_bytes(self, tokens: IntArray, tp: int) -> dict[str, IntArray]:
        """Returns the bytes that one GPU reads and writes, (rows,), for each memory-bound op.

        Elements have 16 bits. Norms, residuals and the embedding are not split over GPUs.

        tokens: (rows,), numbers of tokens in a batch.
        """
        shape = self.shape
        rotated = sum(self.heads(tp)) * shape.head_dim
        hidden = shape.hidden
        ffn = shape.ffn // tp
        per_token = {
            "emb": 2 * hidden,
            "input_layernorm": 2 * hidden,
            "post_attention_layernorm": 2 * hidden,
            "attn_rope": 2 * rotated,
            "mlp_act": (3 if shape.gated else 2) * ffn,
            "add": 3 * hidden,
        }
        return {op: tokens * elements * 2 for op, elements in per_token.items()}
