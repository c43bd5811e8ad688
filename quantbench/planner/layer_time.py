"""Predicts the time of one transformer layer per micro-batch, on one GPU of a parallel layout.

`LayerTimes` caches these times for a job. GEMMs, softmax and attention are predicted op by op.
Norms, biases, activation functions, dropout and residuals are predicted from the bytes that they
move, because memory bandwidth limits them. Collectives are predicted from the cluster's links.
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

# Ops of the attention core, between the qkv projection and the output projection.
_CORE = ("scores", "softmax", "context", "attention")

# Additional half-width in log time of latent attention's interval. Latent attention is predicted as
# ordinary attention with the same FLOPs (`TransformerShape.core_dim`). Median forward times of
# TRT-LLM 1.3.0rc20 are 3 % above this prediction on H100, and up to 25 % below it on B300 and GB300
# (aiconfigurator-core 0.12.0, context_mla_perf, 1024 tokens and more). The backward pass has not
# been measured.
_LATENT_SCATTER = math.log(1.4)

# Bytes per logit that the vocabulary-parallel cross entropy moves. Each logit is cast to fp32,
# reduced twice, exponentiated and scaled. Its gradient is written and cast to 16 bits (Megatron-LM,
# mpu/cross_entropy.py).
_LOSS_BYTES = (2 + 4) + 4 + (4 + 4) + (4 + 4) + (4 + 2)

# Height in rows of the tiles that grouped GEMMs are assumed to use.
_TILE_ROWS = 128


@dataclass(frozen=True)
class TimeInterval:
    """Time in seconds with its 90 % interval, from `low` to `high`.

    Adding a float adds a time without uncertainty.
    """

    low: float
    mid: float
    high: float

    def __add__(self, other: TimeInterval | float) -> TimeInterval:
        if isinstance(other, TimeInterval):
            return TimeInterval(self.low + other.low, self.mid + other.mid, self.high + other.high)
        return TimeInterval(self.low + other, self.mid + other, self.high + other)

    def __mul__(self, factor: float) -> TimeInterval:
        return TimeInterval(self.low * factor, self.mid * factor, self.high * factor)

    def widened(self, scatter: float) -> TimeInterval:
        """Returns the time with its interval widened by an independent error.

        scatter: half-width of the error's 90 % interval in log time. The error alone would give an
            interval from mid · exp(-scatter) to mid · exp(scatter).
        """
        below = math.hypot(math.log(self.mid / self.low), scatter)
        above = math.hypot(math.log(self.high / self.mid), scatter)
        return TimeInterval(self.mid * math.exp(-below), self.mid, self.mid * math.exp(above))


NO_TIME = TimeInterval(0.0, 0.0, 0.0)
#: times of the (forward, backward) pass
Spans = tuple[TimeInterval, TimeInterval]


class LayerTime(NamedTuple):
    """Times per micro-batch on one GPU, in s: of one layer, and of embedding and logits.

    Pairs are (forward, backward). A single time is the sum of both passes, except `dropout`.

    products: weight GEMMs of the layer, without routed experts.
    experts: GEMMs of the layer's routed experts.
    core: attention core: scores, softmax and context, or fused attention.
    vector: kernels of the layer that memory bandwidth limits.
    dropout: dropout in the attention core, forward only.
    reduces: tensor-parallel collectives, and exchange of tokens between GPUs with different
        experts.
    context: context-parallel traffic that does not overlap with attention.
    logits: GEMMs of the logits; after `fitted`, also the loss.
    loss: cross entropy, from the bytes that it moves.
    embedding: embedding lookup, and accumulation of the embedding's gradient.
    quantized: whether the layer's GEMMs have 8- or 4-bit inputs.
    overhead: launches and small kernels of the layer; 0 until `fitted` sets it.
    """

    products: Spans
    experts: Spans
    core: Spans
    vector: tuple[float, float]
    dropout: float
    reduces: float
    context: float
    logits: TimeInterval
    loss: float
    embedding: float
    quantized: bool
    overhead: float = 0.0

    def fitted(self, c: Calibration) -> LayerTime:
        """Converts times of isolated ops to times in training.

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
    def once(self) -> TimeInterval:
        """Time of the layer's forward and backward pass without recomputation, in s."""
        rest = sum(self.vector) + self.reduces + self.context + self.overhead
        return sum((*self.products, *self.experts, *self.core), NO_TIME) + rest

    def mixed(self, other: LayerTime, share: float) -> LayerTime:
        """Returns the mean times over the layers of a stage with two kinds of layers.

        other: times of the second kind of layer.
        share: fraction of the stage's layers that are of the second kind, 0 to 1.
        """
        if not share:
            return self

        def mean(a: Any, b: Any) -> Any:
            if isinstance(a, tuple):
                return tuple(map(mean, a, b))
            return a * (1 - share) + b * share

        return LayerTime(*map(mean, self, other))

    def repeated(self, recompute: str) -> TimeInterval:
        """Returns the time to recompute the layer's activations, in s.

        recompute: `full` repeats the forward pass, `selective` repeats the attention core with its
            dropout, and `none` repeats nothing.
        """
        if recompute == "full":
            # The forward pass has half of the collectives and a third of the context-parallel
            # bytes. The exposed context-parallel time is assumed to divide like these bytes.
            again = self.vector[0] + self.reduces / 2 + self.context / 3
            return self.products[0] + self.experts[0] + self.core[0] + again
        if recompute == "selective":
            return self.core[0] + self.dropout
        return NO_TIME


