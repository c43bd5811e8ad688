"""Predicts the memory of the fullest GPU of a training job.

Activations follow Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models, 2022, sections 4 and 5, extended to any MLP width, gate and number of key/value heads. Sizes
are in bytes and shown in GiB, because a GPU sold with 80 GB has 80 GiB and nvidia-smi reports GiB
too.
"""

from dataclasses import asdict, dataclass

from quantbench.planner.calibration import Calibration, software
from quantbench.planner.layout import Job, Layout, StageKind, layer_weights, stages_of
from quantbench.workload import TransformerShape
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.parameters import padded_vocab

GIB = 2**30
# Fraction of the memory that is usable. CUDA reports 79.2 of 80 GiB on an A100, and 31.7 of 32 GiB
# on a V100.
_USABLE_SHARE = 0.99
_FP32 = 4
#: bytes per element of a dropout mask
MASK_BYTES = 1
# Bytes per parameter of each optimizer: the fp32 master weight, the fp32 gradient during the
# optimizer step, and two moments (fp32, or one byte each for adam_8bit). torch.optim.Adam makes one
# more fp32 copy, the square root of the second moment.
_STATE_BYTES = {"adam": 4 + 4 + 8 + 4, "fused_adam": 4 + 4 + 8, "adam_8bit": 4 + 4 + 2}


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest GPU in bytes, by use.

    activations: activations that are kept for the backward pass.
    working: recomputed activations, weights gathered by ZeRO-3, and logits.
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
        """Memory in GiB, by use."""
        return {name: value / GIB for name, value in asdict(self).items() if name != "stage"}

    @property
    def total(self) -> float:
        """Total memory, in bytes."""
        static = self.weights + self.gradients + self.optimizer
        return static + self.activations + self.working + self.slack + self.base

    @property
    def total_gib(self) -> float:
        """Total memory, in GiB."""
        return self.total / GIB


def limit_bytes(job: Job) -> float:
    """Returns the usable memory of the job's GPU, in bytes."""
    return job.cluster.device.memory_bytes * _USABLE_SHARE


def memory(job: Job, layout: Layout, calibration: Calibration) -> Memory:
    """Predicts the memory of a GPU of the fullest stage."""
    found = []
    stage = 0
    for kind in stages_of(job.shape, layout):
        # Of several equal stages, the first one holds the activations of the largest number of
        # micro-batches.
        found.append(_stage(job, layout, calibration, kind, stage))
        stage += kind.count
    return max(found, key=lambda one: one.total)


def embedding_parameters(shape: TransformerShape, tp: int) -> int:
    """Returns the parameters of the embedding matrix on one of `tp` GPUs.

    The logits matrix has the same number of parameters.
    """
    return padded_vocab(shape.vocab, tp) // tp * shape.hidden


def stage_parameters(job: Job, layout: Layout, kind: StageKind) -> tuple[int, int]:
    """Returns the parameters of a stage on one GPU: without its experts, and of its experts.

    Biases and norms are included.
    """
    shape = job.shape
    embeddings = kind.first + kind.last
    if kind.first and kind.last and shape.tied:
        embeddings = 1
    linear, experts = _linear_weights(shape, layout, kind)
    # Biases and norms count as 9 · hidden parameters per layer.
    layers = linear + kind.layers * 9 * shape.hidden
    matrices = embeddings * embedding_parameters(shape, layout.tp)
    return round(layers + matrices), round(experts)


def _linear_weights(
    shape: TransformerShape, layout: Layout, kind: StageKind
) -> tuple[float, float]:
    """Returns the weights of a stage's linear layers: without its experts, and of its experts."""
    sparse = kind.layers - kind.dense
    own, experts = layer_weights(shape, layout)
    own_dense, _ = layer_weights(shape, layout, dense=True)
    return sparse * own + kind.dense * own_dense, sparse * experts


def linear_weight_bytes(job: Job) -> float:
    """Returns the bytes that a GPU keeps of each weight of a linear layer during a micro-batch.

    With a recipe, Transformer Engine keeps quantized copies beside the 16-bit weights, unless the
    weights themselves are quantized (`Stack.narrow_weights`). The forward GEMM and dgrad read the
    weights in different directions and need a copy each: Hopper's FP8 GEMMs take the TN layout
    only, and blocks of scales have a direction. Tensor cores of compute capability 10.x and 11.x
    read FP8 with one scale per tensor in both directions. Sources: Transformer Engine,
    docs/features/low_precision_training/performance_considerations, issues 1261 and 1880, and
    nvte_is_non_tn_fp8_gemm_supported.
    """
    shape = job.shape
    if not shape.fp8_recipe:
        return shape.element_bytes
    copies = 2
    major, _ = job.cluster.device.compute_capability or (0, 0)
    if shape.dtype == "fp8" and major in (10, 11):
        copies = 1
    kept = copies * DTYPES[shape.dtype].b_bytes
    if shape.fp8_recipe not in software(job.stack).narrow_weights:
        kept += shape.element_bytes
    return kept


