"""TFLOPs per GPU as three calculators state it, tokens per second, parameters.

The three differ by up to 16 % on one and the same run, so a figure means nothing without the name of its calculator.
All of them count hardware FLOPs of training with activation recomputation (8 FLOPs per parameter and token: 2 forward,
2 for the recomputed forward, 4 backward); without recomputation the work is 3/4 of that.

Sources: `simple`: bigscience-workshop/bigscience, train/tr8-104B-wide and math/README.md. `old`: the estimate that
Megatron-DeepSpeed logged before 21 February 2022. `megatron`: Narayanan et al., Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM, SC 2021, equation 3, in Megatron-DeepSpeed since its pull request 251.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quantbench.errors import InputError, require_choice
from quantbench.workload import TransformerShape

RECOMPUTATIONS = ("full", "selective", "none")

_WHO = "TFLOPs"
#: share of the work with full recomputation (3 of 4 passes) where nothing is recomputed
_WITHOUT_RECOMPUTATION = 0.75


@dataclass(frozen=True)
class Calculator:
    """One way of stating TFLOPs per GPU.

    name: as in `tflops_calculator` columns. formula: for people, in parameters of the model, seq, gbs (samples), sec
    and gpus. valid: where it holds. flops: FLOPs of an iteration with full recomputation for (shape, gbs, tp).
    objection: why it does not hold for a shape, or None.
    """

    name: str
    formula: str
    valid: str
    flops: Callable[[TransformerShape, int, int], float]
    objection: Callable[[TransformerShape], str | None]

    def tflops(
        self, shape: TransformerShape, *, gbs: int, tp: int, sec_per_it: float, gpus: int, recompute: str = "full"
    ) -> float:
        """TFLOP/s per GPU of an iteration of `gbs` samples of shape.seq tokens that took `sec_per_it` on `gpus` GPUs.

        recompute: full, or none (3/4 of the FLOPs). Raises InputError outside the calculator's validity.
        """
        reason = self.objection(shape)
        if reason is not None:
            raise InputError(f"{_WHO} ({self.name})", reason, self.valid)
        require_choice(f"{_WHO} ({self.name})", "recompute", recompute, ("full", "none"))
        share = 1.0 if recompute == "full" else _WITHOUT_RECOMPUTATION
        return share * self.flops(shape, gbs, tp) / _gpu_seconds(sec_per_it, gpus) / 1e12


def simple_tflops(*, size_b: float, seq: int, gbs: int, sec_per_it: float, gpus: int) -> float:
    """The quick look: 4 · 2 · size · seq · gbs / time, for a model of `size_b` 1e9 parameters.

    >>> round(simple_tflops(size_b=104, seq=2048, gbs=2048, sec_per_it=633, gpus=128), 1)
    43.1
    """
    return 8 * size_b * seq * gbs / _gpu_seconds(sec_per_it, gpus) / 1e3


def layer_parameters(hidden: int) -> int:
    """Weights, biases and norms of one GPT layer with an MLP of 4 · hidden: 12·h² + 13·h."""
    return 12 * hidden**2 + 13 * hidden


def old_parameters(shape: TransformerShape, tp: int) -> int:
    """What the old calculator counts: l·(12h² + 13h + 6h·(tp − 1)). The last term counts biases and norms of a layer
    once per tensor-parallel rank; embeddings are left out."""
    return shape.layers * (layer_parameters(shape.hidden) + 6 * shape.hidden * (tp - 1))


def parameters(shape: TransformerShape) -> int:
    """Parameters of the model, biases and norms of its layers and the final norm included.

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
    """Parameters without those of a vocabulary padded beyond `vocab`, which nobody asked for."""
    return parameters(shape if shape.vocab <= vocab else replace(shape, vocab=vocab))