def _scaled(pair: Any, factor: float) -> Any:
    """Returns a (forward, backward) pair with both values multiplied by a factor."""
    return pair[0] * factor, pair[1] * factor


class LayerTimes:
    """Predicts and caches the layer times of one job.

    The cache's key has only the settings of a layout on which layer times depend
    (`Layout.per_layer`), so many layouts share one entry.
    """

    def __init__(self, job: Job, times: OpTimes) -> None:
        self._job = job
        self._times = times
        self._known: dict[LayerKey, LayerTime] = {}

    def at(self, key: LayerKey) -> LayerTime:
        """Returns the layer times if every op took its isolated time.

        `LayerTime.fitted` converts them to times in training.
        """
        self.prepare([key])
        return self._known[key]

    def prepare(self, keys: Iterable[LayerKey]) -> None:
        """Predicts and caches the layer times of many keys with one batch of op estimates."""
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
            seconds[work] = TimeInterval(us.low_us, us.latency_us, us.high_us) * 1e-6
        for key in wanted:
            self._known[key] = self._layer(key, seconds)

    def _layer(self, key: LayerKey, seconds: Mapping[Compute, TimeInterval]) -> LayerTime:
        """Adds up the layer times for one key.

        seconds: predicted time of each workload, in s.
        """
        shape, ops = _ops(self._job.shape, key)
        spans: dict[tuple[str, bool], TimeInterval] = defaultdict(lambda: NO_TIME)
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
                # The op covers whole sequences. With ring attention, each of cp GPUs has an early
                # and a late chunk of a sequence, so the causal work divides evenly.
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
            # Megatron runs two all-reduces forward and two backward. Sequence parallelism replaces
            # them by gathers and scatters of the same volume. Tokens are also exchanged four times:
            # to their experts and back, forward and backward.
            reduces=4 * (self._reduce_s(own) + self._exchange_s(own, key)),
            context=self._context_s(shape, key, spans["core", True].mid),
            logits=spans["logits", True] + spans["logits", False],
            loss=own.tokens * own.vocab / own.tp * _LOSS_BYTES / bytes_per_s,
            # Lookup and gradient accumulation together move each element about four times.
            embedding=4 * row_bytes / bytes_per_s,
            quantized=bool(shape.fp8_recipe),
        )

    def _reduce_s(self, shape: TransformerShape) -> float:
        """Returns the time of one tensor-parallel all-reduce, in s.

        If the group spans several nodes, only the network transfer is counted, without latency.

        shape: layer on one GPU, with the GPU's tokens.
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
        """Returns the time to send a micro-batch's tokens to their experts, in s.

        Sending the results back takes the same time. A token is sent over the network once to each
        other node with an expert of the token, and inside a node once to each other GPU with such
        an expert. Both kinds of transfers overlap, so the result is the longer time.

        shape: layer on one GPU, with the GPU's tokens.
        """
        if key.ep == 1 or not shape.experts:
            return 0.0
        cluster = self._job.cluster
        row_bytes = shape.tokens / key.tp * shape.hidden * shape.element_bytes
        # Link times were measured with all-reduces, in which a GPU sends all its bytes to one
        # neighbour. In an exchange, a GPU sends its bytes to all GPUs of the node. The same number
        # of bytes is assumed to take the same time.
        seconds = 0.0
        inside = min(key.ep, cluster.gpus_per_node)
        if inside > 1:
            sent = row_bytes * _expected_destinations(shape, key.ep)
            seconds = cluster.intra_node(inside).time_s(sent)
        nodes = key.ep / cluster.gpus_per_node
        if nodes <= 1:
            return seconds
        sent = row_bytes * _expected_destinations(shape, nodes)
        return max(seconds, NODE_LATENCY_S + sent / cluster.gpu_bytes_per_s)

    def _context_s(self, shape: TransformerShape, key: LayerKey, core_forward_s: float) -> float:
        """Returns the time of context-parallel traffic that does not overlap with attention, in s.

        Keys and values go around the ring once in the forward pass. In the backward pass, they go
        around again together with their gradients. The transfer of each chunk overlaps with
        attention on the previous chunk.

        shape: layer on one GPU, with whole sequences.
        core_forward_s: forward time of the attention core on one GPU, in s.
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
        # backward pass has 2.5 times the work of the forward pass: five GEMMs instead of two.
        room = core_forward_s * (key.cp - 1) / key.cp
        return max(once - room, 0.0) + max(2 * once - 2.5 * room, 0.0)


