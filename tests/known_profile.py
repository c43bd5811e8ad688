"""A profile of known figures, for the tests that load exports with their consumers' packages."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantbench.device import lookup
from quantbench.files import open_text
from quantbench.profile.profile import Profile
from quantbench.profile.schema import KnownCliff, Provenance
from quantbench.profile.table import LAYOUTS, Table
from quantbench.workload import Gemm

#: (m, n, k) → µs: a wave edge after 128, and sizes around others
GEMMS = {
    (64, 4096, 4096): 28.125, (128, 4096, 4096): 36.9375, (129, 4096, 4096): 63.3, (256, 4096, 4096): 65.5,
    (2048, 4096, 4096): 320.1, (2049, 4096, 4096): 411.7, (4096, 4096, 4096): 605.123456789, (1, 12288, 4096): 70.25,
    (1, 14336, 14336): 260.5, (8192, 8192, 8192): 4400.5, (16384, 8192, 8192): 8700.25, (8, 16384, 16384): 350.5,
}  # fmt: skip
#: (batch, heads, kv_heads, seq_q, seq_k, head_dim, causal) → µs
ATTENTIONS = {
    (1, 32, 8, 1024, 1024, 128, True): 120.5, (1, 32, 8, 1025, 1025, 128, True): 141.25,
    (2, 32, 32, 2048, 2048, 128, True): 890.0, (4, 32, 8, 1, 2048, 128, False): 33.3,
    (4, 32, 8, 1, 4096, 128, False): 52.7, (8, 32, 8, 1, 2048, 128, False): 44.4,
}  # fmt: skip
#: (op, message_bytes, num_gpus, dtype, num_nodes) → µs
COLLECTIVES = {
    ("all_reduce", 2048, 2, "bf16", 1): 9.5, ("all_reduce", 4096, 2, "bf16", 1): 10.5,
    ("all_reduce", 2**28, 8, "bf16", 1): 2100.0, ("all_gather", 4096, 2, "bf16", 1): 9.0,
    ("all_reduce", 2**28, 16, "bf16", 2): 5100.0, ("send_recv", 65536, 2, "bf16", 1): 12.5,
    ("send_recv", 2**20, 2, "bf16", 1): 19.5, ("send_recv", 2**24, 2, "bf16", 1): 90.25,
    ("all_to_all", 65536, 8, "bf16", 1): 30.5,
}  # fmt: skip
SOFTMAXES = {(64, 2048, 2048): 420.0, (96, 4096, 4096): 2400.0}


def _times(us: float, grade: str = "B", origin: str = "measured") -> dict[str, Any]:
    return {
        "latency_us": us,
        "low_us": us * 0.99,
        "high_us": us * 1.01,
        "grade": grade,
        "origin": origin,
    }


def table(kind: str, rows: Sequence[dict[str, Any]]) -> Table:
    """A table of rows in any order."""
    return Table.of(kind, {name: [row[name] for row in rows] for name in LAYOUTS[kind].names})


def gemm_row(m: int, n: int, k: int, us: float, **other: Any) -> dict[str, Any]:
    """A product as torch ran it."""
    row = {"m": m, "n": n, "k": k, "batch": 1, "dtype": "bf16", "layout": "nt", "provider": "torch.matmul",
           "kernel": "", "block_m": 0, "block_n": 0, "split_k": 0}  # fmt: skip
    return {**row, **_times(us), **other}


def known_tables() -> dict[str, Table]:
    """Tables of the figures above."""
    attention_names = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim", "causal")
    collective_names = ("op", "message_bytes", "num_gpus", "dtype", "num_nodes")
    return {
        "gemm": table("gemm", [gemm_row(*shape, us) for shape, us in GEMMS.items()]),
        "attention": table("attention", [
            {**dict(zip(attention_names, shape, strict=True)), "dtype": "bf16", "direction": "forward",
             "provider": "torch.sdpa", **_times(us)}
            for shape, us in ATTENTIONS.items()
        ]),
        "collective": table("collective", [
            {**dict(zip(collective_names, shape, strict=True)), "provider": "nccl", **_times(us)}
            for shape, us in COLLECTIVES.items()
        ]),
        "softmax": table("softmax", [
            {**dict(zip(("batch", "rows", "cols"), shape, strict=True)), "dtype": "bf16", "mask": "causal",
             "direction": "forward", "provider": "triton.fused", **_times(us)}
            for shape, us in SOFTMAXES.items()
        ]),
    }  # fmt: skip


def known_profile(tables: dict[str, Table] | None = None, gpu: str = "a100-sxm4-80gb") -> Profile:
    """A profile with one cliff of a single curve and one of many."""
    tables = known_tables() if tables is None else tables
    cliffs = (
        KnownCliff("m", 128, 129, 1.7, 1.6, 1.8, "gemm", "torch.matmul", "gemm bf16 nt", "wave",
                   before=Gemm(128, 4096, 4096, layout="nt"), after=Gemm(129, 4096, 4096, layout="nt")),
        KnownCliff("m", 1024, 1025, 1.2, 1.1, 1.3, "gemm", "torch.matmul", "gemm bf16 nt", "wave", num_curves=4),
    )  # fmt: skip
    return Profile(lookup(gpu), {"torch": "2.11"}, Provenance("0.1.0"), tables, cliffs=cliffs)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, also of a compressed one."""
    with open_text(path) as file:
        return list(csv.DictReader(file))
