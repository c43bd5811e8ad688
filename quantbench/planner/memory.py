"""Predicts the memory of the fullest GPU: weights, gradients, optimizer states, activations,
logits, overheads.

Activations follow Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models, 2022, sections 4 and 5, extended to any MLP width, gate and number of key/value heads. Sizes
are bytes and shown in GiB: a GPU sold with 80 GB has 80 GiB, and nvidia-smi reports GiB too.
"""

from dataclasses import asdict, dataclass

from quantbench.planner.calibration import Calibration, software
from quantbench.planner.layout import Job, Layout, StageKind, layer_weights, stages_of
from quantbench.workload import TransformerShape
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.parameters import padded_vocab

GIB = 2**30
# CUDA reports 79.2 of 80 GiB as usable on an A100, and 31.7 of 32 GiB on a V100.
_USABLE_SHARE = 0.99
_FP32 = 4
#: bytes per element of a dropout mask
MASK_BYTES = 1
# Bytes per parameter: fp32 master weight, fp32 gradient during the optimizer step, two moments
# (fp32, or one byte each for adam_8bit). torch.optim.Adam makes one more fp32 copy, the square root
# of the second moment.
_STATE_BYTES = {"adam": 4 + 4 + 8 + 4, "fused_adam": 4 + 4 + 8, "adam_8bit": 4 + 4 + 2}


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest GPU in bytes, by use.

    activations: activations kept for the backward pass.
    working: recomputed activations and logits.
    slack: extra memory of the caching allocator.
    base: context, communicators and buffers.
    stage: pipeline stage of the GPU, from 0.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    slack: float
    base: float
    stage: int

    @property
    def parts_gib(self) -> dict[str, float]:
        """Memory by use, GiB."""
        return {name: value / GIB for name, value in asdict(self).items() if name != "stage"}

    @property
    def total(self) -> float:
        static = self.weights + self.gradients + self.optimizer
        return static + self.activations + self.working + self.slack + self.base

    @property
    def total_gib(self) -> float:
        return self.total / GIB


def limit_bytes(job: Job) -> float:
    """Returns the usable memory of the job's GPU in bytes."""
    return job.cluster.device.memory_bytes * _USABLE_SHARE


def memory(job: Job, layout: Layout, calibration: Calibration) -> Memory:
    """Predicts the memory of a GPU of the fullest stage."""
    found = []
    stage = 0
    for kind in stages_of(job.shape, layout):
        # Among equal stages, the first holds the most micro-batches.
        found.append(_stage(job, layout, calibration, kind, stage))
        stage += kind.count
    return max(found, key=lambda one: one.total)


def embedding_parameters(shape: TransformerShape, tp: int) -> int:
    """Returns the parameters of the embedding matrix (or the logits matrix) on one of `tp` GPUs."""
    return padded_vocab(shape.vocab, tp) // tp * shape.hidden


def stage_parameters(job: Job, layout: Layout, kind: StageKind) -> tuple[int, int]:
    """Returns the parameters of a stage on one GPU, including biases and norms, and of its
    experts.
    """
    shape = job.shape
    sparse = kind.layers - kind.dense
    embeddings = kind.first + kind.last
    if kind.first and kind.last and shape.tied:
        embeddings = 1
    own, experts = layer_weights(shape, layout)
    own_dense, _ = layer_weights(shape, layout, dense=True)
    layers = sparse * own + kind.dense * own_dense + kind.layers * 9 * shape.hidden
    matrices = embeddings * embedding_parameters(shape, layout.tp)
    return round(layers + matrices), round(sparse * experts)


