"""Predicts the time of a training iteration from layer times, schedule, traffic and optimizer.

The schedule is 1F1B (Narayanan et al., 2019 and 2021): each micro-batch takes one slot per stage,
forward and backward, and the slowest stage sets the pace. Filling and draining the pipeline costs
one slot of every stage except the slowest one, divided by the number of chunks if stages are
interleaved.
"""

import math
from dataclasses import asdict, dataclass

from quantbench.latency.interconnect import NODE_LATENCY_S
from quantbench.planner.calibration import Calibration, software
from quantbench.planner.layer_time import NO_TIME, LayerTimes, Span
from quantbench.planner.layout import Job, Layout, stages_of
from quantbench.planner.memory import embedding_parameters, stage_parameters

# Bytes per parameter of an optimizer step. Mixed-precision Adam reads the master weight, two
# moments and the gradient in fp32. It writes the master weight and the moments in fp32, and the
# weight in half precision.
_STEP_BYTES = 4 * 4 + 3 * 4 + 2
# Parameters per gradient bucket, which is the default of DeepSpeed's reduce_bucket_size. Every
# bucket costs the latency of a collective. With ZeRO-3, every layer does instead.
_BUCKET_PARAMETERS = 5e8
# Fraction of the overlapped reductions that shows in the time, relative to the fraction of the
# overlapped gathers (`exposed_share`). Nothing waits for reductions, but they take SMs and memory
# bandwidth. This value is assumed, not fitted.
_REDUCTIONS_WAIT = 0.25


@dataclass(frozen=True)
class Iteration:
    """Time per iteration in s, and its parts on the slowest stage, which add up to `sec.mid`.

    products: weight GEMMs.
    attention: GEMMs and softmax of attention.
    recompute: recomputed forward passes.
    vector: elementwise kernels.
    overhead: fitted overhead per layer.
    tensor: tensor-parallel collectives, exchange of rows between experts, and context-parallel
        traffic.
    logits: embedding, logits and loss, if the slowest stage holds them.
    point_to_point: transfers between stages.
    bubble: idle time while the pipeline fills and drains.
    data_parallel: part of the data-parallel traffic that shows in the time.
    optimizer: optimizer step, with its fixed overhead.
    stragglers: time of waiting for the slowest node.
    """

    sec: Span
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
        """Fraction of the time of the iteration that the pipeline bubble takes."""
        return self.bubble / self.sec.mid

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the iteration in s, by name."""
        parts = asdict(self)
        del parts["sec"]
        return parts

    @property
    def bound(self) -> str:
        """The largest loss, or `compute` if every loss is small.

        A loss is small if it is at most a fifth of the time of GEMMs and attention.
        """
        losses = {
            "tensor-parallel traffic": self.tensor,
            "pipeline bubble": self.bubble,
            "network": self.data_parallel + self.point_to_point,
            "recomputation": self.recompute,
            "launches and stragglers": self.overhead + self.stragglers,
            # In a pipeline the logits delay the other stages. Without a pipeline they are ordinary
            # work.
            "logits": self.logits * (self.bubble > 0),
            "memory bandwidth": self.vector + self.optimizer,
        }
        worst = max(losses, key=lambda name: losses[name])
        return worst if losses[worst] > 0.2 * (self.products + self.attention) else "compute"


def iteration(
    job: Job, layout: Layout, layer_times: LayerTimes, calibration: Calibration
) -> Iteration:
    """Predicts one iteration of a job in a layout, which must break no strict rule.

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
    # Filling and draining costs one slot of every stage except one stage that is slowest.
    fill = (fill + pace * -1) * (1 / layout.interleave)

    step_s = calibration.step_overhead_ms * 1e-3
    own = float(dense + experts)
    if layout.zero >= 1:
        own = dense / layout.replicas + experts / layout.expert_replicas
    step_s += _STEP_BYTES * own / job.elementwise_bytes_per_s
    # From ZeRO-2 on, gradients are reduced in every micro-batch, so that the traffic can overlap
    # with all micro-batches. Otherwise it can overlap only with the last one.
    room = pace.mid
    if layout.zero >= 2:
        room *= count
    traffic = data_parallel_s(job, layout, calibration, dense, experts)
    network = exposed_s(job, layout, calibration, traffic, room)
    embedding = embedding_parameters(job.shape, layout.tp)
    network += tied_embedding_s(job, layout, calibration, embedding)
    total = pace * count + fill + (network + step_s)
    nodes = layout.gpus / job.cluster.gpus_per_node
    # The largest of n normal deviates is about √(2 ln n) standard deviations above the mean.
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
    """Returns the time to send the activations of one micro-batch to the next stage, in s.

    Each tensor-parallel rank sends its part of the activations, and the receiving ranks gather the
    parts (Narayanan et al., 2021, section 4.1; DeepSpeed's PartitionedTensor). The time of the
    gather is not counted. The full rate of the adapters is assumed, because the fitted
    data_parallel_share describes rings with many small messages.
    """
    if layout.pp == 1:
        return 0.0
    shape = job.shape
    cluster = job.cluster
    sent = layout.mbs * shape.seq * shape.hidden * shape.element_bytes / layout.tp / layout.cp
    # A stage that fills a node has its neighbours on other nodes.
    if layout.tp * layout.replicas >= cluster.gpus_per_node:
        return NODE_LATENCY_S + sent / cluster.gpu_bytes_per_s
    return cluster.intra_node(2).time_s(sent)


