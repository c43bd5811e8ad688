"""The fitted constants of the planner, as shipped in planner.json with where they come from.

Four belong to the iteration's time and two to the memory. They describe a site: its machines and its software. At a
site that nothing was fitted for, collectives take the time that they take alone, launches are hidden and the network
runs at its rate. Everything else in the planner is counted (bytes, FLOPs, micro-batches), taken from a specification,
or asked of a latency model.

History of the format:
1  first version.
2  tensor_factor instead of compute_factor (products take the time that they take alone) and of fault_tensor_factor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from quantbench.errors import InputError
from quantbench.latency.interconnect import Cluster
from quantbench.units import percent

_WHO = "planner.json"
CALIBRATION_FORMAT = "quantbench-planner"
CALIBRATION_VERSION = 2
#: the constants of the iteration's time: name → (lowest, highest) that can be believed
RANGES = {
    "tensor_factor": (1.0, 10.0),
    "layer_overhead_ms": (0.0, 50.0),
    "data_parallel_share": (0.01, 1.0),
    "unaligned_share": (0.01, 16.0),
}
#: those of the memory
MEMORY_RANGES = {"base_gib": (0.0, 20.0), "activation_slack": (0.0, 2.0)}
_SCATTER_RANGE = {"scatter": (0.0, 2.0)}


@dataclass(frozen=True)
class Calibration:
    """The constants of one site.

    tensor_factor: time of a tensor-parallel collective inside training over that of NCCL's table, where all GPUs enter
    it at once: waiting for the last of them, and the hosts. layer_overhead_ms: per layer and micro-batch, forward to
    backward: launches, small kernels. data_parallel_share: what data-parallel traffic gets of a node's network
    adapters. unaligned_share: rate of batched products whose rows are not 16-byte aligned, over the GPU's fp32 peak.

    Of the memory, fitted apart: base_gib: context, communicators, buckets and workspaces of a process.
    activation_slack: what the caching allocator holds beyond the activations, as a share of them.

    Of neither: scatter: what nine in ten rows stay within, as |ln(predicted / measured)|; it widens intervals and moves
    no prediction.
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
        for name, (low, high) in {**RANGES, **MEMORY_RANGES, **_SCATTER_RANGE}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise InputError(_WHO, f"{name} = {value!r}", f"a number from {low} to {high}")

    @property
    def constants(self) -> dict[str, float]:
        """The four constants of the iteration's time, by name."""
        return {name: getattr(self, name) for name in RANGES}

    @property
    def fitted(self) -> bool:
        """Whether rows of this site stand behind it."""
        return bool(self.provenance.get("rows_fitted"))

    def __str__(self) -> str:
        return (
            f"collectives take {self.tensor_factor:.2f} times as long as alone, {self.layer_overhead_ms:.1f} ms are "
            f"added per layer and micro-batch, data-parallel traffic gets {percent(self.data_parallel_share)} of the "
            f"network; nine in ten times are within {percent(math.expm1(self.scatter))}"
        )


@dataclass(frozen=True)
class Calibrations:
    """Constants by site (a cluster's name), and those for everywhere else."""

    sites: Mapping[str, Calibration]
    elsewhere: Calibration

    def of(self, cluster: Cluster) -> Calibration:
        """The constants for a cluster."""
        return self.sites.get(cluster.name, self.elsewhere)

    def to_json(self) -> dict[str, Any]:
        """As planner.json keeps them."""
        return {
            "format": CALIBRATION_FORMAT,
            "version": CALIBRATION_VERSION,
            "sites": {name: asdict(site) for name, site in self.sites.items()},
            "elsewhere": asdict(self.elsewhere),
        }

    @classmethod
    def from_json(cls, data: object) -> Calibrations:
        """What `to_json` wrote."""
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (
            CALIBRATION_FORMAT,
            CALIBRATION_VERSION,
        ):
            raise InputError(_WHO, repr(data)[:80], f"{CALIBRATION_FORMAT} version {CALIBRATION_VERSION}")
        try:
            sites = {name: Calibration(**values) for name, values in data["sites"].items()}
            return cls(sites, Calibration(**data["elsewhere"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(_WHO, str(error), "sites and elsewhere with their constants") from None


def everywhere(calibration: Calibration) -> Calibrations:
    """The same constants at every site."""
    return Calibrations({}, calibration)


@cache
def shipped() -> Calibrations:
    """The constants that come with the package."""
    text = (files("quantbench.planner") / "planner.json").read_text(encoding="utf-8")
    return Calibrations.from_json(json.loads(text))
