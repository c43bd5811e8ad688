"""Predicts the time of one training iteration, in total and by part.

`iteration` adds up layer times, pipeline idle time, network traffic and the optimizer step. The
pipeline schedule is 1F1B, in which a stage alternates forward and backward passes (Narayanan et
al., 2019 and 2021). The two passes of a micro-batch take one slot per stage, and the slowest stage
sets the pace. Filling and draining the pipeline costs one slot of every stage except the slowest.
With interleaving, this cost is divided by the number of chunks per stage.
"""

import math
from dataclasses import asdict, dataclass

from quantbench.latency.interconnect import NODE_LATENCY_S
from quantbench.planner.calibration import Calibration, software
from quantbench.planner.layer_time import NO_TIME, LayerTimes, TimeInterval
from quantbench.planner.layout import Job, Layout, stages_of
from quantbench.planner.memory import embedding_parameters, stage_parameters

# Bytes per parameter that an optimizer step moves. Mixed-precision Adam reads the master weight,
# two moments and the gradient in fp32. It writes the master weight and the moments in fp32, and
# the weight in 16 bits.
_STEP_BYTES = 4 * 4 + 3 * 4 + 2
# Parameters per gradient bucket: the default of DeepSpeed's reduce_bucket_size. Each bucket is one
# collective. With ZeRO-3, each layer is one collective instead.
_BUCKET_PARAMETERS = 5e8
# Exposed fraction of overlapped gradient reductions, relative to `Calibration.exposed_share`, which
# is the fraction for weight gathers. Computation does not wait for reductions, but they take SMs
# and memory bandwidth. The value is assumed, not fitted.
_REDUCTIONS_WAIT = 0.25


