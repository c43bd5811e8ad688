"""Lists the workloads that a serving engine runs for named models, for planners' tables.

`served` is the entry point; the exporters call it. With tensor parallelism over tp GPUs, each GPU
has 1/tp of the heads and of the MLP's width. If a model has fewer key/value heads than tp, each GPU
has one key/value head.
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

#: Tensor-parallel degrees that are used if none are given.
DEGREES = (1, 2, 4, 8, 16)
#: Distributions of tokens over experts in aiconfigurator's tables.
_ROUTINGS = ("balanced", "power_law_1.01", "power_law_1.2")
#: Numbers of tokens in an MoE layer's batch.
_TOKENS = tuple(2**power for power in range(15))
#: Batch sizes (numbers of sequences) of prompts and of decoding.
BATCHES = tuple(2**power for power in range(12))
#: Prompt lengths: powers of two, and one token more, where an additional attention tile starts.
_PROMPTS = tuple(seq for power in range(4, 18) for seq in (2**power, 2**power + 1))
#: Numbers of tokens in the key/value cache before a new token.
CACHED = tuple(2**power for power in range(18))
#: Largest number of tokens in a batch of prompts, and largest number of cached tokens in a batch of
#: decoding.
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
        """Returns attention of one new token per sequence, to the cached tokens and to itself."""
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
    """Latent attention on one GPU, whose key/value cache has low-rank latents.

    heads: attention heads on the GPU. The other fields are widths, as in `TransformerShape`.
    """

    heads: int
    head_dim: int
    value_dim: int
    kv_rank: int
    rope_dim: int

    @property
    def expanded(self) -> Heads:
        """Heads for a prompt, whose latents are expanded to keys and values for every head.

        Keys and values differ in width. With their mean width as head_dim, FLOPs and bytes are the
        same.
        """
        return Heads(self.heads, self.heads, (self.head_dim + self.value_dim) // 2)

    @property
    def absorbed(self) -> Heads:
        """Heads for a new token. All heads read the latents instead of keys and values.

        A head's query has the width of a latent and its rotary part (kv_rank + rope_dim). Its
        result has the width of a latent (kv_rank). Each head is represented by two heads, which
        have half the mean of these two widths, and all heads share one key/value head. FLOPs are
        then the same, and a cached token has kv_rank + rope_dim / 2 elements.
        """
        return Heads(2 * self.heads, 1, (2 * self.kv_rank + self.rope_dim) // 4)


#: Heads in a modelled table if no model is named.
MODEL_HEADS = tuple(
    Heads(heads, kv_heads, head_dim)
    for heads, kv_heads in (
        (8, 1), (8, 8), (16, 2), (16, 16), (32, 4), (32, 8), (32, 32), (64, 8), (64, 64),
    )
    for head_dim in (64, 128)
)  # fmt: skip


@dataclass(frozen=True)
class Served:
    """Workloads that a serving engine runs for some models, without duplicates.

    products: (n, k) of the linear layers' GEMMs on one GPU.
    heads: attention heads on one GPU.
    latent: latent attention on one GPU.
    experts: MoE layers in bf16, for all numbers of tokens, token distributions, and tensor- and
        expert-parallel degrees.
    linear: linear-attention layers on one GPU.
    """

    products: tuple[tuple[int, int], ...] = ()
    heads: tuple[Heads, ...] = ()
    latent: tuple[Latent, ...] = ()
    experts: tuple[MoE, ...] = ()
    linear: tuple[LinearAttention, ...] = ()


def served(who: str, names: str, configs: Sequence[Path], degrees: Sequence[int]) -> Served:
    """Returns the workloads that an engine runs for models, at all tensor-parallel degrees.

    who: operation for error messages.
    names: names of models, separated by commas; "" for none.
    configs: config.json files of further models.
    degrees: tensor-parallel degrees; () for DEGREES. Degrees that do not divide a model's heads are
        skipped.

    Raises InputError if no degree divides the heads of a model.
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
            # The head width is the values' width. Keys have another width only in latent attention,
            # which aiconfigurator looks up for vLLM as usual attention with these heads and this
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
            # In such a model, the layers of full attention have an output gate as wide as their
            # queries, so their qkv GEMM has the width of the queries twice.
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
    """Returns one GPU's part of a model, as a smaller model.

    The caller uses only the widths of the part's ops, which do not depend on the sequence length or
    the number of layers. So the part has one token, all layers without experts and one further
    layer, and at least two layers.

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
    """Returns a model's MoE layers for each split of the experts over at most `most` GPUs.

    most: largest product of the tensor- and expert-parallel degrees.
    """
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
