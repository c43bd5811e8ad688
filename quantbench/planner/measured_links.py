"""The links of a cluster from collectives that were measured on it (`quantbench comm`), instead of public tables."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from quantbench.latency.interconnect import Cluster, Link
from quantbench.workload import Collective, Workload

# A link is a curve: one size says nothing of the others.
_FEWEST_SIZES = 2


def with_measured_links(
    cluster: Cluster, measured: Iterable[tuple[Workload, float]], source: str, *, between_nodes: bool = True
) -> Cluster:
    """`cluster` with what was measured in place of what was assumed; the same where nothing of use was.

    measured: collectives with their times in microseconds. All-reduces inside a node become its links, by number of
    GPUs. The best bus bandwidth of all-reduces between nodes becomes the node's rate: a ring leaves a node once, so its
    adapters carry what each GPU sends. source: where the times are from, for provenance. between_nodes: whether to take
    that rate; not where constants were fitted against the stated one.
    """
    times: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    node_gb_per_s = 0.0
    for work, us in measured:
        if not isinstance(work, Collective) or work.op != "all_reduce":
            continue
        if work.num_nodes > 1 and between_nodes:
            node_gb_per_s = max(node_gb_per_s, work.bus_bytes / us / 1e3)
        elif work.num_nodes == 1:
            times[work.num_gpus][work.bus_bytes].append(us)
    links = {gpus: _link(by_size) for gpus, by_size in times.items() if len(by_size) >= _FEWEST_SIZES}
    if not links and not node_gb_per_s:
        return cluster
    said = [f"all-reduce over {', '.join(map(str, sorted(links)))} GPUs of a node"] if links else []
    said += ["between nodes"] if node_gb_per_s else []
    return replace(
        cluster,
        links={**cluster.links, **links},
        node_gb_per_s=node_gb_per_s or cluster.node_gb_per_s,
        source=f"{cluster.source}; {' and '.join(said)} from {source}",
    )


def _link(by_size: dict[int, list[float]]) -> Link:
    """A curve through medians; larger messages never take less time, whatever a noisy point says."""
    sizes = sorted(by_size)
    times_us, longest = [], -math.inf
    for size in sizes:
        longest = max(longest, median(by_size[size]))
        times_us.append(longest)
    return Link(tuple(map(float, sizes)), tuple(times_us))
