"""Defines a training job, its parallel layout, and the split of its layers into pipeline stages."""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from quantbench.errors import InputError, require_choices, require_int, require_ints
from quantbench.latency.interconnect import Cluster
from quantbench.workload import TransformerShape

OPTIMIZERS = ("adam", "fused_adam", "adam_8bit")
PRECISIONS = ("fp16", "bf16")
RECOMPUTATIONS = ("full", "selective", "none")
#: splits of the layers into stages: `layers` into equal counts; `embedding` with embedding and
#: logits counted as a layer each (BLOOM's `--pp-partition-method 'type:transformer|embedding'`);
#: `uneven` as equal as possible
PARTITIONS = ("layers", "embedding", "uneven")
# Fraction of the memory bandwidth that elementwise kernels reach, as in
# quantbench.latency.op_times.
_BANDWIDTH_SHARE = 0.8


@dataclass(frozen=True)
class Job:
    """A training job: the settings that all compared layouts share.

    shape: the whole model (mbs = tp = 1).
    gpus: number of GPUs.
    gbs: samples per iteration.
    optimizer: adam (torch.optim.Adam), fused_adam (apex) or adam_8bit (bitsandbytes).
    dp_overlap: fraction of the data-parallel traffic that overlaps with computation. The fraction
        is 0 in DeepSpeed's pipeline engine, which reduces gradients after the last micro-batch.
    stack: software, one of `calibration.STACKS`, or "" if it is unknown.
    """

    shape: TransformerShape
    cluster: Cluster
    gpus: int
    gbs: int
    optimizer: str = "fused_adam"
    dp_overlap: float = 0.0
    stack: str = ""

    def __post_init__(self) -> None:
        require_ints(self, "gpus", "gbs")
        require_choices(self, optimizer=OPTIMIZERS)
        if not self.shape.fp8_recipe and self.shape.dtype not in PRECISIONS:
            expected = f"one of {', '.join(PRECISIONS)}, or --fp8-recipe for 8 or 4 bits"
            raise InputError("plan", f"dtype = {self.shape.dtype}", expected)
        if not 0 <= self.dp_overlap <= 1:
            raise InputError("plan", f"dp_overlap = {self.dp_overlap!r}", "a share from 0 to 1")

    @property
    def key(self) -> object:
        """Hashable value that is equal for equal jobs."""
        return tuple((vars(self) | {"cluster": self.cluster.key}).values())

    @property
    def elementwise_bytes_per_s(self) -> float:
        """Memory bandwidth that elementwise kernels reach on the GPU of the job, in bytes/s."""
        return self.cluster.device.memory_gb_per_s * 1e9 * _BANDWIDTH_SHARE


