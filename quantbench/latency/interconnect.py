"""Describes GPU clusters: times of all-reduces inside a node, and network bandwidth between nodes.

`cluster` and `reference_cluster` return a `Cluster`. The known systems and the specified rates of
links are in clusters.toml; public tables of NCCL times are in links.json.
"""

from __future__ import annotations

import json
import math
import tomllib
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_int
from quantbench.units import percent
from quantbench.workload import Collective

_WHO = "cluster"
#: latency of a message between GPUs of two nodes (NCCL over InfiniBand, nccl-tests' small sizes)
NODE_LATENCY_S = 20e-6
_BITS_PER_BYTE = 8
#: Fraction of a link's specified rate that large messages inside a node are assumed to reach if no
#: public table has their times. In A100's NCCL table, such messages reach 222 of 300 GB/s.
_ASSUMED_LINK_FRACTION = 0.75
#: name of the system to assume for a GPU without a known system
GENERIC = "generic"
# Latency to assume for an all-reduce inside a node if no public table has its time.
_UNMEASURED_LATENCY_US = 25.0


@dataclass(frozen=True)
class Link:
    """All-reduce times between the GPUs of a node, as a curve of points.

    bus_bytes: bytes that each GPU sends, ascending.
    latency_us: time of each point in µs.

    Times between points are interpolated on logarithmic axes. Above the last point, the bandwidth
    is constant. Below the first point, the time is constant.
    """

    bus_bytes: tuple[float, ...]
    latency_us: tuple[float, ...]

    @classmethod
    def of_rate(cls, gb_per_s: float, latency_us: float) -> Link:
        """Returns a link with a latency in µs and a constant rate in GB/s (1e9 bytes/s)."""
        # The points run from 256 bytes to 4 GiB. One GB/s is 1e3 bytes per µs.
        sizes = tuple(float(4**power) for power in range(4, 17))
        return cls(sizes, tuple(latency_us + size / gb_per_s / 1e3 for size in sizes))

    def time_s(self, bus_bytes: float) -> float:
        """Returns the time of a collective in seconds.

        bus_bytes: bytes that each GPU sends.
        """
        if bus_bytes <= self.bus_bytes[0]:
            return self.latency_us[0] * 1e-6
        if bus_bytes >= self.bus_bytes[-1]:
            return self.latency_us[-1] * 1e-6 * bus_bytes / self.bus_bytes[-1]
        right = bisect_right(self.bus_bytes, bus_bytes)
        x0, x1 = self.bus_bytes[right - 1 : right + 1]
        y0, y1 = self.latency_us[right - 1 : right + 1]
        share = math.log(bus_bytes / x0) / math.log(x1 / x0)
        return float(y0 * (y1 / y0) ** share * 1e-6)