@dataclass(frozen=True)
class Iteration:
    """Predicted time per iteration, and its parts on the slowest pipeline stage, all in s.

    The parts add up to `sec.mid`.

    sec: time per iteration, with its 90 % interval.
    products: weight GEMMs, including the experts' GEMMs.
    attention: attention core, between the qkv projection and the output projection.
    recompute: recomputation of forward passes.
    vector: elementwise kernels, norms and data movement, limited by memory bandwidth.
    overhead: launches and small kernels, by the fitted overhead per layer.
    tensor: tensor-parallel collectives, exchange of tokens between GPUs with different experts, and
        exposed context-parallel traffic.
    logits: embedding, logits and loss, if the slowest stage holds them; else 0.
    point_to_point: transfers to and from neighbouring stages.
    bubble: idle time while the pipeline fills and drains.
    data_parallel: data-parallel traffic that does not overlap with computation.
    optimizer: optimizer step, and the fixed overhead per iteration.
    stragglers: waiting for the slowest node.
    """

    sec: TimeInterval
    products: float
    attention: float
    recompute: float
    vector: float
    overhead: float
    tensor: float
    logits: float
    point_to_point: float
    bubble: float
    data_parallel: float
    optimizer: float
    stragglers: float

    @property
    def bubble_share(self) -> float:
        """The pipeline bubble's fraction of the iteration time, 0 to 1."""
        return self.bubble / self.sec.mid

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the iteration in s, by name."""
        parts = asdict(self)
        del parts["sec"]
        return parts

    @property
    def bound(self) -> str:
        """Name of the largest loss, or `compute` if no loss is large.

        A loss is one of the parts other than GEMMs and attention, or a sum of related parts. It is
        large if it exceeds a fifth of the time of GEMMs and attention.
        """
        losses = {
            "tensor-parallel traffic": self.tensor,
            "pipeline bubble": self.bubble,
            "network": self.data_parallel + self.point_to_point,
            "recomputation": self.recompute,
            "launches and stragglers": self.overhead + self.stragglers,
            # In a pipeline, the other stages wait for the stage with the logits. Without a
            # pipeline, the logits are ordinary work.
            "logits": self.logits * (self.bubble > 0),
            "memory bandwidth": self.vector + self.optimizer,
        }
        worst = max(losses, key=lambda name: losses[name])
        return worst if losses[worst] > 0.2 * (self.products + self.attention) else "compute"


def iteration(
    job: Job, layout: Layout, layer_times: LayerTimes, calibration: Calibration
) -> Iteration:
    """Predicts the time of one iteration.

    layout: layout that may break strict rules only if they are in `constraints.OF_SOFTWARE`.
    layer_times: layer times of the job.
    calibration: factors of training.
    """
    key = layout.per_layer
    time = layer_times.at(key).fitted(calibration)
    without = time
    if job.shape.dense_layers:
        without = layer_times.at(key._replace(dense=True)).fitted(calibration)
    count = layout.micro_batches(job.gbs)
    kinds = stages_of(job.shape, layout)
    dense, experts = max((stage_parameters(job, layout, kind) for kind in kinds), key=sum)
    hop = point_to_point_s(job, layout) * layout.interleave
    pace = fill = NO_TIME
    for kind in kinds:
        mean = time.mixed(without, kind.dense / kind.layers)
        span = mean.once * kind.layers + mean.repeated(layout.recompute) * kind.layers
        span += hop * kind.neighbours + mean.embedding * kind.first
        if kind.last:
            span += mean.logits
        fill += span * kind.count
        if span.mid > pace.mid:
            pace = span
            slowest = kind
            layer = mean
    # Filling and draining costs one slot of every stage except the slowest.
    fill = (fill + pace * -1) * (1 / layout.interleave)

    step_s = calibration.step_overhead_ms * 1e-3
    own = float(dense + experts)
    if layout.zero >= 1:
        own = dense / layout.replicas + experts / layout.expert_replicas
    step_s += _STEP_BYTES * own / job.elementwise_bytes_per_s
    # With ZeRO-2 and ZeRO-3, gradients are reduced in every micro-batch, so traffic can overlap
    # with all micro-batches. With ZeRO-0 and ZeRO-1, it can overlap only with the last one.
    room = pace.mid
    if layout.zero >= 2:
        room *= count
    traffic = data_parallel_s(job, layout, calibration, dense, experts)
    network = exposed_s(job, layout, calibration, traffic, room)
    embedding = embedding_parameters(job.shape, layout.tp)
    network += tied_embedding_s(job, layout, calibration, embedding)
    total = pace * count + fill + (network + step_s)
    nodes = layout.gpus / job.cluster.gpus_per_node
    # The slowest of n nodes is about √(2 ln n) standard deviations above the mean, if their times
    # are normally distributed.
    waiting = calibration.straggler_spread * math.sqrt(2 * math.log(max(nodes, 1)))

    own_layers = slowest.layers * count
    ends = layer.logits.mid * slowest.last + layer.embedding * slowest.first
    return Iteration(
        sec=(total * (1 + waiting)).widened(calibration.scatter),
        products=sum(span.mid for span in (*layer.products, *layer.experts)) * own_layers,
        attention=sum(span.mid for span in layer.core) * own_layers,
        recompute=layer.repeated(layout.recompute).mid * own_layers,
        vector=sum(layer.vector) * own_layers,
        overhead=layer.overhead * own_layers,
        tensor=(layer.reduces + layer.context) * own_layers,
        logits=ends * count,
        point_to_point=hop * slowest.neighbours * count,
        bubble=fill.mid,
        data_parallel=network,
        optimizer=step_s,
        stragglers=waiting * total.mid,
    )


def point_to_point_s(job: Job, layout: Layout) -> float:
    """Returns the time to send one micro-batch's activations to the next stage, in s.

    Each tensor-parallel rank sends a slice of the activations, and the receiving ranks gather all
    slices (Narayanan et al., 2021, section 4.1; DeepSpeed's PartitionedTensor). The time of this
    gather is not counted. Network adapters are assumed to reach their full rate, because the fitted
    data_parallel_share describes rings with many small messages.
    """
    if layout.pp == 1:
        return 0.0
    shape = job.shape
    cluster = job.cluster
    sent = layout.mbs * shape.seq * shape.hidden * shape.element_bytes / layout.tp / layout.cp
    # If a stage fills a node, its neighbours are on other nodes.
    if layout.tp * layout.replicas >= cluster.gpus_per_node:
        return NODE_LATENCY_S + sent / cluster.gpu_bytes_per_s
    return cluster.intra_node(2).time_s(sent)


def ring_passes(job: Job, layout: Layout) -> tuple[int, int]:
    """Returns the number of (weight gathers, gradient reductions) per iteration.

    Each gather or reduction is one pass around the data-parallel ring. By ZeRO stage:

    - 0: one all-reduce, which takes as long as two reductions and is counted as two.
    - 1: one gather and one reduction per iteration.
    - 2: one gather per iteration, and one reduction per micro-batch. PyTorch's FSDP also gathers
      once per micro-batch (torch.distributed.fsdp.ShardingStrategy: SHARD_GRAD_OP reshards after
      the backward pass).
    - 3: two gathers and one reduction per micro-batch.

    Source: Rajbhandari et al., ZeRO, 2020, section 7.
    """
    if layout.zero == 0:
        return 0, 2
    if layout.zero == 1:
        return 1, 1
    micro_batches = layout.micro_batches(job.gbs)
    if layout.zero == 3:
        return 2 * micro_batches, micro_batches
    if software(job.stack).fsdp:
        return micro_batches, micro_batches
    return 1, micro_batches


def data_parallel_s(
    job: Job,
    layout: Layout,
    calibration: Calibration,
    stage_parameters: int,
    experts: int = 0,
) -> float:
    """Returns the time of an iteration's data-parallel traffic if nothing overlaps, in s.

    stage_parameters: number of a stage's parameters on one GPU, without experts.
    experts: number of the experts' parameters on one GPU of the stage.
    """
    volume = sum(ring_passes(job, layout))
    # Number of collectives per pass.
    each = math.ceil(stage_parameters / _BUCKET_PARAMETERS)
    if layout.zero == 3:
        each = job.shape.layers
    ring_bytes = volume * (stage_parameters * job.shape.element_bytes)
    seconds = _ring_s(job, layout, calibration, layout.replicas, 1, ring_bytes, volume * each)
    if not experts:
        return seconds
    # Experts have fewer replicas. Their ring connects only GPUs that hold the same experts. The
    # distance between these GPUs is ep / tp data-parallel ranks.
    stride = max(1, layout.ep // layout.tp)
    ring_bytes = volume * experts * job.shape.element_bytes
    ranks = layout.expert_replicas
    return seconds + _ring_s(job, layout, calibration, ranks, stride, ring_bytes, volume)


def _ring_s(
    job: Job,
    layout: Layout,
    calibration: Calibration,
    ranks: int,
    stride: int,
    ring_bytes: float,
    collectives: float,
) -> float:
    """Returns the time of collectives over rings of data-parallel GPUs, in s.

    Ranks are numbered as in Megatron-DeepSpeed: tensor-parallel ranks are adjacent, then come
    data-parallel ranks, then pipeline stages. A node therefore holds gpus_per_node / (tp · stride)
    GPUs of a ring, at most all of them. A ring over several nodes leaves each node once, and all
    rings of a node share its network adapters.

    ranks: number of GPUs in a ring.
    stride: distance between neighbours in a ring, in data-parallel ranks.
    ring_bytes: total buffer size of all passes, in bytes.
    collectives: number of collectives. Each adds the latency of one pass over the ring's nodes.
    """
    if ranks == 1:
        return 0.0
    cluster = job.cluster
    ring_bytes *= (ranks - 1) / ranks
    in_node = min(ranks, max(1, cluster.gpus_per_node // (layout.tp * stride)))
    if in_node == ranks:
        return cluster.intra_node(ranks).time_s(ring_bytes)
    rings = cluster.gpus_per_node / in_node
    # Each collective visits every node of the ring in turn.
    nodes = ranks / in_node
    share = calibration.data_parallel_share / (1 + calibration.congestion * math.log2(nodes))
    latency_s = collectives * (nodes - 1) * calibration.hop_us * 1e-6
    return latency_s + rings * ring_bytes / (cluster.node_gb_per_s * 1e9 * share)


def tied_embedding_s(
    job: Job, layout: Layout, calibration: Calibration, embedding_parameters: int
) -> float:
    """Returns the time to sum the gradients of a tied embedding over two stages, in s.

    The first stage has the gradient from the embedding, and the last stage the gradient from the
    logits. Without pipeline stages or without tied weights, the time is 0.

    embedding_parameters: number of the embedding's parameters on one GPU.
    """
    if layout.pp == 1 or not job.shape.tied:
        return 0.0
    sent = embedding_parameters * job.shape.element_bytes
    if layout.tp * layout.replicas >= job.cluster.gpus_per_node:
        return sent / (job.cluster.gpu_bytes_per_s * calibration.data_parallel_share)
    return job.cluster.intra_node(2).time_s(sent)


def exposed_s(
    job: Job,
    layout: Layout,
    calibration: Calibration,
    traffic_s: float,
    room_s: float,
) -> float:
    """Returns how much data-parallel traffic adds to the iteration time, in s.

    Traffic that does not overlap with computation adds its full time. Overlapped weight gathers add
    a fraction of their time, because computation waits for some of them. Overlapped gradient
    reductions add a smaller fraction, because they only slow computation down.

    traffic_s: time of the traffic if nothing overlaps, in s.
    room_s: time of the computation with which traffic can overlap, in s. It limits the overlap.
    """
    # With ZeRO-3 all traffic can overlap: DeepSpeed's overlap_comm is true for stage 3
    # (deepspeed.ai, DeepSpeed Configuration JSON), and FSDP prefetches.
    overlap = 1.0 if layout.zero == 3 else job.dp_overlap
    gathers, reductions = ring_passes(job, layout)
    shown = gathers + _REDUCTIONS_WAIT * reductions
    waits = calibration.exposed_share * shown / (gathers + reductions)
    return traffic_s - (1 - waits) * min(overlap * traffic_s, room_s)