@lru_cache(maxsize=1024)
def _ops(whole: TransformerShape, key: LayerKey) -> tuple[TransformerShape, tuple[Op, ...]]:
    """Returns one layer on one GPU, and the layer's ops.

    The shape and the ops of the attention core have whole sequences. With context parallelism, the
    linear ops have only the GPU's tokens.
    """
    shape = divided(whole, key.tp, key.mbs)
    if key.dense:
        shape = replace(shape, experts=0, top_k=0, moe_ffn=0, shared_ffn=0, routing="balanced")
    elif shape.experts:
        shape = replace(shape, ep=key.ep, expert_tp=1)
    ops = shape.ops()
    if key.cp > 1:
        # Only linear ops are divided here. `LayerTimes` divides the attention core's time.
        part = replace(shape, seq=shape.seq // key.cp).ops()
        ops = tuple(a if a.name in _CORE else b for a, b in zip(ops, part, strict=True))
    return shape, ops


def _expected_destinations(shape: TransformerShape, places: float) -> float:
    """Returns the expected number of other GPUs (or nodes) to which one token is sent.

    A token is sent once to each GPU that holds experts of the token. Experts are assumed to be
    chosen at random.

    places: number of GPUs (or nodes) over which the experts are spread.
    """
    # `share` is the probability that a given GPU (or node) holds an expert of the token. The model
    # may limit a token to `top` groups of experts. A GPU with whole groups then gets the token if
    # one of these groups was chosen. A GPU with a fraction of a group gets the token if the group
    # was chosen, and one of the experts chosen in the group is on this GPU.
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
    """Returns the bytes (forward, backward) that a cast or a permutation moves, 0 for other ops."""
    work = op.workload
    if not isinstance(work, Cast | Permute):
        return 0, 0
    forward = op.phase == "forward"
    return work.min_bytes * forward, work.min_bytes * (not forward)


def _timed(work: Compute) -> dict[Compute, float]:
    """Returns workloads whose weighted times sum to the time of `work`, with their weights.

    Most workloads are returned unchanged with weight 1. There are three exceptions:

    - Casts and permutations return nothing, because they are counted in bytes.
    - In a weight-gradient GEMM (layout tn), k is the number of tokens. It is rounded up to a
      multiple of 16 bytes, because the latency model would otherwise predict misaligned operands.
      In training, the number of tokens misaligns no operand: 16-bit operands have one row per
      token, and narrower formats are padded.
    - The experts' grouped GEMM is approximated by batched GEMMs over all experts with equal rows.
      Each expert's rows are replaced by numbers that fill whole tiles (`_filled`). The weight of a
      batched GEMM is the fraction of experts with its number of rows.
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
    """Returns one or two numbers of rows that fill whole tiles, with weights.

    An expert's rows vary from iteration to iteration, so the mean time over many iterations does
    not jump at whole tiles. The weighted mean of the numbers is `rows`, or 8 for 1 to 7 rows.

    The numbers are the multiples of a unit just below and just above `rows`, or `rows` alone if it
    is a multiple. The unit is the tile height of 128 rows. Below 128 rows, the unit is the largest
    power of two up to `rows`, but at least 8.

    rows: number of rows of one expert.

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
    """Returns one layer of a model on one of `tp` GPUs, with the vocabulary padded as in Megatron.

    shape: whole model.
    mbs: samples per micro-batch.
    """
    return replace(
        shape, layers=1, dense_layers=0, tp=tp, mbs=mbs, vocab=padded_vocab(shape.vocab, tp)
    )


def _vector_bytes(shape: TransformerShape, key: LayerKey) -> tuple[float, float]:
    """Returns the bytes (forward, backward) that one layer's elementwise kernels and norms move.

    The kernels are assumed to be fused as in Megatron-LM (megatron/fused_kernels, bias_gelu,
    bias_dropout_add).

    shape: layer on one GPU, with the GPU's tokens.
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
    # The activation function reads its input, and the gate if there is one, and writes its output.
    activation = shape.tokens * width / shape.tp * gates * w
    qkv = shape.tokens * shape.qkv_columns
    context = shape.tokens * (shape.heads // shape.tp * shape.value_width)
    latents = shape.tokens * (shape.q_rank + shape.kv_rank)
    # Memory accesses per element in the forward pass:
    # - two norms: a read and a write each
    # - two residual additions with bias and dropout: two reads, a write and a mask each
    # - bias and transpose of q, k and v, and transpose of the context: a read and a write each
    # - norms of latents: a read and a write each
    forward = whole * 2 * 2 * w + whole * 2 * (3 * w + mask) + activation
    forward += (qkv + context + latents) * 2 * w
    # Memory accesses per element in the backward pass:
    # - two norms: two reads and a write each, and two reads for the weight gradients
    # - two dropouts: a read, a write and a mask each
    # - two additions of residual gradients: two reads and a write each
    # - bias gradients: a read of each output, including the activation's and those of q, k and v
    # - activation: one read more than in the forward pass
    # - q, k, v and the context: a read and a write each
    # - norms of latents: as for the two norms
    backward = whole * (2 * 5 * w + 2 * (2 * w + mask) + 2 * 3 * w + 2 * w)
    backward += activation * (gates + 2) / gates + qkv * 3 * w + context * 2 * w + latents * 5 * w
    # Weight gradients are accumulated over micro-batches: two reads and a write per weight.
    return forward, backward + 3 * w * sum(layer_weights(shape, key))


def _core_dropout_bytes(shape: TransformerShape) -> float:
    """Returns the bytes that dropout on attention probabilities moves: a read, a write and a mask.

    The result is 0 without dropout, and with fused attention.
    """
    if not shape.dropout or shape.attention == "flash":
        return 0.0
    probabilities = shape.mbs * shape.heads / shape.tp * shape.seq**2
    return probabilities * (2 * shape.element_bytes + MASK_BYTES)
