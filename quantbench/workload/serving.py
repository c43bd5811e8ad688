"""Lists the work that a serving engine does for named models, which a planner looks up.

A model on tp GPUs has 1/tp of its heads and of its MLP on each GPU. A model with fewer key/value
heads than GPUs has one of these heads on each GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from quantbench.errors import InputError
from quantbench.workload import Attention, Gemm, MoE, TransformerShape
from quantbench.workload.huggingface import Described, LinearAttention, describe
from quantbench.workload.presets import preset

#: tensor-parallel degrees if none are given
DEGREES = (1, 2, 4, 8, 16)
#: distributions of tokens over experts that aiconfigurator's tables have
_ROUTINGS = ("balanced", "power_law_1.01", "power_law_1.2")
#: numbers of tokens of a layer of experts
_TOKENS = tuple(2**power for power in range(15))
#: numbers of sequences in a batch of prompts or of new tokens
BATCHES = tuple(2**power for power in range(12))
#: Prompt lengths: each power of two and one more, because attention is tiled.
_PROMPTS = tuple(seq for power in range(4, 18) for seq in (2**power, 2**power + 1))
#: numbers of cached tokens before a new token
CACHED = tuple(2**power for power in range(18))
#: largest numbers of tokens in a batch of prompts, and of cached tokens of all sequences in a batch
MOST_PROMPT_TOKENS = 2**17
_MOST_CACHED_TOKENS = 2**23


@dataclass(frozen=True, order=True)
class Heads:
    """Attention heads on one GPU.

    window: number of keys that a query sees; 0 for all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0

    def prompts(self, dtype: str) -> list[Attention]:
        """Returns causal attention of prompts in which every query sees all keys before it."""
        found = []
        for batch, seq in product(BATCHES, _PROMPTS):
            if batch * seq <= MOST_PROMPT_TOKENS:
                found.append(self._attention(batch, seq, seq, dtype))
        return found

    def decodes(self, dtype: str) -> list[Attention]:
        """Returns attention of one new token per sequence to the cached tokens and itself."""
        found = []
        for batch, cached in product(BATCHES, CACHED):
            if batch * cached <= _MOST_CACHED_TOKENS:
                found.append(self._attention(batch, 1, cached + 1, dtype))
        return found

    def _attention(self, batch: int, seq_q: int, seq_k: int, dtype: str) -> Attention:
        sizes = (batch, self.heads, seq_q, seq_k, self.head_dim, self.kv_heads)
        return Attention(*sizes, dtype, causal=seq_q == seq_k)


