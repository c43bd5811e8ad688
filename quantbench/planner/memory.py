"""Predicts the memory that a training job needs on its fullest GPU.

`memory` returns the prediction, and `limit_bytes` the GPU's usable memory, both in bytes. Users see
GiB, because a GPU sold with 80 GB has 80 GiB, and nvidia-smi also reports GiB. Activations follow
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, sections 4
and 5, extended to any MLP width, gated MLPs, any number of key/value heads, latent attention and
experts.
"""

from dataclasses import asdict, dataclass

from quantbench.planner.calibration import Calibration, software
from quantbench.planner.layout import Job, Layout, StageKind, layer_weights, stages_of
from quantbench.workload import TransformerShape
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.parameters import padded_vocab

GIB = 2**30
# Usable fraction of a GPU's memory. CUDA reports 79.2 GiB on an A100 with 80 GiB, and 31.7 GiB on a
# V100 with 32 GiB.
_USABLE_SHARE = 0.99
# Bytes per fp32 element.
_FP32 = 4
#: Bytes per element of a dropout mask.
MASK_BYTES = 1
# Bytes per parameter by optimizer: 4 for the fp32 master weight, 4 for the fp32 gradient during the
# optimizer step, and 8 for two fp32 moments (2 for adam_8bit, which stores each in one byte).
# torch.optim.Adam needs 4 more, for the square root of the second moment.
_STATE_BYTES = {"adam": 4 + 4 + 8 + 4, "fused_adam": 4 + 4 + 8, "adam_8bit": 4 + 4 + 2}


@dataclass(frozen=True)
class Memory:
    """Memory of a GPU in bytes, by use.

    weights: weights that the GPU stores, without weights that ZeRO-3 gathers temporarily.
    gradients: accumulated gradients.
    optimizer: optimizer states, master weights and temporary copies during the optimizer step.
    activations: activations kept for the backward pass.
    working: temporary memory: one layer's recomputed activations, the weights and gradients of the
        layers that ZeRO-3 gathers, and the logits.
    slack: unused memory that the caching allocator reserves.
    base: CUDA context, communicators, buckets and workspaces.
    stage: index of the GPU's pipeline stage, from 0.
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
    """Returns the usable memory of one of the job's GPUs, in bytes."""
    return job.cluster.device.memory_bytes * _USABLE_SHARE


def memory(job: Job, layout: Layout, calibration: Calibration) -> Memory:
    """Predicts the memory of a GPU in the pipeline stage that needs the most memory."""
    found = []
    stage = 0
    for kind in stages_of(job.shape, layout):
        # Equal stages differ only in the number of micro-batches whose activations they keep. The
        # first of them keeps the largest number, so only it is evaluated.
        found.append(_stage(job, layout, calibration, kind, stage))
        stage += kind.count
    return max(found, key=lambda one: one.total)


def embedding_parameters(shape: TransformerShape, tp: int) -> int:
    """Returns the number of parameters of the embedding matrix on one of `tp` GPUs.

    The logits matrix has the same number of parameters.
    """
    return padded_vocab(shape.vocab, tp) // tp * shape.hidden


