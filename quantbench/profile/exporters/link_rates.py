"""What connects GPUs, as consumers ask for it: measured where the profile has collectives, else as stated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantbench.latency.interconnect import NODE_LATENCY_S, Cluster, host_link, reference_cluster, stated_link
from quantbench.profile.exporters.options import Exported
from quantbench.profile.exporters.rows import collectives
from quantbench.profile.profile import Profile
from quantbench.workload import Collective


@dataclass(frozen=True)
class LinkRates:
    """One direction per GPU, 1e9 bytes a second. inside, between: nodes; host: its slot. inside_latency_s,
    between_latency_s: of a small message. share: what a large all-reduce reaches of `inside`, at most 1."""

    gpus_per_node: int
    inside_gb_per_s: float
    between_gb_per_s: float
    inside_latency_s: float
    between_latency_s: float
    share: float
    host_gb_per_s: float


def link_rates(profile: Profile, out: Exported) -> LinkRates:
    """Rates of the profile's GPU in its maker's reference system, with what the profile measured of them."""
    cluster = reference_cluster(profile.device)
    stated, source = stated_link(profile.device)
    reached, latency_us = _measured(profile, out) or _known(cluster)
    out.notes.append(f"links: {cluster.source}; {source}")
    return LinkRates(
        gpus_per_node=cluster.gpus_per_node,
        inside_gb_per_s=stated,
        between_gb_per_s=cluster.gpu_gb_per_s,
        inside_latency_s=latency_us / 1e6,
        between_latency_s=NODE_LATENCY_S,
        share=min(1.0, reached / stated),
        host_gb_per_s=host_link(profile.device)[0],
    )


def _measured(profile: Profile, out: Exported) -> tuple[float, float] | None:
    """(bus bandwidth of the largest all-reduce inside a node in GB/s, latency of the smallest message in µs)."""
    table = collectives(profile, Exported.nowhere())
    rows = np.flatnonzero((table["op"] == "all_reduce") & (table["num_nodes"] == 1)).tolist()
    if not rows:
        return None
    largest = max(rows, key=lambda row: (table["message_bytes"][row], table["num_gpus"][row]))
    smallest = min(rows, key=lambda row: (table["message_bytes"][row], table["num_gpus"][row]))
    work = table.where(np.array([largest])).workloads()[0]
    assert isinstance(work, Collective)
    gb_per_s = work.bus_bytes / float(table["latency_us"][largest]) / 1e3
    out.notes.append(f"inside a node: measured, {work} at {gb_per_s:.4g} GB/s on the bus")
    return gb_per_s, float(table["latency_us"][smallest])


def _known(cluster: Cluster) -> tuple[float, float]:
    """The same of the reference system, from public NCCL tables where there are any."""
    link = cluster.intra_node(cluster.gpus_per_node)
    return link.bus_bytes[-1] / link.latency_us[-1] / 1e3, link.latency_us[0]