@dataclass(frozen=True, order=True)
class Latent:
    """Latent attention on one GPU: its heads, and the widths that `TransformerShape` defines."""

    heads: int
    head_dim: int
    value_dim: int
    kv_rank: int
    rope_dim: int

    @property
    def expanded(self) -> Heads:
        """Heads of a prompt, whose latents are expanded to the keys and values of every head.

        Keys and values differ in width. Their mean width as head_dim gives the same FLOPs and
        bytes.
        """
        return Heads(self.heads, self.heads, (self.head_dim + self.value_dim) // 2)

    @property
    def absorbed(self) -> Heads:
        """Heads of a new token, all of which read the latents instead of keys and values.

        A query of a head is as wide as a latent with its rotary part (kv_rank + rope_dim), and the
        result is as wide as the latent (kv_rank). This is described as two heads of half the mean
        of these widths, with one key/value head. The FLOPs are the same, and the bytes per cached
        token are those of kv_rank + rope_dim / 2 elements.
        """
        return Heads(2 * self.heads, 1, (2 * self.kv_rank + self.rope_dim) // 4)


#: heads in a modelled table if no model is named
MODEL_HEADS = tuple(
    Heads(heads, kv_heads, head_dim)
    for heads, kv_heads in (
        (8, 1), (8, 8), (16, 2), (16, 16), (32, 4), (32, 8), (32, 32), (64, 8), (64, 64),
    )
    for head_dim in (64, 128)
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """Work that an engine does for some models.

    products: (n, k) of linear layers.
    heads, latent: attention heads and latent attention on one GPU, without duplicates.
    experts: layers of experts in bf16, for each of _TOKENS, _ROUTINGS and the tensor- and
        expert-parallel degrees.
    linear: linear-attention layers on one GPU.
    """

    products: tuple[tuple[int, int], ...] = ()
    heads: tuple[Heads, ...] = ()
    latent: tuple[Latent, ...] = ()
    experts: tuple[MoE, ...] = ()
    linear: tuple[LinearAttention, ...] = ()


def served(who: str, names: str, configs: Sequence[Path], degrees: Sequence[int]) -> Served:
    """Returns the work that an engine does for the named models, at every tensor-parallel degree.

    who: operation for error messages.
    names, configs: names of models, separated by commas, and config.json files of other models.
    degrees: tensor-parallel degrees; () for DEGREES.

    Raises InputError if none of the degrees divides the heads of a model.
    """
    products: set[tuple[int, int]] = set()
    heads: set[Heads] = set()
    latent: set[Latent] = set()
    experts: dict[MoE, None] = {}
    linear: set[LinearAttention] = set()
    degrees = degrees or DEGREES
    models = [Described(preset(name), {}) for name in names.split(",") if name]
    models += [describe(path, hybrid=True) for path in configs]
    for model in models:
        shape = model.shape
        cut = [_cut(shape, tp) for tp in degrees if shape.heads % tp == 0]
        if not cut:
            raise InputError(who, f"--tp {degrees} of {shape.heads} heads", "degrees that divide")
        for one in cut:
            ops = one.ops(backward=False)
            products |= {(op.workload.n, op.workload.k) for op in ops if type(op.workload) is Gemm}
            # Heads are as wide as their values. The width of keys differs only in latent attention,
            # which is looked up for vLLM as usual attention with this number of heads and this
            # width.
            heads |= {
                Heads(one.heads, one.kv_heads, one.value_width, window)
                for window in {0, one.sliding_window}
            }
            if one.kv_rank:
                latent.add(
                    Latent(one.heads, one.head_dim, one.value_dim, one.kv_rank, one.rope_dim)
                )
        if shape.experts:
            products.add((shape.experts, shape.hidden))  # the router
            experts |= dict.fromkeys(_layers(shape, max(degrees)))
        if model.linear:
            parts = {model.linear.cut(tp) for tp in degrees if model.linear.key_heads % tp == 0}
            linear |= parts
            products = products.union(*(part.products for part in parts))
            # Full attention between these layers has an output gate as wide as its queries.
            for one in cut:
                products.add((2 * (one.heads + one.kv_heads) * one.head_dim, one.hidden))
    return Served(
        tuple(sorted(products)),
        tuple(sorted(heads)),
        tuple(sorted(latent)),
        tuple(experts),
        tuple(sorted(linear)),
    )


def _cut(shape: TransformerShape, tp: int) -> TransformerShape:
    """Returns one GPU's part of a model as a model of its own.

    Only the widths of its ops count, which depend neither on the sequence length nor on the number
    of layers. So the part has one token, and few layers: those without experts and one more, but at
    least two.

    tp: tensor-parallel degree, which divides the heads.
    """
    return replace(
        shape,
        heads=shape.heads // tp,
        kv_heads=max(1, shape.kv_heads // tp),
        ffn=max(1, shape.ffn // tp),
        shared_ffn=shape.shared_ffn // tp,
        vocab=max(1, shape.vocab // tp),
        gate_fused=shape.gated,
        attention="flash",
        seq=1,
        layers=max(2, shape.dense_layers + 1),
    )


def _layers(shape: TransformerShape, most: int) -> list[MoE]:
    """Returns the layers of a model's experts, on up to `most` GPUs (tp × ep)."""
    found = []
    for tp, ep in product(DEGREES, DEGREES):
        if shape.moe_ffn % tp or shape.experts % ep or tp * ep > most:
            continue
        for tokens, routing in product(_TOKENS, _ROUTINGS):
            layer = MoE(
                tokens,
                shape.hidden,
                shape.moe_ffn,
                shape.experts,
                shape.top_k,
                tp=tp,
                ep=ep,
                gated=shape.gated,
                distribution=routing,
            )
            found.append(layer)
    return found
