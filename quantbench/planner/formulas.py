"""Parameters and FLOPs of a model, and TFLOPs per GPU as three calculators state them (`tflops_by_calculator`).

The calculators differ by up to 16 % for the same run, so a figure needs the name of its calculator. All count hardware
FLOPs of training with activation recomputation: 8 FLOPs per parameter and token (2 forward, 2 for the recomputed
forward, 4 backward). Without recomputation the work is 3/4 of that.

Sources: `simple`: bigscience-workshop/bigscience, train/tr8-104B-wide and math/README.md. `old`: the estimate that
Megatron-DeepSpeed logged before 21 February 2022. `megatron`: Narayanan et al., Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM, SC 2021, equation 3, in Megatron-DeepSpeed since its pull request 251.
"""

from __future__ import annotations

from dataclasses import replace

from quantbench.errors import InputError
from quantbench.workload import TransformerShape


def tflops_by_calculator(
    shape: TransformerShape, *, gbs: int, tp: int, sec_per_it: float, gpus: int, size_b: float | None = None
) -> dict[str, float]:
    """TFLOP/s per GPU with full recomputation, by the name of each calculator that holds for the shape.

    simple: 8 · parameters · seq · gbs / time. Leaves out attention's share, which grows with seq / hidden.
    old: 8 · l·(12h² + 13h + 6h·(tp − 1)) · seq · gbs / time, for GPT layers. The last term counts biases and norms of a
        layer once per tensor-parallel rank. Leaves out embeddings and attention's s², so it understates by 4 % at 80
        layers of 14400 and by 16 % at 8.
    megatron: 96 · gbs · s · l · h² · (1 + s/6h + V/16lh) / time, for GPT layers, all pairs of tokens counted.

    gbs: samples of shape.seq tokens in an iteration that took `sec_per_it` on `gpus` GPUs.
    size_b: stated parameters of the model, 1e9, for `simple`; by default those of the shape.

    Raises InputError for a time or number of GPUs that is not above 0.

    >>> shape = TransformerShape(hidden=11600, heads=80, layers=64)
    >>> round(tflops_by_calculator(shape, gbs=2048, tp=4, sec_per_it=633, gpus=128, size_b=104)["simple"], 1)
    43.1
    """
    if sec_per_it <= 0 or gpus < 1:
        what = f"sec_per_it = {sec_per_it!r} on {gpus!r} GPUs"
        raise InputError("TFLOPs", what, "seconds above 0 on at least one GPU")
    gpu_seconds = sec_per_it * gpus
    size_b = parameters(shape) / 1e9 if size_b is None else size_b
    found = {"simple": 8 * size_b * shape.seq * gbs / gpu_seconds / 1e3}
    if _is_gpt(shape):
        count = shape.layers * (gpt_layer_parameters(shape.hidden) + 6 * shape.hidden * (tp - 1))
        found["old"] = 8.0 * count * shape.seq * gbs / gpu_seconds / 1e12
        found["megatron"] = _megatron_flops(shape, gbs) / gpu_seconds / 1e12
    return found


def _is_gpt(shape: TransformerShape) -> bool:
    """Whether its layers are GPT layers of 12·hidden² weights."""
    as_many_heads = shape.kv_heads == shape.heads and shape.heads * shape.head_dim == shape.hidden
    return as_many_heads and not shape.gated and shape.ffn == 4 * shape.hidden


def _megatron_flops(shape: TransformerShape, gbs: int) -> float:
    s, layers, h, vocab = shape.seq, shape.layers, shape.hidden, shape.vocab
    return 96.0 * gbs * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))


def gpt_layer_parameters(hidden: int) -> int:
    """Weights, biases and norms of one GPT layer with an MLP of 4 · hidden: 12·h² + 13·h."""
    return 12 * hidden**2 + 13 * hidden


def parameters(shape: TransformerShape) -> int:
    """Parameters of the model with the biases and norms of its layers and the final norm.

    Position embeddings are left out (BLOOM has none; for the others they are below 0.05 %).

    >>> from quantbench.workload.presets import preset
    >>> parameters(preset("bloom-176b"))
    176247242752
    """
    attention_width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # Biases of qkv, proj, up and down and two norms of weight and bias; gated models drop biases and norm biases.
    small = 2 * shape.hidden if shape.gated else attention_width + shape.ffn + 6 * shape.hidden
    final_norm = shape.hidden if shape.gated else 2 * shape.hidden
    return shape.parameters + shape.layers * small + final_norm


def useful_parameters(shape: TransformerShape, vocab: int) -> int:
    """Parameters without those of a vocabulary padded beyond `vocab`."""
    return parameters(shape if shape.vocab <= vocab else replace(shape, vocab=vocab))


def model_flops(shape: TransformerShape, gbs: int) -> float:
    """FLOPs of an iteration without recomputation: the numerator of MFU.

    Counts every product of any shape (grouped heads, gated MLPs). For a GPT with ffn = 4·hidden it is 3/4 of the
    `megatron` calculator plus a quarter of the logits' 6·V·h per token: logits are never recomputed.
    Attention counts all pairs of tokens, masked or not, as Megatron does.
    """
    pairs = 4 * shape.seq * shape.heads * shape.head_dim
    per_token = shape.layers * (2 * shape.layer_weights() + pairs) + 2 * shape.vocab * shape.hidden
    return 3.0 * gbs * shape.seq * per_token


def hardware_flops(shape: TransformerShape, gbs: int) -> dict[str, float]:
    """FLOPs of an iteration by kind of recomputation; of GPT layers as the `megatron` calculator counts them."""
    if _is_gpt(shape):
        full = _megatron_flops(shape, gbs)
        none = 0.75 * full
    else:
        none = model_flops(shape, gbs)
        full = none * 4 / 3
    core = 4.0 * gbs * shape.seq**2 * (shape.heads * shape.head_dim) * shape.layers
    return {"full": full, "selective": none + core, "none": none}
