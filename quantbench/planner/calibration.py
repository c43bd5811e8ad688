"""Provides the planner's factors, which convert times of single ops to times in training.

`shipped` loads the factors in planner.json. They were fitted to published runs of all software
stacks and GPUs together, so a stack or a GPU without runs gets pooled factors. A site (the machines
and software of one computing centre) can have separate factors, in a file that `plan --fit` writes.
The module also defines the known stacks, and replaces a cluster's links by measured links.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.files import read_json, reason
from quantbench.latency.interconnect import Cluster, Link
from quantbench.store.typed import decode
from quantbench.units import percent
from quantbench.workload import Collective, Workload

# Subject of error messages about factors.
_WHO = "planner.json"
_HEADER = {"format": "quantbench-planner", "version": 5}
_SITE_HEADER = {"format": "quantbench-planner-site", "version": 1}
_LARGEST_SITE_BYTES = 2**20


@dataclass(frozen=True)
class Stack:
    """A software stack that trains models, described by its defaults and limits.

    kernels: kind of elementwise kernels: fused, compiled (by torch.compile) or eager.
    overlaps: whether data-parallel traffic overlaps with computation by default.
    fsdp: whether ZeRO-3 is implemented by PyTorch's FSDP.
    stages_with_zero: whether the stack can combine ZeRO-2 and ZeRO-3 with pipeline stages.
    fp32_gradients: whether gradients of bf16 weights are accumulated and reduced in fp32 by
        default.
    narrow_weights: 8- and 4-bit recipes with which linear layers keep only quantized weights, and
        no 16-bit weights (fp8_param_gather).
    """

    kernels: str = "fused"
    overlaps: bool = True
    fsdp: bool = False
    stages_with_zero: bool = False
    fp32_gradients: bool = False
    narrow_weights: tuple[str, ...] = ()


# Recipes for which NeMo and Megatron-Bridge set fp8_param_gather. They do not set it for blockwise
# scaling or nvfp4. In Megatron-LM, --fp8-param-gather is off by default. Sources: NeMo,
# nemo/collections/llm/recipes/precision/mixed_precision.py, and Megatron-Bridge,
# src/megatron/bridge/training/mixed_precision.py.
_PARAM_GATHER = ("tensorwise", "tensorwise_bf16_wgrad", "mxfp8")


#: known software stacks by name
STACKS = {
    # Megatron-LM with its fused kernels and distributed optimizer. Its arguments.py sets
    # accumulate_allreduce_grads_in_fp32 for bf16. The performance recipes of NeMo and
    # Megatron-Bridge, whose runs are published, unset grad_reduce_in_fp32.
    "megatron": Stack(fp32_gradients=True),
    # Megatron with Transformer Engine and overlapped collectives.
    "nemo": Stack(narrow_weights=_PARAM_GATHER),
    # Megatron-Bridge 26.04.01 (2026), with FP8 and experts.
    "megatron-bridge": Stack(narrow_weights=_PARAM_GATHER),
    # FSDP2 with torch.compile.
    "torchtitan": Stack("compiled", fsdp=True, stages_with_zero=True),
    # PyTorch's FSDP with torch.compile.
    "fsdp": Stack("compiled", fsdp=True),
    # Megatron-DeepSpeed.
    "deepspeed": Stack(overlaps=False),
    # PyTorch's FSDP or DDP without torch.compile.
    "eager": Stack("eager", fsdp=True),
}
# Stack to assume for unknown software.
_UNKNOWN = Stack(overlaps=False)


def software(stack: str) -> Stack:
    """Returns the stack with this name, or the stack to assume if the name is unknown."""
    return STACKS.get(stack, _UNKNOWN)


def _within(low: float, high: float, default: Any = MISSING) -> Any:
    """Declares a field of `Calibration` with the factor's smallest and largest plausible value."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True)
