"""Vidur's profiling files: as its source tree has them (CSV), and as its PyPI release 0.0.26 downloads them (.csv.xz
with a config.json). Times are in milliseconds.

Its random forests learn a model's operations over num_tokens, so each op needs a time in every row: measured where the
profile has the shape, else the profile's model moved through its rows. Rows stand at powers of two, at every measured
size, and on both sides of the edges that straight lines would miss.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from typing import Any

import numpy as np

from quantbench.errors import UnsupportedError
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile.blindspots import IntArray, Site, choose, places_between
from quantbench.profile.exporters.achieved import achieved
from quantbench.profile.exporters.modelled import GemmTimes, moved_through
from quantbench.profile.exporters.options import WHO, Exported, ExportOptions
from quantbench.profile.exporters.rows import attentions, collectives, dtype_of, products
from quantbench.profile.exporters.vidur_attention import attention_rows
from quantbench.profile.exporters.vidur_model import VidurModel, has_sku, skus
from quantbench.profile.exporters.vidur_statistics import statistics
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table

Rows = list[dict[str, Any]]

_TOKENS = tuple(2**power for power in range(13))


def export(profile: Profile, options: ExportOptions, out: Exported) -> None:
    """Write `data/profiling/…` (source tree), `compute/` and `network/` (PyPI release)."""
    device = profile.device
    if device.kind != "cuda":
        raise UnsupportedError(WHO, f"{device.name} is a {device.kind}", "a GPU, for Vidur")
    model = VidurModel.of(options.model)
    device_sku, node_sku = skus(device.name)
    if not has_sku(device.name):
        out.notes.append(f"Vidur 0.0.26 has no SKU for {device.name}: the files say {device_sku}")
    dtype = dtype_of(profile, options)
    own = ExportOptions(options.provider, options.layout, dtype)
    table = products(profile, own, out)
    mlp = _mlp_rows(profile, table, model, dtype, options, out)
    attention = attention_rows(profile, attentions(profile, own, out), model, dtype, options.tensor_parallel, out)
    for name, rows in (("mlp", mlp), ("attention", attention)):
        text = _csv(rows)
        out.write(text, "data", "profiling", "compute", device_sku, *model.source_name.split("/"), f"{name}.csv")
        out.write(lzma.compress(text.encode()), "compute", f"{name}.csv.xz")
        out.rows[name] = len(rows)
    out.leave_out("softmax: no place for it there", len(profile.tables["softmax"]))
    config = {"model": model.name, "device_sku": device_sku}
    out.write(json.dumps(config) + "\n", "compute", "config.json")
    _network(profile, node_sku, out)
    out.notes.append(f"{dtype} figures, where Vidur profiles in fp16")
    out.use.append(
        f"snapshot_download of vidur must return {out.folder}/compute and {out.folder}/network: upload both as datasets"
    )


def _mlp_rows(
    profile: Profile, table: Table, model: VidurModel, dtype: str, options: ExportOptions, out: Exported
) -> Rows:
    times = GemmTimes(profile, dtype)
    passes = _PassTimes(profile, options, out)
    rows: Rows = []
    measured = modelled = 0
    for tp in options.tensor_parallel:
        sites = {op: (work.n, work.k) for op, work in model.products(1, tp).items()}
        own = {op: table.where((table["n"] == n) & (table["k"] == k)) for op, (n, k) in sites.items()}
        tokens = _tokens(times, sites, own, options.bound, model.max_model_len)
        columns = {op: moved_through(times, tokens, *sites[op], own[op]["m"], own[op]["latency_us"]) for op in sites}
        found = sum(int(np.isin(tokens, of["m"]).sum()) for of in own.values())
        measured, modelled = measured + found, modelled + len(tokens) * len(sites) - found
        for i, count in enumerate(tokens.tolist()):
            us = {op: float(values[i]) for op, values in columns.items()}
            us |= {op: passes.latency_us(moved) for op, moved in model.passes_bytes(count, tp).items()}
            rows.append({**statistics(us), **model.keys(tp), "num_tokens": count})
    out.notes.append(f"of the products' times {measured:,} were measured and {modelled:,} are modelled")
    out.notes.append("emb, layernorm, attn_rope, mlp_act and add are a pass over memory each, modelled")
    return rows


def _tokens(
    times: GemmTimes, sites: dict[str, tuple[int, int]], own: dict[str, Table], bound: float, most: int
) -> IntArray:
    """Sizes at which rows stand: see the module."""
    grid = np.array([t for t in _TOKENS if t <= most], dtype=np.int64)
    measured = [of["m"][of["m"] <= most] for of in own.values()]
    grid = np.unique(np.concatenate([grid, *measured]))
    places = places_between(grid)
    in_grid = np.isin(places, grid)
    picked = choose(
        [
            Site(n, k, places, moved_through(times, places, n, k, own[op]["m"], own[op]["latency_us"]), in_grid)
            for op, (n, k) in sites.items()
        ],
        bound,
        "max",
    )
    return np.asarray(places[in_grid | np.logical_or.reduce(picked.added)], dtype=np.int64)


class _PassTimes:
    """A pass over memory: the launch of a small kernel, and bytes at the bandwidth that was achieved."""

    def __init__(self, profile: Profile, options: ExportOptions, out: Exported) -> None:
        reached = achieved(profile, options, Exported.nowhere())
        self._bytes_per_us = reached.gb_per_s * 1e3
        self._launch_us = float(np.exp(SoftmaxModel.prior(profile.device).parameters[0]))

    def latency_us(self, moved_bytes: int) -> float:
        """µs of a pass that reads and writes so many bytes."""
        return self._launch_us + moved_bytes / self._bytes_per_us


def _network(profile: Profile, sku: str, out: Exported) -> None:
    """all_reduce and send_recv, where they were measured."""
    table = collectives(profile, out)
    most = int((table["num_gpus"] // table["num_nodes"]).max()) if len(table) else 0
    written = False
    for op in ("all_reduce", "send_recv"):
        rows: Rows = []
        seen: set[tuple[int, ...]] = set()
        for row in table.where(table["op"] == op).rows():
            per_node = row["num_gpus"] // row["num_nodes"]
            key = (row["num_gpus"], per_node, row["message_bytes"])
            if key in seen:  # the same bytes in another dtype
                out.leave_out("the same bytes in another dtype", 1)
                continue
            seen.add(key)
            rows.append({
                **statistics({op: row["latency_us"]}), "rank": 0, "num_workers": row["num_gpus"],
                "size": row["message_bytes"], "collective": op, "devices_per_node": per_node,
                "max_devices_per_node": most,
            })  # fmt: skip
        if not rows:
            out.notes.append(f"{op} was not measured: no {op}.csv (Vidur needs it beyond one GPU)")
            continue
        text, written = _csv(rows), True
        out.write(text, "data", "profiling", "network", sku, f"{op}.csv")
        out.write(lzma.compress(text.encode()), "network", f"{op}.csv.xz")
        out.rows[op] = len(rows)
    if written:
        out.write(json.dumps({"sku": sku}) + "\n", "network", "config.json")
    out.leave_out("a collective that Vidur has no file for",
                  int((~np.isin(table["op"], ["all_reduce", "send_recv"])).sum()))  # fmt: skip


def _csv(rows: Rows) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
