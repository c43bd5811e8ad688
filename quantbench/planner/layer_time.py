"""Computes the time of one layer per micro-batch, on one GPU of a parallel layout.

GEMMs, softmax and attention are predicted op by op, and collectives from the links of the cluster.
Kernels that the memory bandwidth limits (norms, biases, activations, dropout, residuals) are
counted in bytes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from quantbench.latency.interconnect import NODE_LATENCY_S
from quantbench.latency.op_times import OpTimes, as_run
from quantbench.planner.calibration import Calibration
from quantbench.planner.layout import Job, LayerKey, layer_weights
from quantbench.planner.memory import MASK_BYTES
from quantbench.quantization import VECTOR_BYTES, cdiv
from quantbench.workload import Gemm, GroupedGemm, Op, TransformerShape
from quantbench.workload.dtypes import ALIGNED_ELEMENTS, DTYPES, element_bytes
from quantbench.workload.kinds import Compute
from quantbench.workload.moe import Permute
from quantbench.workload.ops import Cast
from quantbench.workload.parameters import padded_vocab

# Ops between the qkv projection and the output projection.
_CORE = ("scores", "softmax", "context", "attention")

# Half-width in log time of the interval of attention with latent keys and values, which is
# predicted as ordinary attention with the same FLOPs (`TransformerShape.core_dim`). In the forward
# pass, the medians of TRT-LLM 1.3.0rc20 are 3 % above this prediction on H100, and up to 25 % below
# it on B300 and GB300 (aiconfigurator-core 0.12.0, context_mla_perf, 1024 tokens and more). The
# backward pass is not measured.
_LATENT_SCATTER = math.log(1.4)

# Bytes that the vocabulary-parallel cross entropy moves per logit, in fp32. The logits are cast,
# reduced twice, exponentiated and scaled, and the gradient is written and cast back (Megatron-LM,
# mpu/cross_entropy.py).
_LOSS_BYTES = (2 + 4) + 4 + (4 + 4) + (4 + 4) + (4 + 2)

# Rows of the tiles of grouped GEMMs.
_TILE_ROWS = 128


@dataclass(frozen=True)
class Span:
    """Time in seconds with its 90 % interval.

    A plain number stands for a time whose interval has no width.
    """

    low: float
    mid: float
    high: float

    def __add__(self, other: Span | float) -> Span:
        if isinstance(other, Span):
            return Span(self.low + other.low, self.mid + other.mid, self.high + other.high)
        return Span(self.low + other, self.mid + other, self.high + other)

    def __mul__(self, factor: float) -> Span:
        return Span(self.low * factor, self.mid * factor, self.high * factor)

    def widened(self, scatter: float) -> Span:
        """Returns the time with an independent error added.

        scatter: half-width in log time of the error's 90 % interval, which is a factor of
            exp(±scatter).
        """
        below = math.hypot(math.log(self.mid / self.low), scatter)
        above = math.hypot(math.log(self.high / self.mid), scatter)
        return Span(self.mid * math.exp(-below), self.mid, self.mid * math.exp(above))


NO_TIME = Span(0.0, 0.0, 0.0)
Spans = tuple[Span, Span]


class LayerTime(NamedTuple):
    """Times per micro-batch on one GPU, in s. Pairs are (forward, backward).

    products: weight GEMMs of a layer, without the GEMMs of routed experts.
    experts: GEMMs of the routed experts of a layer.
    core: GEMMs and softmax of attention, or fused attention.
    vector: kernels of a layer that the memory bandwidth limits.
    dropout: dropout in the forward pass of the attention core.
    reduces: tensor-parallel collectives and exchange of rows between experts, forward and backward.
    context: context-parallel traffic of a layer, forward and backward.
    logits: GEMMs of the logits. After `fitted` they include the loss.
    loss: loss, by the bytes of ideal passes.
    embedding: lookup in the embedding and accumulation of its gradient.
    quantized: whether the GEMMs of a layer have 8- or 4-bit inputs.
    overhead: launches and small kernels of a layer, forward and backward. `fitted` sets it.
    """

    products: Spans
    experts: Spans
    core: Spans
    vector: tuple[float, float]
    dropout: float
    reduces: float
    context: float
    logits: Span
    loss: float
    embedding: float
    quantized: bool
    overhead: float = 0.0

    def fitted(self, c: Calibration) -> LayerTime:
        """Returns the times in training.

        The times of single ops and of ideal passes are multiplied by the factors.

        c: factors of training.
        """
        products = c.compute_factor
        if self.quantized:
            products *= c.quantized_factor
        vector = c.elementwise_factor
        return self._replace(
            products=_scaled(self.products, products),
            experts=_scaled(self.experts, products * c.experts_factor),
            core=_scaled(self.core, c.compute_factor * c.attention_factor),
            vector=_scaled(self.vector, vector),
            dropout=self.dropout * vector,
            reduces=self.reduces * c.tensor_factor,
            logits=self.logits * c.compute_factor + self.loss * vector,
            embedding=self.embedding * vector,
            overhead=c.layer_overhead_ms * 1e-3,
        )

    @property
    def once(self) -> Span:
        """Time of a layer without recomputation, in s."""
        rest = sum(self.vector) + self.reduces + self.context + self.overhead
        return sum((*self.products, *self.experts, *self.core), NO_TIME) + rest

    def mixed(self, other: LayerTime, share: float) -> LayerTime:
        """Returns the mean layer of a stage that has two kinds of layers.

        other: times of the other kind of layer.
        share: fraction of the layers that are of the other kind.
        """
        if not share:
            return self

        def mean(a: Any, b: Any) -> Any:
            if isinstance(a, tuple):
                return tuple(map(mean, a, b))
            return a * (1 - share) + b * share

        return LayerTime(*map(mean, self, other))

    def repeated(self, recompute: str) -> Span:
        """Returns the time of the recomputation of a layer, in s.

        With `full`, the forward pass is repeated; with `selective`, the attention core with its
        dropout.

        recompute: kind of recomputation, as in `Layout`.
        """
        if recompute == "full":
            # Half of the collectives belong to the forward pass. A third of the context-parallel
            # bytes do, and the time that shows is assumed to divide like the bytes.
            again = self.vector[0] + self.reduces / 2 + self.context / 3
            return self.products[0] + self.experts[0] + self.core[0] + again
        if recompute == "selective":
            return self.core[0] + self.dropout
        return NO_TIME


def _scaled(pair: Any, factor: float) -> Any:
    """Multiplies both values of a pair by a factor."""
    return pair[0] * factor, pair[1] * factor


class LayerTimes:
    """Cache of the layer times of a job.

    The key is the part of a layout on which the layer times depend (`Layout.per_layer`).
    """

    def __init__(self, job: Job, times: OpTimes) -> None:
        self._job = job
        self._times = times
        self._known: dict[LayerKey, LayerTime] = {}

    def at(self, key: LayerKey) -> LayerTime:
        """Returns the times of ideal single ops on one GPU.

        `LayerTime.fitted` converts them to times in training.
        """
        self.prepare([key])
        return self._known[key]

    def prepare(self, keys: Iterable[LayerKey]) -> None:
        """Computes the times for many keys in one batched query."""
        wanted = set(keys)
        if self._job.shape.dense_layers:
            wanted |= {key._replace(dense=not key.dense) for key in wanted}
        wanted -= self._known.keys()
        if not wanted:
            return
        shares: dict[Compute, float] = {}
        for key in wanted:
            for op in _ops(self._job.shape, key)[1]:
                shares |= _timed(op.workload)
        works = list(shares)
        seconds = {}
        for work, source in zip(works, self._times.estimates(works), strict=True):
            us = as_run(work, source, self._times.device, softmax=self._job.shape.softmax)
            seconds[work] = Span(us.low_us, us.latency_us, us.high_us) * 1e-6
        for key in wanted:
            self._known[key] = self._layer(key, seconds)

    def _layer(self, key: LayerKey, seconds: Mapping[Compute, Span]) -> LayerTime:
        """Adds up the times of the ops, bytes and collectives of one layer.

        seconds: time of each workload, in s.
        """
        shape, ops = _ops(self._job.shape, key)
        spans: dict[tuple[str, bool], Span] = defaultdict(lambda: NO_TIME)
        own = replace(shape, seq=shape.seq // key.cp)
        forward_bytes, backward_bytes = _vector_bytes(own, key)
        moved_forward = moved_backward = 0
        for op in ops:
            moved = _moved(op)
            moved_forward += moved[0]
            moved_backward += moved[1]
            time = NO_TIME
            for work, share in _timed(op.workload).items():
                time += seconds[work] * share
            if time == NO_TIME:
                continue
            part = "logits" if op.name == "logits" else "products"
            if isinstance(op.workload, GroupedGemm):
                part = "experts"
            if op.name in _CORE:
                part = "core"
                if shape.kv_rank:
                    time = time.widened(_LATENT_SCATTER)
                # Ring attention gives every GPU an early and a late chunk of the sequence, so that
                # all GPUs have the same causal work.
                time *= 1 / key.cp
            spans[part, op.phase == "forward"] += time

        def both(part: str) -> Spans:
            return spans[part, True], spans[part, False]

        bytes_per_s = self._job.elementwise_bytes_per_s
        dropout_s = _core_dropout_bytes(shape) / key.cp / bytes_per_s
        row_bytes = own.tokens * own.hidden * own.element_bytes
        return LayerTime(
            products=both("products"),
            experts=both("experts"),
            core=both("core"),
            vector=(
                (forward_bytes + moved_forward) / bytes_per_s + dropout_s,
                (backward_bytes + moved_backward) / bytes_per_s + dropout_s,
            ),
            dropout=dropout_s,
            # Megatron runs two all-reduces forward and two backward. With sequence parallelism
            # there are gathers and scatters of the same volume instead. Rows also make four trips:
            # to their experts and back, forward and backward.
            reduces=4 * (self._reduce_s(own) + self._exchange_s(own, key)),
            context=self._context_s(shape, key, spans["core", True].mid),
            logits=spans["logits", True] + spans["logits", False],
            loss=own.tokens * own.vocab / own.tp * _LOSS_BYTES / bytes_per_s,
            # Lookup and gradient accumulation move each element of a row about four times.
            embedding=4 * row_bytes / bytes_per_s,
            quantized=bool(shape.fp8_recipe),
        )

    def _reduce_s(self, shape: TransformerShape) -> float:
        """Returns the time of one tensor-parallel all-reduce, in s.

        Beyond a node, only the bytes over the network adapters count, and no latency.
        """
        if shape.tp == 1:
            return 0.0
        cluster = self._job.cluster
        bus_bytes = 2 * (shape.tp - 1) / shape.tp * shape.tokens * shape.hidden
        bus_bytes *= shape.element_bytes
        if shape.tp <= cluster.gpus_per_node:
            return cluster.intra_node(shape.tp).time_s(bus_bytes)
        return bus_bytes / cluster.gpu_bytes_per_s

    def _exchange_s(self, shape: TransformerShape, key: LayerKey) -> float:
        """Returns the time to send the rows of a layer to their experts, in s.

        The way back takes the same time, as do the two ways in the backward pass. A row crosses
        the network once to each other node that holds an expert of the row, and a link inside a
        node once to each other GPU that holds one. The two kinds of transfers overlap, so the
        longer time counts.
        """
        if key.ep == 1 or not shape.experts:
            return 0.0
        cluster = self._job.cluster
        row_bytes = shape.tokens / key.tp * shape.hidden * shape.element_bytes
        # The times of the links were measured with all-reduces, in which a GPU sends all its bytes
        # to one neighbour. Here a GPU divides its bytes over the GPUs of the node. Equal numbers of
        # bytes are assumed to take equal times.
        seconds = 0.0
        inside = min(key.ep, cluster.gpus_per_node)
        if inside > 1:
            sent = row_bytes * _other_places(shape, key.ep)
            seconds = cluster.intra_node(inside).time_s(sent)
        nodes = key.ep / cluster.gpus_per_node
        if nodes <= 1:
            return seconds
        sent = row_bytes * _other_places(shape, nodes)
        return max(seconds, NODE_LATENCY_S + sent / cluster.gpu_bytes_per_s)

    def _context_s(self, shape: TransformerShape, key: LayerKey, core_forward_s: float) -> float:
        """Returns how much of the context-parallel traffic shows in the time, in s.

        Keys and values are sent once in the forward pass. In the backward pass they are sent again,
        with their gradients. In a ring, each transfer of a chunk overlaps with attention on the
        chunk that has arrived before.

        core_forward_s: time of the forward pass of the attention core, in s.
        """
        if key.cp == 1:
            return 0.0
        width = shape.kv_heads_per_gpu * (shape.head_dim + shape.value_width) * shape.element_bytes
        sent = shape.tokens / key.cp * (key.cp - 1) * width
        cluster = self._job.cluster
        if key.tp * key.cp <= cluster.gpus_per_node:
            once = cluster.intra_node(key.cp).time_s(sent)
        else:
            once = (key.cp - 1) * NODE_LATENCY_S + sent / cluster.gpu_bytes_per_s
        # A ring has cp - 1 transfers, so attention on one of the cp chunks overlaps with none. The
        # backward pass computes 2.5 times as much as the forward pass (five GEMMs instead of two).
        room = core_forward_s * (key.cp - 1) / key.cp
        return max(once - room, 0.0) + max(2 * once - 2.5 * room, 0.0)


@lru_cache(maxsize=1024)
def _ops(whole: TransformerShape, key: LayerKey) -> tuple[TransformerShape, tuple[Op, ...]]:
    """Returns a layer on one GPU, and its ops.

    The layer has whole sequences. Its linear ops have the tokens that the GPU holds.
    """
    shape = divided(whole, key.tp, key.mbs)
    if key.dense:
        shape = replace(shape, experts=0, top_k=0, moe_ffn=0, shared_ffn=0, routing="balanced")
    elif shape.experts:
        shape = replace(shape, ep=key.ep, expert_tp=1)
    ops = shape.ops()
    if key.cp > 1:
        # Linear ops have the tokens of the GPU. Attention is divided later.
        part = replace(shape, seq=shape.seq // key.cp).ops()
        ops = tuple(a if a.name in _CORE else b for a, b in zip(ops, part, strict=True))
    return shape, ops


def _other_places(shape: TransformerShape, places: float) -> float:
    """Returns the expected number of other GPUs or nodes that hold experts of one row.

    The GPUs or nodes of a row's experts are taken as independent of each other.

    places: number of GPUs or nodes that share the experts.
    """
    # `share` is the probability that a given place holds an expert of the row. If the model limits
    # a row to `top` groups of experts, a place that holds whole groups is met if one of its groups
    # is among them. A place that holds a part of a group is met if the group is among them and one
    # of the experts chosen in the group lies in this part.
    groups = shape.expert_groups
    top = shape.top_groups
    if not groups:
        share = 1 - (1 - 1 / places) ** shape.top_k
    elif places <= groups:
        share = 1 - math.prod((groups - groups / places - i) / (groups - i) for i in range(top))
    else:
        share = top / groups * (1 - (1 - groups / places) ** (shape.top_k / top))
    return (places - 1) * share


def _moved(op: Op) -> tuple[int, int]:
    """Returns the bytes (forward, backward) that a cast or a permutation moves."""
    work = op.workload
    if not isinstance(work, Cast | Permute):
        return 0, 0
    forward = op.phase == "forward"
    return work.min_bytes * forward, work.min_bytes * (not forward)


def _timed(work: Compute) -> dict[Compute, float]:
    """Returns the workloads whose times make up the time of `work`, each with its weight.

    The result is empty for a cast or a permutation, which only moves bytes. A GEMM of a weight
    gradient (layout tn) sums over tokens, and its number of tokens is rounded up to the next
    multiple of 16 bytes. The latency model would else predict misaligned operands. In training, a
    number of tokens misaligns no operand: in 16-bit formats it is the number of rows of an operand
    and not their length, and narrower formats are padded.

    The GEMMs of experts are approximated by batched GEMMs of all experts with equal rows. The rows
    of each expert are replaced by numbers that fill tiles (`_filled`), and the weight of a batched
    GEMM is the fraction of the experts that have its number of rows.
    """
    if isinstance(work, GroupedGemm):
        shares: dict[int, float] = defaultdict(float)
        for rows, count in Counter(work.tokens_per_expert).items():
            for filled, share in _filled(rows):
                shares[filled] += count * share / work.num_experts
        every = work.num_experts
        return {replace(work.gemm(rows), batch=every): share for rows, share in shares.items()}
    if isinstance(work, Cast | Permute):
        return {}
    if isinstance(work, Gemm) and work.batch == 1 and work.layout == "tn":
        step = VECTOR_BYTES * DTYPES[work.dtype].packed // element_bytes(work.dtype)
        work = replace(work, k=cdiv(work.k, step) * step)
    return {work: 1.0}


def _filled(rows: int) -> tuple[tuple[int, float], ...]:
    """Returns numbers of rows that fill tiles, each with its weight.

    They are the multiples of a unit next below and next above `rows`, or `rows` alone if it is such
    a multiple. The unit is the height of a tile (128), or the largest power of two up to `rows` if
    that is less, but at least 8. The weighted mean of the numbers is `rows`, or 8 for fewer rows.
    The rows of an expert vary from iteration to iteration, so the mean time over many iterations
    does not jump at whole tiles.

    rows: number of rows of an expert.

    >>> _filled(128), _filled(160), _filled(40), _filled(3), _filled(0)
    (((128, 1.0),), ((128, 0.75), (256, 0.25)), ((32, 0.75), (64, 0.25)), ((8, 1.0),), ())
    """
    if not rows:
        return ()
    step = max(ALIGNED_ELEMENTS, min(_TILE_ROWS, 1 << rows.bit_length() - 1))
    low = max(ALIGNED_ELEMENTS, rows // step * step)
    share = max(0, rows - low) / step
    if not share:
        return ((low, 1.0),)
    return ((low, 1 - share), (low + step, share))


def divided(shape: TransformerShape, tp: int, mbs: int) -> TransformerShape:
    """Returns one layer of the model on one of `tp` GPUs.

    The vocabulary is padded as in Megatron.
    """
    return replace(
        shape, layers=1, dense_layers=0, tp=tp, mbs=mbs, vocab=padded_vocab(shape.vocab, tp)
    )


def _vector_bytes(shape: TransformerShape, key: LayerKey) -> tuple[float, float]:
    """Returns the bytes (forward, backward) of the elementwise kernels and norms of one layer.

    The kernels are assumed to be fused as in Megatron-LM (megatron/fused_kernels, bias_gelu,
    bias_dropout_add).
    """
    w = shape.element_bytes
    mask = MASK_BYTES * shape.dropout
    whole: float = shape.tokens * shape.hidden
    if key.sequence_parallel:
        whole /= shape.tp
    width = shape.ffn
    if shape.experts:
        width = shape.top_k * shape.moe_ffn + shape.shared_ffn
    gates = 2 + shape.gated
    # The activation function reads its input with the gate and writes its output.
    activation = shape.tokens * width / shape.tp * gates * w
    qkv = shape.tokens * shape.qkv_columns
    context = shape.tokens * (shape.heads // shape.tp * shape.value_width)
    latents = shape.tokens * (shape.q_rank + shape.kv_rank)
    # Accesses per element in the forward pass. Two norms: a read and a write each. Two residual
    # additions with bias and dropout: two reads, a write and a mask each. Bias and transpose of q,
    # k and v, and transpose of the context: a read and a write each. Norms of latents: a read and a
    # write each.
    forward = whole * 2 * 2 * w + whole * 2 * (3 * w + mask) + activation
    forward += (qkv + context + latents) * 2 * w
    # Accesses per element in the backward pass. Two norms: two reads and a write each, and two
    # reads for the weight gradients. Two dropouts: a read, a write and a mask each. Two additions
    # of residual gradients: two reads and a write each. Bias gradients: a read of each output,
    # including those of the activation and of q, k and v. Activation: one read more than in the
    # forward pass. q, k, v and the context: a read and a write each. Norms of latents: the same as
    # the two norms.
    backward = whole * (2 * 5 * w + 2 * (2 * w + mask) + 2 * 3 * w + 2 * w)
    backward += activation * (gates + 2) / gates + qkv * 3 * w + context * 2 * w + latents * 5 * w
    # Weight gradients are accumulated over the micro-batches: two reads and a write each.
    return forward, backward + 3 * w * sum(layer_weights(shape, key))


def _core_dropout_bytes(shape: TransformerShape) -> float:
    """Returns the bytes of the dropout on attention probabilities (a read, a write and a mask).

    Returns 0 if attention is fused.
    """
    if not shape.dropout or shape.attention == "flash":
        return 0.0
    probabilities = shape.mbs * shape.heads / shape.tp * shape.seq**2
    return probabilities * (2 * shape.element_bytes + MASK_BYTES)