class Calibration:
    """Factors of training at one site, or of one software stack on one GPU architecture.

    compute_factor: time of GEMMs and attention in training, over their time in short benchmarks.
        Under sustained load, clocks fall and the factor rises.
    quantized_factor: additional factor for GEMMs with 8- or 4-bit inputs. The modelled times are
        those of inference libraries and include the cast of the input.
    experts_factor: additional factor for the experts' grouped GEMMs, which are modelled as one
        batched GEMM over all experts.
    attention_factor: additional factor for attention, whose kernels may differ from the kernels
        that the latency model was fitted to.
    elementwise_factor: bytes that elementwise kernels and norms move, over the bytes of ideal fused
        kernels.
    tensor_factor: time that a tensor-parallel collective adds to an iteration, over its isolated
        time. The factor is above 1 if GPUs wait for the slowest GPU or for hosts, and below 1 if
        the collective overlaps with GEMMs.
    layer_overhead_ms: time of launches and small kernels per layer and micro-batch, forward plus
        backward, in ms.
    step_overhead_ms: fixed time per iteration, in ms: gradient norm, optimizer launches,
        synchronisation, logging.
    data_parallel_share: fraction of a node's network bandwidth that data-parallel traffic would
        reach without congestion.
    exposed_share: fraction of ZeRO's overlapped weight gathers for which computation waits.
    hop_us: latency of one ring transfer between two nodes, in µs.
    congestion: bandwidth loss as rings span more nodes. In a ring over n nodes, the data-parallel
        bandwidth is divided by 1 + congestion · log2(n).
    straggler_spread: relative spread of node speeds. A job on n nodes waits for the slowest node,
        so its time is multiplied by 1 + straggler_spread · √(2 ln n).
    base_gib: memory of each process for context, communicators, buckets and workspaces, in GiB.
    activation_slack: unused memory that the caching allocator reserves, as a fraction of the
        activation memory.
    memory_scatter: 90 % quantile of |ln(predicted / measured memory)|.
    scatter: half-width in ln time of an independent error, which widens the interval of a predicted
        iteration time until it covers 90 % of measured times. The predicted time stays the same.
    provenance: origin of the factors, as JSON values.
    """

    tensor_factor: float = _within(0.05, 10.0)
    layer_overhead_ms: float = _within(0.0, 50.0)
    data_parallel_share: float = _within(0.01, 1.0)
    base_gib: float = _within(0.0, 20.0)
    activation_slack: float = _within(0.0, 2.0)
    scatter: float = _within(0.0, 2.0, 0.0)
    compute_factor: float = _within(0.5, 3.0, 1.0)
    quantized_factor: float = _within(0.2, 3.0, 1.0)
    experts_factor: float = _within(0.3, 5.0, 1.0)
    attention_factor: float = _within(0.3, 5.0, 1.0)
    elementwise_factor: float = _within(0.5, 10.0, 1.0)
    exposed_share: float = _within(0.0, 1.0, 0.0)
    step_overhead_ms: float = _within(0.0, 2000.0, 0.0)
    hop_us: float = _within(0.0, 1000.0, 20.0)
    congestion: float = _within(0.0, 2.0, 0.0)
    straggler_spread: float = _within(0.0, 0.2, 0.0)
    memory_scatter: float = _within(0.0, 2.0, 0.1)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value <= high:
                raise InputError(_WHO, f"{name} = {value!r}", f"a number from {low} to {high}")

    @property
    def fitted(self) -> bool:
        """Whether the factors were fitted to measured runs of the site itself."""
        return bool(self.provenance.get("rows_fitted"))

    def __str__(self) -> str:
        further = []
        if self.quantized_factor != 1:
            further.append(f"8- and 4-bit ones × {self.quantized_factor:.2f} more")
        if self.experts_factor != 1:
            further.append(f"experts' ones × {self.experts_factor:.2f} more")
        beside = f" ({', '.join(further)})" if further else ""
        return (
            f"products × {self.compute_factor:.2f}{beside}, "
            f"attention × {self.compute_factor * self.attention_factor:.2f}, "
            f"elementwise bytes × {self.elementwise_factor:.1f}, tensor-parallel collectives × "
            f"{self.tensor_factor:.2f}, {self.layer_overhead_ms:.2f} ms per layer and micro-batch, "
            f"{self.step_overhead_ms:.0f} ms per iteration, "
            f"{percent(self.data_parallel_share)} of the network (less "
            f"{percent(self.congestion)} per doubling of nodes), "
            f"{percent(self.exposed_share)} of overlapped gathers show, "
            f"{self.hop_us:.0f} µs a hop, node speeds spread by "
            f"{100 * self.straggler_spread:.1f} %; nine in ten times are within "
            f"{percent(math.expm1(self.scatter))}"
        )


#: (smallest, largest) plausible value of each factor, by its name
RANGES: dict[str, tuple[float, float]] = {
    f.name: f.metadata["range"] for f in fields(Calibration) if f.metadata
}


def architecture(device: DeviceSpec) -> str:
    """Returns the name under which a GPU's factors are stored, such as `a100`.

    It is the GPU's name up to the first hyphen.
    """
    return device.name.split("-")[0]


