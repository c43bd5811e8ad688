"""Defines training jobs (`Job`) and their parallel layouts (`Layout`).

`stages_of` also splits a model's layers into the pipeline stages of a layout.
"""

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
#: Ways to split a model's layers into pipeline stages. `layers`: each stage has the same number of
#: layers. `embedding`: the numbers are the same if embedding and logits count as one layer each
#: (BLOOM's `--pp-partition-method 'type:transformer|embedding'`). `uneven`: the numbers differ by
#: at most one.
PARTITIONS = ("layers", "embedding", "uneven")
# Fraction of the specified memory bandwidth that elementwise kernels reach, as
# `op_times.BANDWIDTH_EFFICIENCY` assumes for GPUs.
_BANDWIDTH_SHARE = 0.8


@dataclass(frozen=True)
class Job:
    """A training job: the settings that are common to all compared layouts.

    shape: the whole model (mbs = tp = 1).
    cluster: GPUs and their links.
    gpus: number of GPUs that the job uses.
    gbs: global batch size, in samples per iteration.
    optimizer: adam (torch.optim.Adam), fused_adam (apex) or adam_8bit (bitsandbytes).
    dp_overlap: fraction of data-parallel traffic that can overlap with computation. DeepSpeed's
        pipeline engine has 0, because it reduces gradients after the last micro-batch.
    stack: name of the training software in `calibration.STACKS`; "" if it is unknown.
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
        """Hashable identity of the job, for comparison and caching."""
        return tuple((vars(self) | {"cluster": self.cluster.key}).values())

    @property
    def elementwise_bytes_per_s(self) -> float:
        """Memory bandwidth that elementwise kernels reach on the job's GPU, in bytes/s."""
        return self.cluster.device.memory_gb_per_s * 1e9 * _BANDWIDTH_SHARE


class LayerKey(NamedTuple):
    """The settings of a layout on which the time of one layer depends.

    All fields except `dense` are fields of `Layout`.

    dense: whether the layer has an MLP instead of experts, in a model with experts in other layers.
    """

    tp: int
    mbs: int
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    dense: bool = False


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a training job: how the job is divided over GPUs and micro-batches.

    dp, tp, pp: degrees of data, tensor and pipeline parallelism.
    mbs: micro-batch size, in samples.
    interleave: number of model chunks per pipeline stage; 1 for the plain 1F1B schedule.
    zero: ZeRO stage: 0 shards nothing over data-parallel GPUs, 1 shards optimizer states, 2 also
        gradients, 3 also weights.
    recompute: recomputation of activations in the backward pass: `full`, `selective` (only the
        attention core: scores, softmax and context) or `none`.
    sequence_parallel: whether norms and dropout are also divided over the tp GPUs.
    partition: split of the layers into stages, one of PARTITIONS.
    cp: degree of context parallelism. Keys and values go around a ring of GPUs while attention is
        computed. Each GPU has an early and a late chunk of each sequence, so all GPUs have the same
        causal work.
    ep: number of GPUs over which a layer's experts are divided, with whole experts on each GPU.
        They are the tensor-, context- and data-parallel GPUs of one pipeline stage, not additional
        GPUs.
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
        """Number of GPUs that the layout uses."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Number of GPUs with the same weights, not counting ZeRO's sharding.

        These are the ranks of data-parallel collectives. ZeRO shards over them.
        """
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Number of GPUs with the same experts, not counting ZeRO's sharding."""
        return max(1, self.replicas * self.tp // self.ep)

    @property
    def per_layer(self) -> LayerKey:
        """The settings on which the time of one layer depends."""
        return LayerKey(self.tp, self.mbs, self.sequence_parallel, self.cp, self.ep)

    def micro_batches(self, gbs: int) -> int:
        """Returns the number of micro-batches per iteration in each pipeline.

        An incomplete last micro-batch is counted.

        gbs: global batch size, in samples.
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
    """Returns one layer's number of weights on one GPU, as (outside experts, in routed experts).

    part: layout, or its settings for one layer.
    dense: whether the layer is one of the model's `dense_layers`, which have no experts.
    """
    if dense:
        return shape.layer_weights(part.tp, dense=True), 0
    matrices = (2 + shape.gated) * shape.hidden * shape.moe_ffn * shape.experts
    return shape.layer_weights(part.tp) - matrices // part.tp, matrices // part.ep


def partition_of(layers: int, pp: int, *, uneven: bool = False) -> str:
    """Returns the partition to use for `layers` over `pp` stages, one of PARTITIONS.

    The first partition that gives equal stages is used, `layers` before `embedding`. If neither
    does, the result is `uneven` if it is allowed, else `layers`, which breaks a strict rule.

    uneven: whether stages may differ in their number of layers.

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
    """A group of equal pipeline stages.

    layers: number of layers in each stage.
    count: number of stages in the group.
    first: whether the stage holds the embedding.
    last: whether the stage holds the logits.
    dense: number of layers without experts in each stage, in a model with experts in other layers.
        It may be fractional: as a mean if such layers are spread over the model, or if a chunk's
        length is no whole number of layers.
    """

    layers: int
    count: int
    first: bool = False
    last: bool = False
    dense: float = 0.0

    @property
    def neighbours(self) -> int:
        """Number of adjacent stages, 0 to 2. Each costs one transfer per micro-batch."""
        return 2 - self.first - self.last


def stages_of(shape: TransformerShape, layout: Layout) -> tuple[StageKind, ...]:
    """Returns a layout's pipeline stages in order, grouped by equal stages (see `stage_kinds`)."""
    dense = (shape.dense_layers, shape.dense_spread, layout.interleave)
    return stage_kinds(shape.layers, layout.pp, layout.partition, *dense)


@lru_cache(maxsize=65536)
def stage_kinds(
    layers: int, pp: int, partition: str, dense: int = 0, spread: bool = False, interleave: int = 1
) -> tuple[StageKind, ...]:
    """Returns the pipeline stages in order. Adjacent equal stages form one group.

    With the partition `uneven`, leftover layers go to the middle stages first, because the first
    and last stages also hold the embedding and the logits.

    layers: number of layers of the model.
    partition: split of the layers, one of PARTITIONS.
    dense: number of layers without experts.
    spread: whether the dense layers are spread evenly; False if they are the model's first layers.
    interleave: number of chunks per stage. The first chunks of all stages together hold the model's
        first layers.

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