class LayerKey(NamedTuple):
    """The part of a layout on which the time of a layer depends. Its fields are those of `Layout`.

    dense: whether the layer has no experts although other layers of the model have some.
    """

    tp: int
    mbs: int
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    dense: bool = False


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a training job.

    dp, tp, pp, cp: degrees of data, tensor, pipeline and context parallelism. With context
        parallelism, keys and values go around a ring that overlaps with attention. Each GPU has an
        early and a late chunk of the sequence, so that all GPUs have the same causal work.
    mbs: samples per micro-batch.
    interleave: model chunks per stage; 1 for plain 1F1B.
    zero: ZeRO stage. 0 shards nothing over dp, 1 shards optimizer states, 2 also gradients, and 3
        also weights.
    recompute: `full`, `none`, or `selective` for only the attention core (scores, softmax and
        context).
    sequence_parallel: whether norms and dropout are also divided over tp.
    partition: split of the layers into stages, one of PARTITIONS.
    ep: number of GPUs over which the experts are divided, with whole experts on each GPU. These
        GPUs are among the tensor-, context- and data-parallel GPUs.
    """

    dp: int
    tp: int
    pp: int
    mbs: int
    interleave: int = 1
    zero: int = 1
    recompute: str = "full"
    sequence_parallel: bool = False
    partition: str = "layers"
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        require_ints(self, "dp", "tp", "pp", "mbs", "interleave", "cp", "ep")
        require_int("Layout", "zero", self.zero, low=0, high=3)
        require_choices(self, recompute=RECOMPUTATIONS, partition=PARTITIONS)

    @property
    def gpus(self) -> int:
        """Number of GPUs of the layout."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Number of GPUs that hold the same weights before ZeRO.

        ZeRO shards weights and optimizer states over these GPUs, which are also the ranks of
        data-parallel traffic.
        """
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Number of GPUs that hold the same experts before ZeRO."""
        return max(1, self.replicas * self.tp // self.ep)

    @property
    def per_layer(self) -> LayerKey:
        """The part of the layout on which the time of a layer depends."""
        return LayerKey(self.tp, self.mbs, self.sequence_parallel, self.cp, self.ep)

    def micro_batches(self, gbs: int) -> int:
        """Returns the number of micro-batches of each pipeline per iteration.

        A partial last micro-batch counts.
        """
        return -(-gbs // (self.mbs * self.dp))

    def __str__(self) -> str:
        parts = [f"DP{self.dp} TP{self.tp} PP{self.pp} MBS{self.mbs}"]
        beside = {"CP": self.cp, "EP": self.ep, "interleave ": self.interleave}
        parts += [f"{name}{degree}" for name, degree in beside.items() if degree > 1]
        kinds = {"full": "recompute", "none": "no recompute", "selective": "selective"}
        parts.append(f"ZeRO-{self.zero} {kinds[self.recompute]}")
        if self.sequence_parallel:
            parts.append("SP")
        return " ".join(parts)


def layer_weights(
    shape: TransformerShape, part: Layout | LayerKey, *, dense: bool = False
) -> tuple[int, int]:
    """Returns the weights of one layer on one GPU: without its experts, and of its experts.

    dense: whether the layer is one of the model's `dense_layers`.
    """
    if dense:
        return shape.layer_weights(part.tp, dense=True), 0
    matrices = (2 + shape.gated) * shape.hidden * shape.moe_ffn * shape.experts
    return shape.layer_weights(part.tp) - matrices // part.tp, matrices // part.ep


def partition_of(layers: int, pp: int, *, uneven: bool = False) -> str:
    """Returns the partition that divides `layers` over `pp` stages.

    If neither the layers nor the layers plus two embeddings divide evenly, returns 'uneven' if that
    is allowed, else 'layers', which then breaks a strict rule.

    uneven: whether stages of different length are allowed.

    >>> partition_of(70, 12), partition_of(72, 12), partition_of(71, 12)
    ('embedding', 'layers', 'layers')
    """
    if layers % pp == 0:
        return "layers"
    if (layers + 2) % pp == 0:
        return "embedding"
    return "uneven" if uneven else "layers"


@dataclass(frozen=True)
class StageKind:
    """A group of `count` equal pipeline stages with `layers` layers each.

    first: whether the stage holds the embedding.
    last: whether the stage holds the logits.
    dense: number of its layers without experts, in a model with experts in other layers. The number
        may be a fraction: a mean if such layers are spread, or if a chunk begins inside a layer.
    """

    layers: int
    count: int
    first: bool = False
    last: bool = False
    dense: float = 0.0

    @property
    def neighbours(self) -> int:
        """Number of stages next to this one. Each costs one transfer per micro-batch."""
        return 2 - self.first - self.last


def stages_of(shape: TransformerShape, layout: Layout) -> tuple[StageKind, ...]:
    """Returns the groups of equal stages of a layout, from first to last (see `stage_kinds`)."""
    dense = (shape.dense_layers, shape.dense_spread, layout.interleave)
    return stage_kinds(shape.layers, layout.pp, layout.partition, *dense)


@lru_cache(maxsize=65536)
def stage_kinds(
    layers: int, pp: int, partition: str, dense: int = 0, spread: bool = False, interleave: int = 1
) -> tuple[StageKind, ...]:
    """Returns the groups of equal stages, from first to last.

    With 'uneven', leftover layers go to the middle stages, because the first and last stages also
    hold the embedding and the logits.

    dense: number of layers without experts. These layers are the first ones, or lie at even
        distances if `spread` is True.
    interleave: chunks of each stage. The first chunks of all stages hold the first layers.

    >>> [(kind.layers, kind.count) for kind in stage_kinds(70, 12, "embedding")]
    [(5, 1), (6, 10), (5, 1)]
    >>> [(kind.layers, kind.count) for kind in stage_kinds(10, 4, "uneven")]
    [(2, 1), (3, 2), (2, 1)]
    >>> [(kind.layers, kind.count, kind.dense) for kind in stage_kinds(12, 4, "layers", 4)]
    [(3, 1, 3.0), (3, 1, 1.0), (3, 1, 0), (3, 1, 0)]
    """
    each, left = divmod(layers, pp)
    sizes = [each] * pp
    if partition == "embedding" and pp > 1:
        sizes = [(layers + 2) // pp] * pp
        sizes[0] -= 1
        sizes[-1] -= 1
    else:
        for stage in range(1, left + 1):
            sizes[stage] += 1
    stages = []
    before = 0
    for stage, size in enumerate(sizes):
        held = dense * size / layers
        if not spread:
            starts = [(chunk * layers + before) / interleave for chunk in range(interleave)]
            held = sum(min(max(dense - start, 0), size / interleave) for start in starts)
        stages.append(StageKind(size, 1, stage == 0, stage == pp - 1, held))
        before += size
    return tuple(replace(kind, count=len(list(same))) for kind, same in groupby(stages))
