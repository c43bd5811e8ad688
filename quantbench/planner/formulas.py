"""Counts the FLOPs of a training iteration, and computes TFLOP/s by public formulas.

Three public formulas give TFLOP/s that differ by up to 16 % for the same run, so TFLOP/s are
comparable only if they come from one formula. All three count the hardware FLOPs of training with
full activation recomputation: 8 FLOPs per parameter and token (2 forward, 2 for the recomputed
forward pass, 4 backward). Without recomputation, 6 of the 8 remain.
"""

from quantbench.workload import TransformerShape
from quantbench.workload.parameters import gpt_layer_parameters, parameters


def tflops_by_calculator(
    shape: TransformerShape,
    *,
    gbs: int,
    tp: int,
    sec_per_it: float,
    gpus: int,
    size_b: float | None = None,
) -> dict[str, float]:
    """Returns TFLOP/s per GPU by two older formulas, by the formula's name.

    Both formulas assume full recomputation. A formula that does not apply to the shape is left out.
    The third formula, Megatron's, is in `hardware_flops`.

    - `simple`: 8 · parameters · seq · gbs / time. This count omits the attention scores, whose
      fraction of the FLOPs grows with seq / hidden. Source: bigscience-workshop/bigscience,
      train/tr8-104B-wide and math/README.md.
    - `old`: 8 · l·(12h² + 13h + 6h·(tp − 1)) · seq · gbs / time, for GPT layers. The term
      6h·(tp − 1) counts a layer's biases and norms once per tensor-parallel rank. This count omits
      embeddings and attention scores, so it is too low: by 4 % for 80 layers of hidden 14400, and
      by 16 % for 8 layers. Source: the estimate that Megatron-DeepSpeed logged before 21 February
      2022.

    gbs: samples per iteration, each of shape.seq tokens.
    tp: tensor-parallel degree, for `old`.
    sec_per_it: time per iteration on `gpus` GPUs, in s.
    size_b: published number of parameters in 1e9, for `simple`; None for the shape's parameters.

    >>> shape = TransformerShape(hidden=11600, heads=80, layers=64)
    >>> found = tflops_by_calculator(
    ...     shape, gbs=2048, tp=4, sec_per_it=633, gpus=128, size_b=104
    ... )
    >>> round(found["simple"], 1)
    43.1
    """
    gpu_seconds = sec_per_it * gpus
    if size_b is None:
        size_b = parameters(shape) / 1e9
    found = {"simple": 8 * size_b * shape.seq * gbs / gpu_seconds / 1e3}
    if _is_gpt(shape):
        count = shape.layers * (gpt_layer_parameters(shape.hidden) + 6 * shape.hidden * (tp - 1))
        found["old"] = 8.0 * count * shape.seq * gbs / gpu_seconds / 1e12
    return found


def _is_gpt(shape: TransformerShape) -> bool:
    """Returns whether the layers are GPT layers, which have 12·hidden² weights."""
    as_many_heads = shape.kv_heads == shape.heads and shape.heads * shape.head_dim == shape.hidden
    has_mlp = not shape.experts and not shape.gated and shape.ffn == 4 * shape.hidden
    return as_many_heads and has_mlp


def _megatron_flops(shape: TransformerShape, gbs: int) -> float:
    """Returns an iteration's FLOPs with full recomputation by Megatron's formula for GPT layers.

    The formula is 96 · gbs · s · l · h² · (1 + s/6h + V/16lh). It counts attention over all pairs
    of tokens, including pairs that the causal mask removes.
    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM, SC 2021, equation 3, in Megatron-DeepSpeed since its pull request 251.
    """
    h = shape.hidden
    beside = 1 + shape.seq / (6 * h) + shape.vocab / (16 * shape.layers * h)
    return 96.0 * gbs * shape.seq * shape.layers * h**2 * beside


def model_flops(shape: TransformerShape, gbs: int) -> float:
    """Returns an iteration's FLOPs without recomputation, the numerator of MFU.

    All GEMMs of any shape count, including grouped heads and gated MLPs. As in Megatron, attention
    counts all pairs of tokens, masked or not. For a GPT with ffn = 4·hidden, the result is 3/4 of
    Megatron's count plus 1.5·V·h per token: Megatron's 6·V·h for the logits contain no
    recomputation that could be subtracted.
    """
    pairs = 4 * shape.seq * shape.heads * shape.core_dim
    # Weights that GEMMs use. The logits are a GEMM, and the embedding is a lookup. With tied
    # weights, the shared matrix therefore counts once.
    met = shape.active_parameters - shape.vocab * shape.hidden * (not shape.tied)
    return 3.0 * gbs * shape.seq * (2 * met + shape.layers * pairs)


def hardware_flops(shape: TransformerShape, gbs: int, recompute: str = "none") -> float:
    """Returns an iteration's FLOPs including recomputation.

    GPT layers are counted by Megatron's formula, other layers as in `model_flops`.

    recompute: kind of recomputation, as in `Layout`.
    """
    none = 0.75 * _megatron_flops(shape, gbs) if _is_gpt(shape) else model_flops(shape, gbs)
    if recompute == "full":
        return none * 4 / 3
    if recompute == "selective":
        # The forward pass of the attention core runs once more.
        return none + 4.0 * gbs * shape.seq**2 * shape.heads * shape.core_dim * shape.layers
    return none
