"""The time of one layer, and of embedding and logits, on one GPU of a tensor-parallel group, per micro-batch.

Products, softmax and attention are asked of `OpTimes`. What memory bandwidth alone decides (norms, biases,
activations, dropout, residuals) is counted in bytes here; all-reduces come from the cluster's links.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from quantbench.latency.estimate import Estimate
from quantbench.latency.op_times import OpTimes, as_run
from quantbench.planner.calibration import Calibration
from quantbench.planner.layout import Job, padded_vocab
from quantbench.workload import TransformerShape
from quantbench.workload.dtypes import element_bytes
from quantbench.workload.transformer import Compute

# What elementwise kernels reach of the memory bandwidth, as in quantbench.latency.op_times.
_BANDWIDTH_SHARE = 0.8
# Bytes per element moved by the fused kernels of Megatron-LM (megatron/fused_kernels, bias_gelu, bias_dropout_add),
# in passes over two-byte elements; a dropout mask is one byte.
_MASK_BYTES = 1
# Kernel of the parts of attention's core.
_CORE = ("scores", "softmax", "context", "attention")


@dataclass(frozen=True)
class Span:
    """Seconds with the interval that they lie in nine times out of ten."""

    low: float
    mid: float
    high: float

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.mid + other.mid, self.high + other.high)

    def times(self, factor: float) -> Span:
        """All three multiplied."""
        return Span(self.low * factor, self.mid * factor, self.high * factor)

    def widened(self, scatter: float) -> Span:
        """With an independent error of which nine in ten stay within a factor of exp(scatter)."""
        below, above = (math.hypot(math.log(a / b), scatter) for a, b in ((self.mid, self.low), (self.high, self.mid)))
        return Span(self.mid * math.exp(-below), self.mid, self.mid * math.exp(above))


ZERO = Span(0.0, 0.0, 0.0)


def exactly(seconds: float) -> Span:
    """A time without an interval of its own."""
    return Span(seconds, seconds, seconds)


@dataclass(frozen=True)
class LayerTime:
    """Seconds per layer and micro-batch on one GPU.

    products: weight products forward and backward, once each. core: attention's products and softmax likewise.
    products_forward, core_forward: the forward share of both, which recomputation adds again. vector, vector_forward:
    what bandwidth decides. core_dropout: of vector_forward what drops probabilities out. reduces, reduces_forward:
    tensor-parallel collectives. overhead: the fitted constant.
    logits: everything after the last layer (forward, backward, loss). embedding: the lookup and its gradient.
    """

    products: Span
    products_forward: Span
    core: Span
    core_forward: Span
    vector: float
    vector_forward: float
    core_dropout: float
    reduces: float
    reduces_forward: float
    overhead: float
    logits: Span
    embedding: float

    def layer(self, recompute: str) -> Span:
        """One layer, forward and backward, with what is recomputed."""
        time = self.products + self.core + exactly(self.vector + self.reduces + self.overhead)
        if recompute == "full":
            again = exactly(self.vector_forward + self.reduces_forward)
            return time + self.products_forward + self.core_forward + again
        return time + self.core_forward + exactly(self.core_dropout) if recompute == "selective" else time

    @cached_property
    def by_recompute(self) -> dict[str, Span]:
        """`layer` for each kind of recomputation."""
        return {kind: self.layer(kind) for kind in ("full", "selective", "none")}


class LayerTimes:
    """Layer times of a job, by tensor parallelism and micro-batch size; each is computed once."""

    def __init__(self, job: Job, times: OpTimes, calibration: Calibration) -> None:
        self._job, self._times, self._calibration = job, times, calibration
        self._known: dict[tuple[int, int, bool], LayerTime] = {}

    def at(self, tp: int, mbs: int, *, sequence_parallel: bool = False) -> LayerTime:
        """The layer on one of `tp` GPUs for micro-batches of `mbs` samples."""
        key = (tp, mbs, sequence_parallel)
        if key not in self._known:
            self.prepare([key])
        return self._known[key]

    def prepare(self, keys: Iterable[tuple[int, int, bool]]) -> None:
        """Ask for the times of many layers, (tp, mbs, sequence_parallel) each, in one batch."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self._known]
        works = layer_workloads(self._job, ((tp, mbs) for tp, mbs, _ in wanted))
        known = dict(zip(works, self._times.estimates(works), strict=True)) if works else {}
        for tp, mbs, parallel in wanted:
            self._known[tp, mbs, parallel] = self._make(divided(self._job.shape, tp, mbs), parallel, known)

    def _make(self, shape: TransformerShape, sequence_parallel: bool, known: Mapping[Compute, Estimate]) -> LayerTime:
        spans: dict[tuple[bool, bool], Span] = defaultdict(lambda: ZERO)
        logits = ZERO
        for op in shape.ops():
            span = self._span(op.workload, known[op.workload])
            if op.name == "logits":
                logits += span
            else:
                spans[op.name in _CORE, op.phase == "forward"] += span
        vector_forward, vector_backward = _vector_s(self._job, shape, sequence_parallel)
        reduce_s = self._reduce_s(shape)
        return LayerTime(
            products=spans[False, True] + spans[False, False],
            products_forward=spans[False, True],
            core=spans[True, True] + spans[True, False],
            core_forward=spans[True, True],
            vector=vector_forward + vector_backward,
            vector_forward=vector_forward,
            core_dropout=_core_dropout_s(self._job, shape),
            # Megatron: two all-reduces forward, two backward (with sequence parallelism: gathers and scatters of the
            # same volume).
            reduces=4 * reduce_s,
            reduces_forward=2 * reduce_s,
            overhead=self._calibration.layer_overhead_ms * 1e-3,
            logits=logits + exactly(_loss_s(self._job, shape)),
            embedding=_embedding_s(self._job, shape),
        )

    def _span(self, work: Compute, source: Estimate) -> Span:
        us = as_run(
            work, source, self._times.device,
            softmax=self._job.shape.softmax, unaligned_share=self._calibration.unaligned_share,
        )  # fmt: skip
        return Span(us.low_us, us.latency_us, us.high_us).times(1e-6)

    def _reduce_s(self, shape: TransformerShape) -> float:
        if shape.tp == 1:
            return 0.0
        cluster = self._job.cluster
        bus_bytes = 2 * (shape.tp - 1) / shape.tp * shape.tokens * shape.hidden * element_bytes(shape.dtype)
        if shape.tp <= cluster.gpus_per_node:
            return self._calibration.tensor_factor * cluster.intra_node(shape.tp).time_s(bus_bytes)
        return bus_bytes / (cluster.gpu_gb_per_s * 1e9)


