"""Data-parallel and pipeline traffic of one GPU: what crosses the network, and how long it takes.

Ranks are placed as Megatron-DeepSpeed places them: tensor-parallel neighbours first, then data-parallel ones, pipeline
stages outermost. A node so holds gpus_per_node / tp members of a data-parallel group, and their ring leaves the node
once, while gpus_per_node / members rings share its adapters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quantbench.latency.interconnect import NODE_LATENCY_S
from quantbench.planner.calibration import Calibration
from quantbench.planner.layout import Job, Layout
from quantbench.workload.dtypes import element_bytes

# How often the weights' bytes go around the ring per iteration: reduce-scatter and gather, whoever shards what
# (Rajbhandari et al., ZeRO, 2020, section 7). ZeRO-2 reduces every micro-batch, ZeRO-3 gathers twice besides.
_STEP_VOLUME = {0: 2, 1: 2, 2: 1, 3: 0}
_MICRO_BATCH_VOLUME = {0: 0, 1: 0, 2: 1, 3: 3}
# Without pipelines of layers (ZeRO-3) parameters go in buckets of this many (DeepSpeed's reduce_bucket_size).
_BUCKET_PARAMETERS = 5e8
#: DeepSpeed's overlap_comm is true for stage 3 and false otherwise (deepspeed.ai, DeepSpeed Configuration JSON)
_ZERO3_OVERLAP = 1.0


@dataclass(frozen=True)
class Traffic:
    """Seconds: point_to_point of one activation in one direction; data_parallel per iteration, not yet overlapped."""

    point_to_point: float
    data_parallel: float


def traffic(job: Job, layout: Layout, calibration: Calibration, stage_parameters: int, micro_batches: int) -> Traffic:
    """Traffic of the stage that holds `stage_parameters` parameters per GPU."""
    return Traffic(
        point_to_point_s(job, layout),
        _data_parallel_s(job, layout, calibration, stage_parameters, micro_batches),
    )


def point_to_point_s(job: Job, layout: Layout) -> float:
    """One micro-batch's activation to the next stage. Each tensor-parallel rank sends its share, and they gather it on
    the other side (Narayanan et al., 2021, section 4.1; DeepSpeed's PartitionedTensor). A single message is taken to
    run at the adapters' rate: the fitted share is that of a ring with its many small pieces."""
    if layout.pp == 1:
        return 0.0
    shape = job.shape
    sent = layout.mbs * shape.seq * shape.hidden * element_bytes(shape.dtype) / layout.tp
    cluster = job.cluster
    if layout.tp * layout.dp >= cluster.gpus_per_node:
        return NODE_LATENCY_S + sent / (cluster.gpu_gb_per_s * 1e9)
    return cluster.intra_node(2).time_s(sent)


def _data_parallel_s(
    job: Job, layout: Layout, calibration: Calibration, stage_parameters: int, micro_batches: int
) -> float:
    if layout.dp == 1:
        return 0.0
    volume = _STEP_VOLUME[layout.zero] + _MICRO_BATCH_VOLUME[layout.zero] * micro_batches
    ring_bytes = volume * stage_parameters * element_bytes(job.shape.dtype) * (layout.dp - 1) / layout.dp
    cluster = job.cluster
    in_node = min(layout.dp, max(1, cluster.gpus_per_node // layout.tp))
    if in_node == layout.dp:
        return cluster.intra_node(layout.dp).time_s(ring_bytes)
    rings = cluster.gpus_per_node / in_node
    # A ring passes every node in turn, once for each of its collectives.
    each = job.shape.layers if layout.zero == 3 else math.ceil(stage_parameters / _BUCKET_PARAMETERS)
    hops = volume * each * (layout.dp / in_node - 1)
    return hops * NODE_LATENCY_S + rings * ring_bytes / (cluster.node_gb_per_s * 1e9 * calibration.data_parallel_share)


def tied_embedding_s(job: Job, layout: Layout, calibration: Calibration, embedding_parameters: int) -> float:
    """The gradient of a tied embedding, added up between the first and the last stage."""
    if layout.pp == 1 or not job.shape.tied:
        return 0.0
    sent = embedding_parameters * element_bytes(job.shape.dtype)
    if layout.tp * layout.dp >= job.cluster.gpus_per_node:
        return sent / (job.cluster.gpu_gb_per_s * 1e9 * calibration.data_parallel_share)
    return job.cluster.intra_node(2).time_s(sent)


def exposed_s(job: Job, layout: Layout, data_parallel_s: float, room_s: float) -> float:
    """Data-parallel seconds that nothing hides. room_s: computation that it may run beside."""
    share = _ZERO3_OVERLAP if layout.zero == 3 else job.dp_overlap
    return data_parallel_s - min(share * data_parallel_s, room_s)