def _stage(
    job: Job, layout: Layout, calibration: Calibration, kind: StageKind, stage: int
) -> Memory:
    """Predicts the memory of a GPU of one stage.

    stage: number of the stage, from 0.
    """
    shape = job.shape
    w = shape.element_bytes
    dense, experts = stage_parameters(job, layout, kind)

    def shared(level: int) -> float:
        """Returns how many parameters' state a GPU holds, if ZeRO-`level` and up shards it."""
        if layout.zero < level:
            return float(dense + experts)
        return dense / layout.replicas + experts / layout.expert_replicas

    # PyTorch's FSDP keeps no 16-bit weights and gradients. It shards the fp32 weights and
    # gradients, which are counted under the optimizer, and casts the weights that it gathers.
    half = w
    if layout.zero >= 3 and software(job.stack).fsdp:
        half = 0
    gradient = half
    states = _STATE_BYTES[job.optimizer]
    if software(job.stack).fp32_gradients and shape.attention_dtype == "bf16":
        # The optimizer reads them without a copy (Megatron Core User Guide, Distributed Optimizer).
        gradient = _FP32
        states -= _FP32
    kept = stage_activations(job, layout, kind)
    activations = kept * in_flight(layout, stage, layout.micro_batches(job.gbs))
    dense_only = kind.dense == kind.layers
    # The activations that a layer does not keep exist while the layer is recomputed.
    working = 0.0
    if layout.recompute == "full":
        working = _layer_activations(job, layout, dense=dense_only)
    elif layout.recompute == "selective":
        working = _core_activations(job, layout)
    each = linear_weight_bytes(job)
    weights = half * shared(3)
    if layout.zero >= 3:
        # The gathered weights of the current layer and of the next one, and the gradients of one
        # layer.
        working += (2 * each + w) * sum(layer_weights(shape, layout, dense=dense_only))
    else:
        weights += (each - w) * sum(_linear_weights(shape, layout, kind))
    if kind.last:
        # The fp16 logits, their fp32 copy and the gradient.
        vocab = padded_vocab(shape.vocab, layout.tp)
        working += _tokens(job, layout) * vocab / layout.tp * (w + _FP32 + _FP32)
    return Memory(
        weights=weights,
        gradients=gradient * shared(2),
        optimizer=states * shared(1),
        activations=activations,
        working=working,
        slack=calibration.activation_slack * (activations + working),
        base=calibration.base_gib * GIB,
        stage=stage,
    )


def _tokens(job: Job, layout: Layout) -> float:
    """Returns the tokens of a micro-batch on one GPU."""
    return layout.mbs * job.shape.seq / layout.cp


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Returns the number of micro-batches whose activations a stage holds.

    With 1F1B the number is that of the stages from this stage to the last one. With interleaved
    stages, each stage holds pp - 1 more chunks of a micro-batch (Korthikanti et al., section
    4.2.3). The number is at most micro_batches.

    stage: number of the stage, from 0.
    micro_batches: micro-batches of the pipeline per iteration.
    """
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
    """Returns the bytes of activations that the backward pass of a layer reads, per micro-batch.

    For a GPT layer these are s·b·h·(10 + 24/t) bytes, plus those of the attention core.

    dense: whether the layer is one of the model's `dense_layers`.
    """
    shape = job.shape
    w = shape.element_bytes
    tokens = _tokens(job, layout)
    # Inputs of GEMMs are kept in the format of the GEMM.
    kept = DTYPES[shape.dtype].a_bytes if shape.fp8_recipe else w
    # The inputs of two norms, of qkv and of the MLP, and two dropout masks.
    whole = tokens * shape.hidden * (2 * w + 2 * kept + 2 * MASK_BYTES * shape.dropout)
    # The latents before and after their norms (DeepSeek-V2, arXiv:2405.04434, section 2.1), which
    # are not divided over tp.
    whole += tokens * ((shape.q_rank + shape.kv_rank) * (w + kept) + shape.rope_dim * w)
    # Queries, keys and values, and the output of attention.
    width = shape.heads * shape.head_dim + max(shape.kv_heads, layout.tp) * (
        shape.head_dim + shape.value_width
    )
    width += shape.heads * shape.value_width
    each = (1 + shape.gated) * w + kept
    mlp_bytes = each * shape.ffn
    if shape.experts and not dense:  # includes the rows gathered for the experts
        mlp_bytes = shape.top_k * (each * shape.moe_ffn + kept * shape.hidden)
        mlp_bytes += each * shape.shared_ffn
    divided = tokens * (w * width + mlp_bytes) / layout.tp
    if layout.sequence_parallel:
        whole /= layout.tp
    return whole + divided + _core_activations(job, layout)


def _core_activations(job: Job, layout: Layout) -> float:
    """Returns the bytes that the backward pass of the attention core reads, per micro-batch.

    Without fused attention these are the softmax output and, with dropout, the dropout mask and
    output. With fused attention they are the statistics of the rows.
    """
    shape = job.shape
    rows = layout.mbs * shape.heads / layout.tp * shape.seq / layout.cp
    if shape.attention == "flash":
        return rows * _FP32
    w = shape.element_bytes
    each = 2 * w + MASK_BYTES if shape.dropout else w
    return rows * shape.seq * each