@dataclass(frozen=True)
class Cluster:
    """Cluster of nodes with identical GPUs.

    node_gb_per_s: total bandwidth of a node's network adapters in one direction, in 1e9 bytes per
        second.
    links: all-reduce times inside a node, by number of participating GPUs.
    source: document or table that the values come from.
    """

    name: str
    device: DeviceSpec
    gpus_per_node: int
    node_gb_per_s: float
    links: dict[int, Link]
    source: str

    def __post_init__(self) -> None:
        require_int(_WHO, "gpus_per_node", self.gpus_per_node, high=1024)
        if not 0 < self.node_gb_per_s < 1e5:
            what = f"node_gb_per_s = {self.node_gb_per_s!r}"
            raise InputError(_WHO, what, "GB/s above 0 and below 100000")

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the cluster, for comparison and caching."""
        return (self.name, self.device.name, self.gpus_per_node, self.node_gb_per_s)

    @property
    def gpu_gb_per_s(self) -> float:
        """Network bandwidth per GPU while all GPUs of a node send, in 1e9 bytes per second."""
        return self.node_gb_per_s / self.gpus_per_node

    @property
    def gpu_bytes_per_s(self) -> float:
        """Network bandwidth per GPU while all GPUs of a node send, in bytes per second."""
        return self.gpu_gb_per_s * 1e9

    def intra_node(self, num_gpus: int) -> Link:
        """Returns the link between this many GPUs of a node.

        If `links` lacks this number of GPUs, the result is the link for the next larger number, or
        else for the largest number.
        """
        sizes = sorted(self.links)
        return self.links[next((size for size in sizes if size >= num_gpus), sizes[-1])]

    def changed(
        self,
        *,
        gpus_per_node: int | None = None,
        node_gb_per_s: float | None = None,
        link_gb_per_s: float | None = None,
    ) -> Cluster:
        """Returns the cluster with changed values. None leaves a value unchanged.

        node_gb_per_s: bandwidth of a node's adapters in GB/s. If it is None, the bandwidth scales
            with gpus_per_node.
        link_gb_per_s: bus bandwidth of large all-reduces inside a node in GB/s.
        """
        if gpus_per_node is None and node_gb_per_s is None and link_gb_per_s is None:
            return self
        count = gpus_per_node or self.gpus_per_node
        links = self.links
        if link_gb_per_s is not None:
            links = {1: Link.of_rate(link_gb_per_s, _UNMEASURED_LATENCY_US)}
        return replace(
            self,
            gpus_per_node=count,
            node_gb_per_s=node_gb_per_s or self.node_gb_per_s * count / self.gpus_per_node,
            links=links,
            source=self.source + "; changed by options",
        )


def cluster(name: str, device: DeviceSpec | None = None) -> Cluster:
    """Returns a known cluster by name.

    device: the cluster's GPU. The default is the first GPU listed for the system.

    Raises InputError for an unknown name, and for the generic system without a device.

    >>> cluster("jean-zay-a100").node_gb_per_s
    50.0
    """
    found = _data()["cluster"].get(name)
    if found is None:
        raise InputError(_WHO, repr(name), "one of " + ", ".join(_data()["cluster"]))
    if device is None:
        if not found["gpus"]:
            raise InputError(_WHO, f"{name!r} without a GPU", "--gpu as well")
        device = lookup(found["gpus"][0])
    links, links_source = _links(device)
    source = f"{found['source']}; inside a node: {links_source}"
    node_gb_per_s = found["node_gbit_per_s"] / _BITS_PER_BYTE
    return Cluster(name, device, found["gpus_per_node"], node_gb_per_s, links, source)


def same_site(name: str) -> tuple[str, ...]:
    """Returns the names of the other clusters at the same computing centre."""
    clusters = _data()["cluster"]
    site = clusters[name].get("site")
    if site is None:
        return ()
    others = [other for other in clusters if other != name]
    return tuple(other for other in others if clusters[other].get("site") == site)


def reference_cluster(device: DeviceSpec) -> Cluster:
    """Returns the cluster to assume for a GPU.

    The result is the vendor's reference system for this GPU if there is one, or else a generic
    server.
    """
    for name, values in _data()["cluster"].items():
        if values.get("reference") and device.name in values["gpus"]:
            return cluster(name, device)
    return cluster(GENERIC, device)


@cache
def _data() -> dict[str, Any]:
    """Returns the content of clusters.toml."""
    return tomllib.loads(_text("clusters.toml"))


@cache
def _measured_links() -> Any:
    """Returns the content of links.json."""
    return json.loads(_text("links.json"))


def _text(name: str) -> str:
    return (files("quantbench.latency") / name).read_text(encoding="utf-8")


def _links(device: DeviceSpec) -> tuple[dict[int, Link], str]:
    """Returns the links inside a node, by number of GPUs, and the source of their times."""
    data = _measured_links()
    measured = data["devices"].get(device.name)
    if measured is not None:
        links = {}
        for text, points in measured["all_reduce"].items():
            gpus = int(text)
            sizes = points["message_bytes"]
            bus = [float(Collective("all_reduce", size, gpus).bus_bytes) for size in sizes]
            links[gpus] = Link(tuple(bus), tuple(points["latency_us"]))
        return links, f"{data['provenance']['package']}, {measured['file']}"
    # With a single entry, for one GPU, the link applies to any number of GPUs
    # (`Cluster.intra_node`).
    rate, stated_by = stated_link(device)
    link = Link.of_rate(rate * _ASSUMED_LINK_FRACTION, _UNMEASURED_LATENCY_US)
    return {1: link}, f"{stated_by}; {percent(_ASSUMED_LINK_FRACTION)} of it assumed"


def stated_link(device: DeviceSpec) -> tuple[float, str]:
    """Returns the specified rate between the GPUs of a node, and the rate's source.

    The rate is for one direction, in 1e9 bytes per second.
    """
    for prefix in _data()["intra_node_gb_per_s"]:
        if device.name.startswith(prefix):
            return _stated(prefix)
    return host_link(device)


def host_link(device: DeviceSpec) -> tuple[float, str]:
    """Returns the PCIe rate between a GPU and its host, and the rate's source.

    The rate is for one direction, in 1e9 bytes per second.
    """
    # Compute capability 7 and older has PCIe 3, 8 has PCIe 4, and 9 and newer has PCIe 5.
    major = (device.compute_capability or (0, 0))[0]
    return _stated(f"pcie-gen{min(max(major - 4, 3), 5)}")


def _stated(name: str) -> tuple[float, str]:
    """Returns a link's rate in GB/s and the rate's source from clusters.toml.

    name: key of the link in the table intra_node_gb_per_s.
    """
    found = _data()["intra_node_gb_per_s"][name]
    return float(found["value"]), str(found["source"])