@dataclass(frozen=True)
class Calibrations:
    """All known factors, by site and by stack and GPU architecture.

    sites: factors by site. A site's key is the name of its cluster.
    stacks: factors by stack, then by GPU architecture. The entry "" applies to stacks, or
        architectures, without an entry.
    provenance: origin of the factors, by stack. A stack has an entry if it was fitted separately,
        because only one of its releases was measured. The entry "" applies to all other stacks.
    chosen: factors to return for every cluster and stack, such as a user's site file; None to look
        factors up.
    """

    sites: Mapping[str, Calibration]
    stacks: Mapping[str, Mapping[str, Calibration]]
    provenance: Mapping[str, dict[str, Any]]
    chosen: Calibration | None = None

    def of(self, cluster: Cluster, stack: str = "") -> Calibration:
        """Returns the factors for a stack on a cluster.

        If the cluster is a known site that ran this stack, the result is the site's factors.
        Otherwise it is the stack's factors on the cluster's GPU.

        stack: name of the stack; "" for the site's stack, or for an unknown stack if the cluster is
            no known site.
        """
        if self.chosen is not None:
            return self.chosen
        site = self.sites.get(cluster.name)
        if site is not None and stack in ("", site.provenance.get("stack", "deepspeed")):
            return site
        return self.of_stack(stack, architecture(cluster.device))

    def of_stack(self, stack: str, architecture: str) -> Calibration:
        """Returns the factors of a stack ("" for an unknown one) on a GPU architecture."""
        by_gpu = self.stacks.get(stack, self.stacks[""])
        fit = self.provenance.get(stack, self.provenance[""])
        where = f"{stack or 'an unknown stack'} on {architecture} {fit.get('release', '')}".strip()
        rule = f"for {where}, pooled over {len(fit['tables'])} published tables"
        return replace(by_gpu.get(architecture, by_gpu[""]), provenance={"rule": rule})

    def to_json(self) -> dict[str, Any]:
        """Returns the content of planner.json."""
        data = asdict(self)
        del data["chosen"]
        for by_gpu in data["stacks"].values():
            for constants in by_gpu.values():
                del constants["provenance"]  # stored once for the whole fit
        return {**_HEADER, **data}

    @classmethod
    def from_json(cls, data: object) -> Calibrations:
        """Builds the factors from the output of `to_json`. Raises InputError for other data."""
        return decode(cls, _content(data, _HEADER, _WHO), _WHO)


def _content(data: object, header: dict[str, Any], who: str) -> dict[str, Any]:
    """Returns a JSON object without its header fields.

    header: expected format and version.
    who: subject of the error message.

    Raises InputError if the data is no object or has another header.
    """
    if not isinstance(data, dict) or not header.items() <= data.items():
        expected = "{format} version {version}".format(**header)
        raise InputError(who, repr(data)[:120], expected)
    return {name: value for name, value in data.items() if name not in header}


@cache
def shipped() -> Calibrations:
    """Returns the factors that this package ships in planner.json."""
    text = (files("quantbench.planner") / "planner.json").read_text("utf-8")
    return Calibrations.from_json(json.loads(text))


def site_json(site: Calibration) -> dict[str, Any]:
    """Returns the content of a site's file, with the site's factors."""
    return {**_SITE_HEADER, **asdict(site)}


def load_site(path: Path) -> Calibration:
    """Reads a site's factors from the file that `plan --fit` wrote.

    Raises InputError if the file cannot be read or has another content.
    """
    try:
        data = read_json(path, most_bytes=_LARGEST_SITE_BYTES)
        return decode(Calibration, _content(data, _SITE_HEADER, str(path)), str(path))
    except (OSError, ValueError) as error:
        expected = "{format} version {version}, as plan --fit writes it".format(**_SITE_HEADER)
        raise InputError("--site", f"{path}: {reason(error)}", expected) from None


def with_measured_links(
    cluster: Cluster,
    measured: Iterable[tuple[Workload, float]],
    source: str,
    *,
    between_nodes: bool = True,
) -> Cluster:
    """Returns `cluster` with its links replaced by all-reduces that `quantbench comm` measured.

    All-reduces inside a node replace the link for their number of GPUs, if at least two message
    sizes were measured. All-reduces between nodes replace the node's network rate by the highest
    measured bus bandwidth. A ring leaves each node once, so a node's adapters carry the bytes that
    one GPU sends.

    measured: (workload, time in µs) pairs. Workloads other than all-reduces are ignored.
    source: origin of the times, for provenance.
    between_nodes: whether to replace the network rate. Must be False if the factors were fitted
        with the cluster's declared rate.
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
    # A link is a curve of time over message size, so it needs at least two sizes.
    links = {gpus: _link(by_size) for gpus, by_size in times.items() if len(by_size) > 1}
    groups = [f"{gpus} GPUs of a node" for gpus in sorted(links)]
    if node_gb_per_s:
        groups.append("several nodes")
    if not groups:
        return cluster
    return replace(
        cluster,
        links={**cluster.links, **links},
        node_gb_per_s=node_gb_per_s or cluster.node_gb_per_s,
        source=f"{cluster.source}; all-reduces over {', '.join(groups)} from {source}",
    )


def _link(by_size: dict[int, list[float]]) -> Link:
    """Returns the link whose curve runs through the median time of each message size.

    Medians are raised where needed, so that a larger message never takes less time.

    by_size: times in µs, by message size in bytes.
    """
    sizes = sorted(by_size)
    medians = (median(by_size[size]) for size in sizes)
    return Link(tuple(map(float, sizes)), tuple(accumulate(medians, max)))