def _stage(
    job: Job, layout: Layout, calibration: Calibration, kind: StageKind, stage: int
) -> Memory:
    shape = job.shape
    w = shape.element_bytes
    dense, experts = stage_parameters(job, layout, kind)

    def shared(level: int) -> float:
        if layout.zero < level:
            return float(dense + experts)
        return dense / layout.replicas + experts / layout.expert_replicas

    # FSDP shards the fp32 weights and gradients that the optimizer counts, and casts what it
    # gathers.
    half = w
    if layout.zero >= 3 and software(job.stack).fsdp:
        half = 0
    kept = stage_activations(job, layout, kind)
    activations = kept * in_flight(layout, stage, layout.micro_batches(job.gbs))
    dense_only = kind.dense == kind.layers
    # What a layer drops exists while it is recomputed.
    working = 0.0
    if layout.recompute == "full":
        working = _layer_activations(job, layout, dense=dense_only)
    elif layout.recompute == "selective":
        working = _core_activations(job, layout)
    if layout.zero >= 3:
        # Weights of the layer at hand and of the next, gathered ahead, and the gradients of one.
        working += 3 * w * sum(layer_weights(shape, layout, dense=dense_only))
    if kind.last:
        # fp16 logits, their fp32 copy and the gradient.
        vocab = padded_vocab(shape.vocab, layout.tp)
        working += _tokens(job, layout) * vocab / layout.tp * (w + _FP32 + _FP32)
    return Memory(
        weights=half * shared(3),
        gradients=half * shared(2),
        optimizer=_STATE_BYTES[job.optimizer] * shared(1),
        activations=activations,
        working=working,
        slack=calibration.activation_slack * (activations + working),
        base=calibration.base_gib * GIB,
        stage=stage,
    )


def _tokens(job: Job, layout: Layout) -> float:
    return layout.mbs * job.shape.seq / layout.cp


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Returns the micro-batches whose activations a stage holds: with 1F1B the number of stages
    from it to the last; if interleaved, the first stage holds pp - 1 more chunks (Korthikanti et
    al., section 4.2.3)."""
    depth: float = layout.pp - stage
    if layout.interleave > 1:
        depth = layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.interleave)) - stage
    return min(depth, micro_batches)


def stage_activations(job: Job, layout: Layout, kind: StageKind) -> float:
    """Returns the bytes that a stage keeps per micro-batch until its backward pass."""
    kept = 0.0
    for layers, dense in ((kind.layers - kind.dense, False), (kind.dense, True)):
        if not layers:
            continue
        if layout.recompute == "full":
            each = _tokens(job, layout) * job.shape.hidden
            each *= job.shape.element_bytes
            if layout.sequence_parallel:
                each /= layout.tp
        else:
            each = _layer_activations(job, layout, dense=dense)
        if layout.recompute == "selective":
            each -= _core_activations(job, layout)
        kept += layers * each
    return kept


def _layer_activations(job: Job, layout: Layout, *, dense: bool) -> float:
    """Returns the activation bytes that a layer's backward pass reads: s·b·h·(10 + 24/t) for a GPT
    layer, plus core.

    dense: whether it is one of the model's `dense_layers`.
    """
    shape = job.shape
    w = shape.element_bytes
    tokens = _tokens(job, layout)
    # Inputs of products are kept in their format.
    kept = DTYPES[shape.dtype].a_bytes if shape.fp8_recipe else w
    # Inputs of two norms, of qkv and of the MLP; two dropout masks.
    whole = tokens * shape.hidden * (2 * w + 2 * kept + 2 * MASK_BYTES * shape.dropout)
    # Latents, before and after their norms (DeepSeek-V2, arXiv:2405.04434, section 2.1), which no
    # GPU divides.
    whole += tokens * ((shape.q_rank + shape.kv_rank) * (w + kept) + shape.rope_dim * w)
    # Queries, keys, values; attention's output.
    width = shape.heads * shape.head_dim + max(shape.kv_heads, layout.tp) * (
        shape.head_dim + shape.value_width
    )
    width += shape.heads * shape.value_width
    each = (1 + shape.gated) * w + kept
    mlp_bytes = each * shape.ffn
    if shape.experts and not dense:  # with the rows gathered for the experts
        mlp_bytes = shape.top_k * (each * shape.moe_ffn + kept * shape.hidden)
        mlp_bytes += each * shape.shared_ffn
    divided = tokens * (w * width + mlp_bytes) / layout.tp
    if layout.sequence_parallel:
        whole /= layout.tp
    return whole + divided + _core_activations(job, layout)


def _core_activations(job: Job, layout: Layout) -> float:
    """Returns the bytes of the attention core: softmax output, dropout mask and output; row
    statistics if fused.
    """
    shape = job.shape
    rows = layout.mbs * shape.heads / layout.tp * shape.seq / layout.cp
    if shape.attention == "flash":
        return rows * _FP32
    w = shape.element_bytes
    each = 2 * w + MASK_BYTES if shape.dropout else w
    return rows * shape.seq * each