def ring_passes(job: Job, layout: Layout) -> tuple[int, int]:
    """Returns how often weights are gathered and gradients reduced per iteration.

    Each pass goes around the data-parallel ring. Without ZeRO there is one all-reduce, which counts
    as two reductions. ZeRO-1 gathers and reduces once per iteration. ZeRO-2 gathers once per
    iteration and reduces once per micro-batch; with PyTorch's FSDP it also gathers once per
    micro-batch (torch.distributed.fsdp.ShardingStrategy: SHARD_GRAD_OP reshards after the backward
    pass). ZeRO-3 gathers twice and reduces once per micro-batch. Source: Rajbhandari et al., ZeRO,
    2020, section 7.
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
    """Returns the time of data-parallel traffic per iteration without overlap, in s.

    stage_parameters: parameters of a stage on one GPU, without its experts.
    experts: parameters of the stage's experts on one GPU.
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
    # Experts have fewer replicas. Their ring connects only the GPUs that hold the same experts,
    # which are ep / tp data-parallel GPUs apart.
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

    Ranks are placed as in Megatron-DeepSpeed: tensor-parallel ranks are adjacent, then come
    data-parallel ranks, and pipeline stages are outermost. So a node holds gpus_per_node / tp
    members of a data-parallel group (at most dp), their ring leaves the node once, and
    gpus_per_node / members rings share the adapters of the node.

    ranks: number of GPUs in a ring.
    stride: distance between neighbours of a ring, in data-parallel GPUs.
    ring_bytes: bytes of the buffers of all passes together.
    collectives: number of collectives. Each costs the latency of a ring between nodes.
    """
    if ranks == 1:
        return 0.0
    cluster = job.cluster
    ring_bytes *= (ranks - 1) / ranks
    in_node = min(ranks, max(1, cluster.gpus_per_node // (layout.tp * stride)))
    if in_node == ranks:
        return cluster.intra_node(ranks).time_s(ring_bytes)
    rings = cluster.gpus_per_node / in_node
    # Each collective passes every node of the ring in turn.
    nodes = ranks / in_node
    share = calibration.data_parallel_share / (1 + calibration.congestion * math.log2(nodes))
    latency_s = collectives * (nodes - 1) * calibration.hop_us * 1e-6
    return latency_s + rings * ring_bytes / (cluster.node_gb_per_s * 1e9 * share)


def tied_embedding_s(
    job: Job, layout: Layout, calibration: Calibration, embedding_parameters: int
) -> float:
    """Returns the time to add up the gradients of a tied embedding, in s.

    The first and the last stage each have such a gradient.

    embedding_parameters: parameters of the embedding on one GPU.
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
    """Returns how much of the traffic shows in the time of the iteration, in s.

    All traffic that does not overlap shows. Of the overlapped gathers of weights, a fraction shows,
    because computation waits for it. Of the overlapped reductions of gradients, a smaller fraction
    shows, because reductions slow computation down. At most `room_s` of the traffic overlaps.

    traffic_s: time of the traffic without overlap, in s.
    room_s: time of the computation that can overlap with the traffic, in s.
    """
    # With ZeRO-3 all traffic can overlap: DeepSpeed's overlap_comm is true for stage 3
    # (deepspeed.ai, DeepSpeed Configuration JSON), and FSDP prefetches.
    overlap = 1.0 if layout.zero == 3 else job.dp_overlap
    gathers, reductions = ring_passes(job, layout)
    shown = gathers + _REDUCTIONS_WAIT * reductions
    waits = calibration.exposed_share * shown / (gathers + reductions)
    return traffic_s - (1 - waits) * min(overlap * traffic_s, room_s)