def layer_workloads(job: Job, degrees: Iterable[tuple[int, int]]) -> list[Compute]:
    """Every workload of the layers at (tp, mbs), each once."""
    shapes = (divided(job.shape, tp, mbs) for tp, mbs in dict.fromkeys(degrees))
    return list(dict.fromkeys(op.workload for shape in shapes for op in shape.ops()))


def divided(shape: TransformerShape, tp: int, mbs: int) -> TransformerShape:
    """One layer of the model as one of `tp` GPUs computes it; the vocabulary is padded as Megatron does."""
    return replace(shape, layers=1, tp=tp, mbs=mbs, vocab=padded_vocab(shape.vocab, tp))


def _vector_s(job: Job, shape: TransformerShape, sequence_parallel: bool) -> tuple[float, float]:
    """(forward, backward) seconds of everything between the products, one layer."""
    w, mask = element_bytes(shape.dtype), _MASK_BYTES if shape.dropout else 0
    whole = shape.tokens * shape.hidden / (shape.tp if sequence_parallel else 1)
    mlp = shape.tokens * shape.ffn / shape.tp
    gates = 3 if shape.gated else 2
    width = shape.heads // shape.tp * shape.head_dim
    qkv = shape.tokens * (width + 2 * shape.kv_heads_per_gpu * shape.head_dim)
    context = shape.tokens * width
    # Two norms: read, write. Two residual additions with bias and dropout: two reads, a write, a mask. The activation:
    # read (with its gate), write. q, k and v get their bias and order, the context its order: read, write.
    forward = whole * (2 * 2 * w + 2 * (3 * w + mask)) + mlp * gates * w + (qkv + context) * 2 * w
    # Two norms: two reads and a write, two reads for their own gradients. Two dropouts: read, write, mask. Two
    # residual gradients added: two reads, a write. Gradients of the biases: a read of each output. The activation: one
    # read more than forward. q, k, v and the context: read, write.
    backward = whole * (2 * 5 * w + 2 * (2 * w + mask) + 2 * 3 * w + 2 * w)
    backward += mlp * (gates + 2) * w + qkv * 3 * w + context * 2 * w
    # Each micro-batch's weight gradients are added to those before: two reads, a write.
    backward += 3 * w * layer_weights(shape)
    bytes_per_s = job.cluster.device.memory_gb_per_s * 1e9 * _BANDWIDTH_SHARE
    dropped = _core_dropout_s(job, shape)
    return forward / bytes_per_s + dropped, backward / bytes_per_s + dropped


def _core_dropout_s(job: Job, shape: TransformerShape) -> float:
    """Dropping probabilities out, or their gradients: read, write, a mask. A fused kernel does it on the way."""
    if not shape.dropout or shape.attention == "flash":
        return 0.0
    probabilities = shape.mbs * shape.heads / shape.tp * shape.seq**2
    moved = probabilities * (2 * element_bytes(shape.dtype) + _MASK_BYTES)
    return moved / (job.cluster.device.memory_gb_per_s * 1e9 * _BANDWIDTH_SHARE)


def layer_weights(shape: TransformerShape) -> int:
    """Weights of one layer on one GPU."""
    attention = shape.hidden * shape.head_dim * 2 * (shape.heads // shape.tp + shape.kv_heads_per_gpu)
    return attention + (3 if shape.gated else 2) * shape.hidden * shape.ffn // shape.tp


def _loss_s(job: Job, shape: TransformerShape) -> float:
    """The vocabulary-parallel cross entropy in fp32: logits are cast, reduced over twice, exponentiated and scaled;
    the gradient is written once more and cast back (Megatron-LM, mpu/cross_entropy.py)."""
    passes_bytes = (2 + 4) + 4 + (4 + 4) + (4 + 4) + (4 + 2)
    logits = shape.tokens * shape.vocab / shape.tp
    return logits * passes_bytes / (job.cluster.device.memory_gb_per_s * 1e9 * _BANDWIDTH_SHARE)


def _embedding_s(job: Job, shape: TransformerShape) -> float:
    """Looking rows up and adding their gradients: each element of a row is moved about four times."""
    moved = 4 * shape.tokens * shape.hidden * element_bytes(shape.dtype)
    return moved / (job.cluster.device.memory_gb_per_s * 1e9 * _BANDWIDTH_SHARE)
