"""Computes the time of one layer, embedding and logits per micro-batch, on one GPU of a tensor-parallel group.

Entry points: `LayerTimes`, and the types `LayerTime` and `Span` (a time with its interval; `exactly` makes one
without). Used by `iteration`, `predict` and the command `plan`.

Times of GEMMs, softmax and attention come from an `OpTimes`. Bandwidth-bound kernels (norms, biases, activations,
dropout, residuals) are counted in bytes. All-reduces use the cluster's links.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quantbench.latency.op_times import OpTimes, as_run
from quantbench.planner.calibration import Calibration
from quantbench.planner.layout import Job, padded_vocab
from quantbench.planner.memory import MASK_BYTES
from quantbench.workload import Op, TransformerShape
from quantbench.workload.dtypes import element_bytes
from quantbench.workload.kinds import Compute

# Ops between the qkv and output projections.
_CORE = ("scores", "softmax", "context", "attention")


@dataclass(frozen=True)
class Span:
    """Time in seconds with its 90 % interval."""

    low: float
    mid: float
    high: float

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.mid + other.mid, self.high + other.high)

    def times(self, factor: float) -> Span:
        """Returns the time and its bounds multiplied by `factor`."""
        return Span(self.low * factor, self.mid * factor, self.high * factor)

    def widened(self, scatter: float) -> Span:
        """Returns the time with an independent error added, whose 90 % interval is a factor of exp(±scatter)."""
        below, above = (math.hypot(math.log(a / b), scatter) for a, b in ((self.mid, self.low), (self.high, self.mid)))
        return Span(self.mid * math.exp(-below), self.mid, self.mid * math.exp(above))


def exactly(seconds: float) -> Span:
    """Returns a time with an interval of zero width."""
    return Span(seconds, seconds, seconds)


@dataclass(frozen=True)
class LayerTime:
    """Seconds per micro-batch on one GPU, one forward and one backward pass.

    products, core, vector: of a layer, its weight GEMMs, attention GEMMs with softmax, and bandwidth-bound kernels.
    reduces: tensor-parallel collectives of a layer.
    overhead: fitted overhead per layer.
    by_recompute: total of a layer including recomputation, by kind of recomputation.
    logits: logits and loss.
    embedding: lookup and its gradient.
    """

    products: Span
    core: Span
    vector: float
    reduces: float
    overhead: float
    by_recompute: Mapping[str, Span]
    logits: Span
    embedding: float


class LayerTimes:
    """Cache of the layer times of a job, by tensor parallelism, micro-batch size and sequence parallelism."""

    def __init__(self, job: Job, times: OpTimes, calibration: Calibration) -> None:
        self._job, self._times, self._calibration = job, times, calibration
        self._divided: dict[tuple[int, int], tuple[TransformerShape, tuple[Op, ...]]] = {}
        self._known: dict[tuple[int, int, bool], LayerTime] = {}

    def at(self, tp: int, mbs: int, *, sequence_parallel: bool = False) -> LayerTime:
        """Returns the times on one of `tp` GPUs for micro-batches of `mbs` samples."""
        key = (tp, mbs, sequence_parallel)
        if key not in self._known:
            self.prepare([key])
        return self._known[key]

    def prepare(self, keys: Iterable[tuple[int, int, bool]]) -> None:
        """Computes the times for many keys (tp, mbs, sequence_parallel) in one batched query."""
        wanted = [key for key in dict.fromkeys(keys) if key not in self._known]
        works = self.workloads((tp, mbs) for tp, mbs, _ in wanted)
        seconds = {}
        for work, source in zip(works, self._times.estimates(works), strict=True) if works else ():
            us = as_run(
                work, source, self._times.device,
                softmax=self._job.shape.softmax, unaligned_share=self._calibration.unaligned_share,
            )  # fmt: skip
            seconds[work] = Span(us.low_us, us.latency_us, us.high_us).times(1e-6)
        for tp, mbs, parallel in wanted:
            self._known[tp, mbs, parallel] = self._layer(tp, mbs, parallel, seconds)

    def workloads(self, degrees: Iterable[tuple[int, int]]) -> list[Compute]:
        """Returns the distinct workloads of the layers at these (tp, mbs)."""
        found: dict[Compute, None] = {}
        for tp, mbs in degrees:
            if (tp, mbs) not in self._divided:
                shape = divided(self._job.shape, tp, mbs)
                self._divided[tp, mbs] = shape, shape.ops()
            found.update((op.workload, None) for op in self._divided[tp, mbs][1])
        return list(found)

    def _layer(self, tp: int, mbs: int, sequence_parallel: bool, seconds: Mapping[Compute, Span]) -> LayerTime:
        shape, ops = self._divided[tp, mbs]
        spans: dict[tuple[str, bool], Span] = defaultdict(lambda: Span(0.0, 0.0, 0.0))
        for op in ops:
            part = "core" if op.name in _CORE else "logits" if op.name == "logits" else "products"
            spans[part, part != "logits" and op.phase == "forward"] += seconds[op.workload]
        bytes_per_s = self._job.elementwise_bytes_per_s
        vector_forward, vector_backward = _vector_bytes(shape, sequence_parallel)
        dropout_s = _core_dropout_bytes(shape) / bytes_per_s
        forward_s, backward_s = vector_forward / bytes_per_s + dropout_s, vector_backward / bytes_per_s + dropout_s
        # Megatron runs two all-reduces forward and two backward (with sequence parallelism: gathers and scatters of
        # the same volume).
        vector, reduces = forward_s + backward_s, 4 * self._reduce_s(shape)
        overhead = self._calibration.layer_overhead_ms * 1e-3
        products_forward, core_forward = spans["products", True], spans["core", True]
        products, core = products_forward + spans["products", False], core_forward + spans["core", False]
        once = products + core + exactly(vector + reduces + overhead)
        return LayerTime(
            products=products,
            core=core,
            vector=vector,
            reduces=reduces,
            overhead=overhead,
            by_recompute={
                "full": once + products_forward + core_forward + exactly(forward_s + reduces / 2),
                "selective": once + core_forward + exactly(dropout_s),
                "none": once,
            },
            logits=spans["logits", False] + exactly(_loss_bytes(shape) / bytes_per_s),
            # Lookup and gradient accumulation move each element of a row about four times.
            embedding=4 * shape.tokens * shape.hidden * element_bytes(shape.dtype) / bytes_per_s,
        )

    def _reduce_s(self, shape: TransformerShape) -> float:
        if shape.tp == 1:
            return 0.0
        cluster = self._job.cluster
        bus_bytes = 2 * (shape.tp - 1) / shape.tp * shape.tokens * shape.hidden * element_bytes(shape.dtype)
        if shape.tp <= cluster.gpus_per_node:
            return self._calibration.tensor_factor * cluster.intra_node(shape.tp).time_s(bus_bytes)
        return bus_bytes / (cluster.gpu_gb_per_s * 1e9)


def divided(shape: TransformerShape, tp: int, mbs: int) -> TransformerShape:
    """Returns one layer of the model on one of `tp` GPUs, with the vocabulary padded as in Megatron."""
    return replace(shape, layers=1, tp=tp, mbs=mbs, vocab=padded_vocab(shape.vocab, tp))


def _vector_bytes(shape: TransformerShape, sequence_parallel: bool) -> tuple[float, float]:
    """Returns (forward, backward) bytes moved by the elementwise kernels and norms of one layer.

    Assumes the fused kernels of Megatron-LM (megatron/fused_kernels, bias_gelu, bias_dropout_add).
    """
    w, mask = element_bytes(shape.dtype), MASK_BYTES if shape.dropout else 0
    whole = shape.tokens * shape.hidden / (shape.tp if sequence_parallel else 1)
    mlp = shape.tokens * shape.ffn / shape.tp
    gates = 3 if shape.gated else 2
    width = shape.heads // shape.tp * shape.head_dim
    qkv = shape.tokens * (width + 2 * shape.kv_heads_per_gpu * shape.head_dim)
    context = shape.tokens * width
    # Accesses per element. Two norms: read, write. Two residual additions with bias and dropout: two reads, a write, a
    # mask. Activation: read (with its gate), write. Bias and transpose of q, k and v, transpose of the context: read,
    # write.
    forward = whole * (2 * 2 * w + 2 * (3 * w + mask)) + mlp * gates * w + (qkv + context) * 2 * w
    # Two norms: two reads and a write, two reads for weight gradients. Two dropouts: read, write, mask. Two residual
    # gradients added: two reads, a write. Bias gradients: a read of each output. Activation: one read more than
    # forward. q, k, v and the context: read, write.
    backward = whole * (2 * 5 * w + 2 * (2 * w + mask) + 2 * 3 * w + 2 * w)
    backward += mlp * (gates + 2) * w + qkv * 3 * w + context * 2 * w
    # Weight gradients are accumulated over micro-batches: two reads, a write.
    return forward, backward + 3 * w * shape.layer_weights(shape.tp)


def _core_dropout_bytes(shape: TransformerShape) -> float:
    """Returns the bytes of dropout on attention probabilities (read, write, mask); 0 if attention is fused."""
    if not shape.dropout or shape.attention == "flash":
        return 0.0
    probabilities = shape.mbs * shape.heads / shape.tp * shape.seq**2
    return probabilities * (2 * element_bytes(shape.dtype) + MASK_BYTES)


def _loss_bytes(shape: TransformerShape) -> float:
    """Returns the bytes of the vocabulary-parallel cross entropy in fp32: logits are cast, reduced twice, exponentiated
    and scaled; the gradient is written and cast back (Megatron-LM, mpu/cross_entropy.py)."""
    passes_bytes = (2 + 4) + 4 + (4 + 4) + (4 + 4) + (4 + 2)
    return shape.tokens * shape.vocab / shape.tp * passes_bytes
