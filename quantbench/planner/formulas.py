"""Parameters and FLOPs of a model, and TFLOPs per GPU as three calculators (`CALCULATORS`) state them.

The calculators differ by up to 16 % for the same run, so a figure needs the name of its calculator. All count hardware
FLOPs of training with activation recomputation: 8 FLOPs per parameter and token (2 forward, 2 for the recomputed
forward, 4 backward). Without recomputation the work is 3/4 of that.

Sources: `simple`: bigscience-workshop/bigscience, train/tr8-104B-wide and math/README.md. `old`: the estimate that
Megatron-DeepSpeed logged before 21 February 2022. `megatron`: Narayanan et al., Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM, SC 2021, equation 3, in Megatron-DeepSpeed since its pull request 251.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quantbench.errors import InputError
from quantbench.workload import TransformerShape

_WHO = "TFLOPs"


@dataclass(frozen=True)
class Calculator:
    """One way to state TFLOPs per GPU.

    valid: which shapes it holds for, and what it leaves out.
    flops: FLOPs of an iteration with full recomputation for (shape, gbs, tp).
    gpt_only: holds for GPT layers of 12·hidden² weights only.
    """

    name: str
    valid: str
    flops: Callable[[TransformerShape, int, int], float]
    gpt_only: bool = True

    def objection(self, shape: TransformerShape) -> str | None:
        """Why it does not hold for a shape; None if it does."""
        return _not_gpt(shape) if self.gpt_only else None

    def tflops(self, shape: TransformerShape, *, gbs: int, tp: int, sec_per_it: float, gpus: int) -> float:
        """TFLOP/s per GPU of an iteration of `gbs` samples of shape.seq tokens that took `sec_per_it` on `gpus` GPUs.

        Raises InputError for a shape that the calculator does not hold for.
        """
        reason = self.objection(shape)
        if reason is not None:
            raise InputError(f"{_WHO} ({self.name})", reason, self.valid)
        return self.flops(shape, gbs, tp) / _gpu_seconds(sec_per_it, gpus) / 1e12


def simple_tflops(*, size_b: float, seq: int, gbs: int, sec_per_it: float, gpus: int) -> float:
    """The `simple` calculator for a model of `size_b` 1e9 parameters: 4 · 2 · size · seq · gbs / time.

    >>> round(simple_tflops(size_b=104, seq=2048, gbs=2048, sec_per_it=633, gpus=128), 1)
    43.1
    """
    return 8 * size_b * seq * gbs / _gpu_seconds(sec_per_it, gpus) / 1e3


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
    """FLOPs of an iteration by kind of recomputation, as TFLOPs are usually stated."""
    if CALCULATORS["megatron"].objection(shape) is None:
        full = CALCULATORS["megatron"].flops(shape, gbs, 1)
        none = 0.75 * full
    else:
        none = model_flops(shape, gbs)
        full = none * 4 / 3
    core = 4.0 * gbs * shape.seq**2 * (shape.heads * shape.head_dim) * shape.layers
    return {"full": full, "selective": none + core, "none": none}


def _gpu_seconds(sec_per_it: float, gpus: int) -> float:
    if sec_per_it <= 0 or gpus < 1:
        raise InputError(_WHO, f"sec_per_it = {sec_per_it!r} on {gpus!r} GPUs", "seconds above 0 on at least one GPU")
    return sec_per_it * gpus


def _simple_flops(shape: TransformerShape, gbs: int, tp: int) -> float:
    """8 · parameters · seq · gbs."""
    return 8.0 * parameters(shape) * shape.seq * gbs


def _old_flops(shape: TransformerShape, gbs: int, tp: int) -> float:
    """8 · l·(12h² + 13h + 6h·(tp − 1)) · seq · gbs. The last term counts biases and norms of a layer once per
    tensor-parallel rank; embeddings are left out."""
    count = shape.layers * (gpt_layer_parameters(shape.hidden) + 6 * shape.hidden * (tp - 1))
    return 8.0 * count * shape.seq * gbs


def _megatron_flops(shape: TransformerShape, gbs: int, tp: int) -> float:
    """96 · gbs · s · l · h² · (1 + s/6h + V/16lh)."""
    s, layers, h, vocab = shape.seq, shape.layers, shape.hidden, shape.vocab
    return 96.0 * gbs * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))


def _not_gpt(shape: TransformerShape) -> str | None:
    """What differs from a GPT layer of 12·h² weights; None if nothing does."""
    if shape.gated:
        return "a gated MLP"
    if shape.ffn != 4 * shape.hidden:
        return f"ffn = {shape.ffn} with hidden = {shape.hidden}"
    if shape.kv_heads != shape.heads:
        return f"kv_heads = {shape.kv_heads} with heads = {shape.heads}"
    if shape.heads * shape.head_dim != shape.hidden:
        return f"heads · head_dim = {shape.heads * shape.head_dim} with hidden = {shape.hidden}"
    return None


_SIMPLE = Calculator(
    "simple", "a quick look: attention's share, which grows with seq / hidden, is left out", _simple_flops,
    gpt_only=False,
)  # fmt: skip
_OLD = Calculator(
    "old",
    "GPT layers with ffn = 4·hidden; embeddings and attention's s² are left out, so it understates by 4 % at "
    "80 layers of 14400 and by 16 % at 8; Megatron-DeepSpeed before 21 February 2022",
    _old_flops,
)
_MEGATRON = Calculator(
    "megatron",
    "GPT layers with ffn = 4·hidden, as many key as query heads, all pairs of tokens counted; with full "
    "recomputation (3/4 of it without)",
    _megatron_flops,
)
CALCULATORS: dict[str, Calculator] = {c.name: c for c in (_SIMPLE, _OLD, _MEGATRON)}
