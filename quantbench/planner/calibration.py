"""Loads the planner's fitted constants of each site, and replaces a cluster's stated link speeds by measured ones.

Entry points: `shipped`, which reads planner.json and returns the `Calibrations`, one `Calibration` per site; their
limits `RANGES` and `MEMORY_RANGES`; `with_measured_links`. Used by the other modules of this package, by the commands
`plan` and `predict`, by `advice.advise` and `advice.pad`, and by `tools.planner_fit`, which fits the constants.

Each site (its machines and software) has four constants for the time of an iteration and two for memory. At a site
without fitted constants, collectives take as long as in isolation, kernel launches cost no extra time and the network
runs at its stated rate.

History of the format:
1  first version.
2  `tensor_factor` replaces `compute_factor` and `fault_tensor_factor`: GEMMs run as fast as in isolation.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

from quantbench.errors import InputError
from quantbench.latency.interconnect import Cluster, Link
from quantbench.units import percent
from quantbench.workload import Collective, Workload

_WHO = "planner.json"
_FORMAT, _VERSION = "quantbench-planner", 2
#: constants of the iteration time: name → (lowest, highest) plausible value
RANGES = {
    "tensor_factor": (1.0, 10.0),
    "layer_overhead_ms": (0.0, 50.0),
    "data_parallel_share": (0.01, 1.0),
    "unaligned_share": (0.01, 16.0),
}
#: constants of the memory, likewise
MEMORY_RANGES = {"base_gib": (0.0, 20.0), "activation_slack": (0.0, 2.0)}
# A link is a curve of time over size; one size is not enough for it.
_FEWEST_SIZES = 2


@dataclass(frozen=True)
class Calibration:
    """Planner constants of one site. (`latency.gemm.cliffs.Calibration` is part of a GEMM model.)

    tensor_factor: time of a tensor-parallel collective during training over its isolated time. It is above 1 because
        GPUs wait for the slowest of them and for the hosts.
    layer_overhead_ms: time of launches and small kernels per layer and micro-batch, forward and backward.
    data_parallel_share: share of the bandwidth of a node's network adapters that data-parallel traffic reaches.
    unaligned_share: rate of batched GEMMs with rows not aligned to 16 bytes, as a share of the GPU's fp32 peak.
    base_gib: memory of a process for context, communicators, buckets and workspaces, GiB.
    activation_slack: memory that the caching allocator holds beyond the activations, as a share of them.
    scatter: 90 % quantile of |ln(predicted / measured)|; widens intervals but does not change predictions.
    """

    tensor_factor: float
    layer_overhead_ms: float
    data_parallel_share: float
    unaligned_share: float
    base_gib: float
    activation_slack: float
    scatter: float = 0.0
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (low, high) in {**RANGES, **MEMORY_RANGES, "scatter": (0.0, 2.0)}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise InputError(_WHO, f"{name} = {value!r}", f"a number from {low} to {high}")

    @property
    def fitted(self) -> bool:
        """True if the constants were fitted to rows of this site."""
        return bool(self.provenance.get("rows_fitted"))

    def __str__(self) -> str:
        return (
            f"collectives take {self.tensor_factor:.2f} times as long as alone, {self.layer_overhead_ms:.1f} ms are "
            f"added per layer and micro-batch, data-parallel traffic gets {percent(self.data_parallel_share)} of the "
            f"network; nine in ten times are within {percent(math.expm1(self.scatter))}"
        )


@dataclass(frozen=True)
class Calibrations:
    """Planner constants by site (name of a cluster), and those for all other sites (`elsewhere`)."""

    sites: Mapping[str, Calibration]
    elsewhere: Calibration

    def of(self, cluster: Cluster) -> Calibration:
        return self.sites.get(cluster.name, self.elsewhere)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of planner.json."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "sites": {name: asdict(site) for name, site in self.sites.items()},
            "elsewhere": asdict(self.elsewhere),
        }

    @classmethod
    def from_json(cls, data: object) -> Calibrations:
        """Builds the constants from the output of `to_json`. Raises InputError for anything else."""
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise InputError(_WHO, repr(data)[:80], f"{_FORMAT} version {_VERSION}")
        try:
            sites = {name: Calibration(**values) for name, values in data["sites"].items()}
            return cls(sites, Calibration(**data["elsewhere"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(_WHO, str(error), "sites and elsewhere with their constants") from None


@cache
def shipped() -> Calibrations:
    """Returns the constants in the package's planner.json."""
    return Calibrations.from_json(json.loads((files("quantbench.planner") / "planner.json").read_text("utf-8")))


def with_measured_links(
    cluster: Cluster, measured: Iterable[tuple[Workload, float]], source: str, *, between_nodes: bool = True
) -> Cluster:
    """Returns `cluster` with links measured by `quantbench comm` in place of those from public tables.

    All-reduces inside a node give its links, by number of GPUs. The highest bus bandwidth of all-reduces between nodes
    gives the node's network rate: a ring leaves a node once, so its adapters carry the bytes that each GPU sends.

    measured: (workload, time in µs) pairs; only all-reduces are used.
    source: origin of the times, for provenance.
    between_nodes: whether to replace the node's rate; False if constants were fitted against the stated rate.
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
    """Returns the curve through the median times, made non-decreasing in the message size."""
    sizes = sorted(by_size)
    times_us, longest = [], -math.inf
    for size in sizes:
        longest = max(longest, median(by_size[size]))
        times_us.append(longest)
    return Link(tuple(map(float, sizes)), tuple(times_us))