def megatron_flops(shape: TransformerShape, gbs: int) -> float:
    """FLOPs of an iteration with full recomputation: 96·B·s·l·h²·(1 + s/6h + V/16lh)."""
    s, layers, h, vocab = shape.seq, shape.layers, shape.hidden, shape.vocab
    return 96.0 * gbs * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))


def model_flops(shape: TransformerShape, gbs: int) -> float:
    """FLOPs that the model itself needs for an iteration, nothing recomputed: what MFU is stated in.

    Counts every product of any shape (grouped heads, gated MLPs). For a GPT with ffn = 4·hidden it is 3/4 of
    `megatron_flops` and a quarter of the logits' 6·V·h per token more: logits are never recomputed.
    Attention counts all pairs of tokens, masked or not, as Megatron does.
    """
    s = shape.seq
    width = shape.heads * shape.head_dim
    linear = shape.hidden * (2 * width + 2 * shape.kv_heads * shape.head_dim)
    linear += (3 if shape.gated else 2) * shape.hidden * shape.ffn
    per_token = shape.layers * (2 * linear + 4 * s * width) + 2 * shape.vocab * shape.hidden
    return 3.0 * gbs * s * per_token


def tokens_per_s(*, gbs: int, seq: int, sec_per_it: float) -> float:
    """Tokens per second of the whole job: samples per second times their length."""
    if sec_per_it <= 0:
        raise InputError("tokens per second", f"sec_per_it = {sec_per_it!r}", "seconds above 0")
    return gbs * seq / sec_per_it


def _gpu_seconds(sec_per_it: float, gpus: int) -> float:
    if sec_per_it <= 0 or gpus < 1:
        raise InputError(_WHO, f"sec_per_it = {sec_per_it!r} on {gpus!r} GPUs", "seconds above 0 on at least one GPU")
    return sec_per_it * gpus


def _simple_flops(shape: TransformerShape, gbs: int, tp: int) -> float:
    return 8.0 * parameters(shape) * shape.seq * gbs


def _old_flops(shape: TransformerShape, gbs: int, tp: int) -> float:
    return 8.0 * old_parameters(shape, tp) * shape.seq * gbs


def _megatron_flops(shape: TransformerShape, gbs: int, tp: int) -> float:
    return megatron_flops(shape, gbs)


def _never(shape: TransformerShape) -> str | None:
    return None


def _not_gpt(shape: TransformerShape) -> str | None:
    """Both closed formulas assume a GPT layer: 12·h² weights."""
    if shape.gated:
        return "a gated MLP"
    if shape.ffn != 4 * shape.hidden:
        return f"ffn = {shape.ffn} with hidden = {shape.hidden}"
    if shape.kv_heads != shape.heads:
        return f"kv_heads = {shape.kv_heads} with heads = {shape.heads}"
    if shape.heads * shape.head_dim != shape.hidden:
        return f"heads · head_dim = {shape.heads * shape.head_dim} with hidden = {shape.hidden}"
    return None


CALCULATORS: dict[str, Calculator] = {
    c.name: c
    for c in (
        Calculator(
            "simple",
            "8 · parameters · seq · gbs / (sec · gpus)",
            "a quick look: attention's share, which grows with seq / hidden, is left out",
            _simple_flops,
            _never,
        ),
        Calculator(
            "old",
            "8 · l·(12h² + 13h + 6h·(tp − 1)) · seq · gbs / (sec · gpus)",
            "GPT layers with ffn = 4·hidden; embeddings and attention's s² are left out, so it understates by 4 % at "
            "80 layers of 14400 and by 16 % at 8; Megatron-DeepSpeed before 21 February 2022",
            _old_flops,
            _not_gpt,
        ),
        Calculator(
            "megatron",
            "96 · gbs · s · l · h² · (1 + s/6h + V/16lh) / (sec · gpus)",
            "GPT layers with ffn = 4·hidden, as many key as query heads, all pairs of tokens counted; with full "
            "recomputation (3/4 of it without)",
            _megatron_flops,
            _not_gpt,
        ),
    )
}