def stage_parameters(job: Job, layout: Layout, kind: StageKind) -> tuple[int, int]:
    """Returns a stage's number of parameters on one GPU, as (outside experts, in routed experts).

    The number outside experts includes embeddings, biases and norms.

    kind: layers of the stage, and whether it has the embedding and the logits.
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
    """Returns the number of weights in a stage's linear layers on one GPU.

    The result is (outside experts, in routed experts).
    """
    sparse = kind.layers - kind.dense
    own, experts = layer_weights(shape, layout)
    own_dense, _ = layer_weights(shape, layout, dense=True)
    return sparse * own + kind.dense * own_dense, sparse * experts


def linear_weight_bytes(job: Job) -> float:
    """Returns the bytes per linear-layer weight that a GPU keeps during a micro-batch.

    Without a recipe for 8- or 4-bit formats, a GPU keeps the 16-bit weight. With a recipe,
    Transformer Engine keeps quantized copies in addition to the 16-bit weight. A stack with
    quantized weights (`Stack.narrow_weights`) keeps only the copies.

    The forward GEMM and the GEMM for the input's gradient read the weights in different directions.
    Each needs its own copy, because Hopper's FP8 GEMMs take only the TN layout, and because blocks
    with a common scale have a direction. One copy is enough for FP8 with one scale per tensor on
    compute capability 10.x and 11.x, whose tensor cores read both directions.

    Sources: Transformer Engine,
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
    """Predicts the memory of a GPU in one pipeline stage.

    kind: layers of the stage, and whether it has the embedding and the logits.
    stage: index of the stage, from 0.
    """
    shape = job.shape
    w = shape.element_bytes
    dense, experts = stage_parameters(job, layout, kind)

    def shared(level: int) -> float:
        """Returns the number of parameters for which one GPU stores a state, such as gradients.

        level: lowest ZeRO stage that shards the state: 1 optimizer, 2 gradients, 3 weights.
        """
        if layout.zero < level:
            return float(dense + experts)
        return dense / layout.replicas + experts / layout.expert_replicas

    # PyTorch's FSDP stores no 16-bit weights or gradients. It shards fp32 weights and gradients,
    # which count as optimizer memory here, and casts weights to 16 bits when it gathers them.
    half = w
    if layout.zero >= 3 and software(job.stack).fsdp:
        half = 0
    gradient = half
    states = _STATE_BYTES[job.optimizer]
    if software(job.stack).fp32_gradients and shape.attention_dtype == "bf16":
        # Gradients are accumulated in fp32, so the optimizer needs no fp32 copy of them (Megatron
        # Core User Guide, Distributed Optimizer).
        gradient = _FP32
        states -= _FP32
    kept = stage_activations(job, layout, kind)
    activations = kept * in_flight(layout, stage, layout.micro_batches(job.gbs))
    dense_only = kind.dense == kind.layers
    # Recomputed activations exist only during the backward pass of their layer.
    working = 0.0
    if layout.recompute == "full":
        working = _layer_activations(job, layout, dense=dense_only)
    elif layout.recompute == "selective":
        working = _core_activations(job, layout)
    each = linear_weight_bytes(job)
    weights = half * shared(3)
    if layout.zero >= 3:
        # Gathered weights of the current and the next layer, and gradients of one layer.
        working += (2 * each + w) * sum(layer_weights(shape, layout, dense=dense_only))
    else:
        weights += (each - w) * sum(_linear_weights(shape, layout, kind))
    if kind.last:
        # The 16-bit logits, their fp32 copy, and the fp32 gradient.
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
    """Returns the number of tokens per GPU in one micro-batch."""
    return layout.mbs * job.shape.seq / layout.cp


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Returns the number of micro-batches whose activations a stage keeps at the same time.

    The schedule is 1F1B (one forward pass, then one backward pass). A stage keeps pp - stage
    micro-batches. With interleaved stages, it keeps pp - 1 more chunks of layers, which adds
    (pp - 1) / interleave micro-batches (Korthikanti et al., section 4.2.3). The number is at most
    `micro_batches`.

    stage: index of the stage, from 0.
    micro_batches: micro-batches per pipeline and iteration.
    """
    depth: float = layout.pp - stage
    if layout.interleave > 1:
        depth = layout.pp * (1 + (layout.pp - 1) / (layout.pp * layout.interleave)) - stage
    return min(depth, micro_batches)


def stage_activations(job: Job, layout: Layout, kind: StageKind) -> float:
    """Returns the bytes of activations that a GPU keeps for one micro-batch.

    With full recomputation, only each layer's input is kept.

    kind: layers of the GPU's stage.
    """
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
    """Returns the bytes of activations that one layer's backward pass reads for one micro-batch.

    For a GPT layer in 16 bits with dropout, the result is s·b·h·(10 + 24/t) bytes plus the
    activations of the attention core, where s is seq, b is mbs, h is hidden and t is tp.

    dense: whether the layer is one of the model's `dense_layers`, which have no experts.
    """
    shape = job.shape
    w = shape.element_bytes
    tokens = _tokens(job, layout)
    # Bytes per element of a GEMM's kept input, which has the GEMM's dtype.
    kept = DTYPES[shape.dtype].a_bytes if shape.fp8_recipe else w
    # Inputs of the two norms, of qkv and of the MLP, and two dropout masks.
    whole = tokens * shape.hidden * (2 * w + 2 * kept + 2 * MASK_BYTES * shape.dropout)
    # Latents of latent attention, before and after their norms (DeepSeek-V2, arXiv:2405.04434,
    # section 2.1). They are not split over tp GPUs.
    whole += tokens * ((shape.q_rank + shape.kv_rank) * (w + kept) + shape.rope_dim * w)
    # Combined width of queries, keys, values and attention output.
    width = shape.heads * shape.head_dim + max(shape.kv_heads, layout.tp) * (
        shape.head_dim + shape.value_width
    )
    width += shape.heads * shape.value_width
    each = (1 + shape.gated) * w + kept
    mlp_bytes = each * shape.ffn
    if shape.experts and not dense:  # includes the tokens' rows, gathered for each of top_k experts
        mlp_bytes = shape.top_k * (each * shape.moe_ffn + kept * shape.hidden)
        mlp_bytes += each * shape.shared_ffn
    divided = tokens * (w * width + mlp_bytes) / layout.tp
    if layout.sequence_parallel:
        whole /= layout.tp
    return whole + divided + _core_activations(job, layout)


def _core_activations(job: Job, layout: Layout) -> float:
    """Returns the bytes that the backward pass of attention's core (between qkv and proj) reads.

    They are for one layer and one micro-batch. Unfused attention keeps the softmax output and, with
    dropout, the dropout mask and output. Fused attention keeps one fp32 statistic per query and
    head.
    """
    shape = job.shape
    rows = layout.mbs * shape.heads / layout.tp * shape.seq / layout.cp
    if shape.attention == "flash":
        return rows * _FP32
    w = shape.element_bytes
    each = 2 * w + MASK_BYTES if shape.dropout else w
    return rows * shape.seq * each
