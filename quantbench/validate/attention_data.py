"""Attention rows of the public tables, as arrays, with the splits that judge a model by."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantbench.importers import aiconfigurator
from quantbench.latency.attention_cost_model import AttentionShapes
from quantbench.workload import Attention

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_SITE_SEED = 0
#: tables with rows for a fit: context attention writes its keys and values into a cache, encoder attention does not
KINDS = {"context_attention": True, "encoder_attention": False}


@dataclass(frozen=True)
class AttentionTable:
    """Measured attention of one provider on one device. sources: table → its rows and sha256, for provenance."""

    shapes: AttentionShapes
    latency_us: FloatArray
    cache_write: BoolArray
    sources: dict[str, dict[str, object]]

    def __len__(self) -> int:
        return len(self.latency_us)


def read_attention(device: str, *, dtype: str = "bf16", root: Path | None = None) -> AttentionTable:
    """The default tables of a device (slug, or the package's system), of each the provider with the most rows."""
    tables, _ = aiconfigurator.find_tables(device, kinds=["context_attention"], root=root)
    more, _ = aiconfigurator.find_tables(device, kinds=["gemm", "encoder_attention"], root=root)
    tables += [table for table in more if table.kind == "encoder_attention"]
    works: list[Attention] = []
    times: list[float] = []
    writes: list[bool] = []
    sources: dict[str, dict[str, object]] = {}
    for table in tables:
        rows = aiconfigurator.read_rows(table, dtypes=[dtype]).rows
        if not rows:
            continue
        provider = Counter(row.provider for row in rows).most_common(1)[0][0]
        kept = [row for row in rows if row.provider == provider]
        works += [row.workload for row in kept if isinstance(row.workload, Attention)]
        times += [row.latency_us for row in kept]
        writes += [KINDS[table.kind]] * len(kept)
        origin = aiconfigurator.origin_of(table)
        sources[origin.source] = {"provider": provider, "rows": len(kept), "sha256": origin.options["sha256"]}
    return AttentionTable(AttentionShapes.of(works), np.array(times), np.array(writes), sources)


def sites_of(shapes: AttentionShapes) -> IntArray:
    """A number for each row, the same for rows that share heads, kv_heads, head_dim and mask."""
    what = np.stack([shapes.heads, shapes.kv_heads, shapes.head_dim, shapes.causal])
    return np.asarray(np.unique(what, axis=1, return_inverse=True)[1].ravel())


def held_out(shapes: AttentionShapes, train: int, seed: int) -> tuple[IntArray, IntArray]:
    """(train, test) rows: half of the sites are the test, the same half for every seed; `train` rows come from the
    other half, chosen by the seed."""
    site = sites_of(shapes)
    order = np.random.default_rng(_SITE_SEED).permutation(site.max() + 1)
    is_test = np.isin(site, order[: len(order) // 2])
    pool = np.random.default_rng(seed).permutation(np.flatnonzero(~is_test))
    return pool[:train], np.flatnonzero(is_test)
