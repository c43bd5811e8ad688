"""Defines a transformer's dimensions (`TransformerShape`), and lists the ops that one GPU computes.

The dimensions also give the model's number of parameters, in total and per GPU.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quantbench.errors import (
    InputError,
    require_bools,
    require_choices,
    require_divisor,
    require_int,
    require_ints,
)
from quantbench.workload.dtypes import ALIGNED_ELEMENTS, GEMM_DTYPES, VECTOR_DTYPES, element_bytes
from quantbench.workload.kinds import Compute
from quantbench.workload.moe import GroupedGemm, MoE, Permute
from quantbench.workload.ops import Attention, Gemm, Softmax, multiples_around, require_multiple
from quantbench.workload.recipes import RECIPES, casts_of

#: Implementations of attention: one fused kernel, or separate kernels for scores, softmax and
#: context.
ATTENTIONS = ("flash", "unfused")
#: Softmax of unfused attention: Megatron's fused kernel if its conditions hold, or torch's separate
#: kernels for scale, mask and softmax.
SOFTMAXES = ("megatron", "torch")


@dataclass(frozen=True)
class Op:
    """Operation of a training step on one GPU.

    name: qkv (for latent attention latent_down, q_up and kv_up), scores, softmax, context,
        attention, proj, mlp_up, mlp_gate, mlp_up_gate, mlp_down, logits or cast. Layers with
        experts have shared_up, … and permute, experts_up, experts_up_gate, experts_down and
        unpermute, or a single op `experts` for the routed experts.
    phase: forward; dgrad or wgrad for a GEMM's two gradients; backward for softmax, attention,
        casts and permutations.
    count: number of runs per micro-batch in the whole model. This is the number of layers that have
        the op, or 1 for the logits.
    """

    name: str
    phase: str
    workload: Compute
    count: int

    @property
    def label(self) -> str:
        """Label for tables and legends, such as `qkv` or `qkv.dgrad`."""
        return self.name if self.phase == "forward" else f"{self.name}.{self.phase}"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of a layer, and how tokens are distributed over them.

    experts: number of routed experts per layer; 0 if all layers have an MLP.
    top_k: number of routed experts that process each token.
    moe_ffn: width of each routed expert.
    shared_ffn: total width of the shared experts, which process every token. They are computed as
        one MLP.
    ep: number of GPUs over which the experts are spread, each with a separate micro-batch.
    routing: distribution of the tokens over the experts, as in `MoE`. `TransformerShape.ops`
        returns the busiest GPU's GEMMs.
    """

    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    ep: int = 1
    routing: str | tuple[int, ...] = "balanced"


@dataclass(frozen=True, kw_only=True)
class ExpertLayers(Experts):
    """Experts, with the layers that have them and the restrictions on GPUs and groups.

    expert_tp: number of GPUs that share each expert; 0 means `tp`. If it is below `tp`, the GPUs of
        a `tp` group process different tokens in the experts.
    dense_layers: number of layers with an MLP in a model with experts. They are the first layers.
    dense_spread: whether the dense layers are instead spread evenly over the model.
    expert_groups, top_groups: restriction of a token's experts to `top_groups` of the
        `expert_groups` groups of neighbouring experts; 0 for no restriction. This is the
        node-limited routing of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    """

    expert_tp: int = 0
    dense_layers: int = 0
    dense_spread: bool = False
    expert_groups: int = 0
    top_groups: int = 0


@dataclass(frozen=True, kw_only=True)
class AttentionDetails:
    """Mask, softmax and latent attention.

    causal: whether attention has a causal mask.
    softmax: one of SOFTMAXES, for unfused attention.
    q_rank: rank of compressed queries in latent attention; 0 if queries are not compressed. Source
        of latent attention: DeepSeek-V2 (arXiv:2405.04434).
    kv_rank: rank of compressed keys and values; 0 for ordinary attention. With latent attention,
        each head has separate keys and values, and `TransformerShape.ops` contains attention with
        heads of width `core_dim`.
    rope_dim: width of the rotary dimensions within head_dim.
    value_dim: width of a head's values in latent attention.
    """

    causal: bool = True
    softmax: str = "megatron"
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    value_dim: int = 0


@dataclass(frozen=True)
class TransformerShape(ExpertLayers, AttentionDetails):
    """Dimensions of a decoder-only transformer, with micro-batch size and parallelism.

    hidden: width of the model.
    heads: number of query heads.
    kv_heads: number of key/value heads; 0 means `heads`.
    head_dim: width of a head; 0 means hidden / heads.
    ffn: width of the MLP; 0 means 4·hidden.
    gated: whether the MLP has a gate in addition to `up` (SwiGLU and similar).
    gate_fused: whether gate and up are one GEMM of twice the width, as in Megatron and vLLM.
    seq: number of tokens per sample.
    vocab: size of the vocabulary.
    tied: whether the input embedding and the logits share one matrix.
    layers: number of layers.
    mbs: number of samples per micro-batch.
    tp: tensor-parallel degree, the number of GPUs that share each matrix.
    dtype: dtype of the linear layers. See `attention_dtype` for attention.
    attention: one of ATTENTIONS.
    dropout: whether hidden states and attention probabilities have dropout.
    sliding_window: attention window in tokens; 0 for none. `ops` ignores the window, and counts
        attention over all keys.
    fp8_recipe: key of `recipes.RECIPES`. With a recipe, gradients may have different dtypes, casts
        are counted, and logits stay in 16 bits. "" means one dtype everywhere, without casts.

    >>> [op.name for op in TransformerShape(hidden=1024, heads=16, seq=512).ops(backward=False)]
    ['qkv', 'attention', 'proj', 'mlp_up', 'mlp_down', 'logits']
    """

    hidden: int
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    gated: bool = False
    gate_fused: bool = False
    seq: int = 2048
    vocab: int = 50304
    tied: bool = True
    layers: int = 1
    mbs: int = 1
    tp: int = 1
    dtype: str = "bf16"
    attention: str = "flash"
    dropout: bool = False
    sliding_window: int = 0
    fp8_recipe: str = ""

    def __post_init__(self) -> None:
        who = "TransformerShape"
        require_ints(self, "hidden", "heads")
        if self.head_dim == 0:
            if self.hidden % self.heads:
                near = multiples_around(self.hidden, self.heads * ALIGNED_ELEMENTS)
                raise InputError(
                    who,
                    f"hidden = {self.hidden} with heads = {self.heads}",
                    f"hidden divisible by heads, best into multiples of {ALIGNED_ELEMENTS}: {near}",
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.kv_heads == 0 or self.kv_rank:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.ffn == 0:
            object.__setattr__(self, "ffn", 4 * self.hidden)
        require_ints(self, "kv_heads", "head_dim", "ffn", "seq", "vocab", "layers", "mbs", "tp")
        require_ints(self, "sliding_window", "shared_ffn", "expert_groups", low=0)
        require_ints(self, "q_rank", "kv_rank", "rope_dim", "value_dim", low=0)
        groups = self.expert_groups
        require_int(who, "top_groups", self.top_groups, low=min(1, groups), high=groups)
        require_int(who, "dense_layers", self.dense_layers, low=0, high=self.layers - 1)
        require_choices(self, dtype=GEMM_DTYPES, attention=ATTENTIONS, softmax=SOFTMAXES)
        require_choices(self, fp8_recipe=("", *RECIPES))
        recipe = RECIPES.get(self.fp8_recipe)
        if recipe is not None and self.dtype != recipe.forward:
            expected = f"{recipe.forward}, which fp8_recipe = {recipe.name} uses forward"
            raise InputError(who, f"dtype = {self.dtype}", expected)
        require_bools(self, "gated", "gate_fused", "tied", "dropout", "causal", "dense_spread")
        require_divisor(self, "kv_heads", "heads")
        for name in ("heads", "ffn", "vocab", "shared_ffn"):
            require_multiple(self, name, "tp")
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            what = f"kv_heads = {self.kv_heads} with tp = {self.tp}"
            raise InputError(who, what, "one to divide the other")
        if self.gate_fused and not self.gated:
            raise InputError(who, "gate_fused = True with gated = False", "gated as well")
        self._require_experts()
        if self.rope_dim or self.q_rank or self.kv_rank or self.value_dim:
            if not (self.kv_rank and self.value_dim):
                expected = "kv_rank and value_dim at least"
                raise InputError(who, "a part of latent attention", expected)
            if self.rope_dim > self.head_dim:
                most = f"at most head_dim = {self.head_dim}"
                raise InputError(who, f"rope_dim = {self.rope_dim}", most)

    def _require_experts(self) -> None:
        """Raises InputError for impossible expert sizes, and for expert sizes if experts is 0."""
        who = "TransformerShape"
        if self.experts and not (self.top_k and self.moe_ffn):
            what = f"experts = {self.experts} without top_k or moe_ffn"
            raise InputError(who, what, "both as well")
        if self.experts:
            try:
                self.experts_of(self.tokens)  # which checks the fields
            except InputError as error:
                what = _as_of_shape(error.value)
                raise InputError(who, what, _as_of_shape(error.expected)) from None
        elif self.top_k or self.moe_ffn or self.ep != 1 or self.dense_layers or self.shared_ffn:
            sizes = "top_k, moe_ffn, ep, dense_layers or shared_ffn"
            raise InputError(who, f"{sizes} with experts = 0", "experts as well")

    @property
    def tokens(self) -> int:
        """Number of tokens per micro-batch, seq · mbs. This is m in every linear layer's GEMM."""
        return self.seq * self.mbs

    @property
    def attention_dtype(self) -> str:
        """Dtype of attention.

        It is fp32 for linear layers in tf32, bf16 for linear layers in an 8- or 4-bit dtype, and
        otherwise `dtype`.
        """
        if self.dtype in VECTOR_DTYPES:
            return self.dtype
        return {"tf32": "fp32"}.get(self.dtype, "bf16")

    @property
    def element_bytes(self) -> int:
        """Bytes per element in attention, and in all other tensors that no linear layer reads."""
        return element_bytes(self.attention_dtype)

    @property
    def kv_heads_per_gpu(self) -> int:
        """Number of key/value heads on one GPU.

        If there are more GPUs than heads, each GPU has a copy of one head.
        """
        return max(1, self.kv_heads // self.tp)

    @property
    def value_width(self) -> int:
        """Width of a head's values."""
        return self.value_dim or self.head_dim

    @property
    def core_dim(self) -> int:
        """Head width that `ops` uses for attention: the mean width of keys and values.

        Keys and values of different widths have the same FLOPs and bytes forward as heads of this
        mean width. Backward, DeepSeek-V3 (keys 192 wide, values 128 wide) has 4 % more FLOPs.
        """
        return (self.head_dim + self.value_width) // 2

    @property
    def qkv_columns(self) -> int:
        """Total number of columns of queries, keys and values on one GPU."""
        keys_and_values = self.kv_heads_per_gpu * (self.head_dim + self.value_width)
        return self.heads // self.tp * self.head_dim + keys_and_values

    def experts_of(self, tokens: int) -> MoE:
        """Returns the experts of one layer.

        tokens: number of tokens in the micro-batch of each group of `tp` GPUs.
        """
        # The experts are on ep · expert_tp GPUs, which are ep · expert_tp / tp groups of `tp` GPUs.
        tp = self.expert_tp or self.tp
        return MoE(
            tokens * self.ep * tp // self.tp,
            self.hidden,
            self.moe_ffn,
            self.experts,
            self.top_k,
            self.dtype,
            tp=tp,
            ep=self.ep,
            gated=self.gated,
            distribution=self.routing,
        )

    def _qkv(self, tp: int) -> dict[str, tuple[int, int]]:
        """Returns (n, k) of each GEMM before attention on one of `tp` GPUs, by op name."""
        heads = self.heads // tp
        if not self.kv_rank:
            return {"qkv": ((heads + 2 * max(1, self.kv_heads // tp)) * self.head_dim, self.hidden)}
        # latent_down is not divided: every GPU computes all of it.
        return {
            "latent_down": (self.q_rank + self.kv_rank + self.rope_dim, self.hidden),
            "q_up": (heads * self.head_dim, self.q_rank or self.hidden),
            "kv_up": (heads * (self.head_dim - self.rope_dim + self.value_dim), self.kv_rank),
        }

    def layer_weights(self, tp: int = 1, *, dense: bool = False, active: bool = False) -> int:
        """Returns the number of weights of one layer on one of `tp` GPUs.

        Biases and layer norms are not included.

        dense: whether the layer is one of `dense_layers`.
        active: whether to count only top_k of the routed experts.
        """
        out = self.heads // tp * self.value_width
        attention = out * self.hidden + sum(n * k for n, k in self._qkv(tp).values())
        if dense or not self.experts:
            return attention + self._mlp_matrices * self.hidden * self.ffn // tp
        held = self.top_k if active else self.experts
        mlp = self._mlp_matrices * self.hidden * (held * self.moe_ffn + self.shared_ffn) // tp
        # The last term is the router.
        return attention + mlp + self.experts * self.hidden

    @property
    def _mlp_matrices(self) -> int:
        """Number of weight matrices in an MLP or expert: up, down and perhaps gate."""
        return 2 + self.gated

    @property
    def parameters(self) -> int:
        """Number of weights in the model, without biases and norms.

        `workload.parameters.parameters` includes biases and norms.
        """
        return self._weights(active=False)

    @property
    def active_parameters(self) -> int:
        """Number of `parameters` that one token uses, with only top_k of the routed experts."""
        return self._weights(active=True)

    @property
    def parameters_per_gpu(self) -> float:
        """Number of `parameters` on one of tp · ep GPUs.

        `tp` divides all weights, and `ep` divides only the routed experts.
        """
        sparse = self.layers - self.dense_layers
        routed = sparse * self.experts * self._mlp_matrices * self.hidden * self.moe_ffn
        return (self.parameters - routed + routed / self.ep) / self.tp

    def _weights(self, *, active: bool) -> int:
        """Returns the number of weights in all layers, the embedding and the logits.

        active: whether to count only top_k of the routed experts.
        """
        dense = self.dense_layers * self.layer_weights(dense=True)
        sparse = (self.layers - self.dense_layers) * self.layer_weights(active=active)
        return dense + sparse + self.vocab * self.hidden * (2 - self.tied)

    def modelled_ops(self) -> tuple[Op, ...]:
        """Returns the ops that have latency models.

        Without experts, these are all `ops`. With experts, these are the forward ops, where a
        single op `experts` replaces a layer's permutations and grouped GEMMs.
        """
        if not self.experts:
            return self.ops()
        found = []
        for op in self.ops(backward=False):
            if op.name == "permute":
                found.append(Op("experts", "forward", self.experts_of(self.tokens), op.count))
            elif not isinstance(op.workload, GroupedGemm | Permute):
                found.append(op)
        return tuple(found)

    def ops(self, *, backward: bool = True) -> tuple[Op, ...]:
        """Returns every op that one GPU runs per micro-batch, forward ops first.

        The ops are GEMMs, softmax, attention, permutations, and the recipe's casts.

        backward: whether to include the backward ops.
        """
        layer = self._layer_forward()
        logits = self._linear(self.vocab // self.tp, self.hidden)
        if self.fp8_recipe:
            logits = replace(logits, dtype=self.attention_dtype)
        forward = [*layer, Op("logits", "forward", logits, 1)]
        gradients: list[Op] = []
        if backward:
            for op in reversed(forward):
                gradients += backward_of(op, self.fp8_recipe)
        forward_casts, backward_casts = self._casts(layer, backward=backward)
        return (*forward, *forward_casts, *gradients, *backward_casts)

    def _casts(self, layer: Iterable[Op], *, backward: bool) -> tuple[list[Op], list[Op]]:
        """Returns the forward casts and the backward casts for the layers' linear ops.

        Without a recipe, there are no casts.

        layer: forward ops of the layers.
        """
        forward_casts: list[Op] = []
        backward_casts: list[Op] = []
        if not self.fp8_recipe:
            return forward_casts, backward_casts
        recipe = RECIPES[self.fp8_recipe]
        for op in layer:
            work: Compute = op.workload
            if isinstance(work, GroupedGemm):
                work = work.gemm(work.rows)
            if isinstance(work, Gemm) and work.dtype == self.dtype:
                before, after = casts_of(op.name, work, recipe, backward=backward)
                forward_casts += [Op("cast", "forward", cast, op.count) for cast in before]
                backward_casts += [Op("cast", "backward", cast, op.count) for cast in after]
        return forward_casts, backward_casts

    def _linear(self, n: int, k: int) -> Gemm:
        """Returns the forward GEMM of a linear layer with n outputs and k inputs."""
        return Gemm(m=self.tokens, n=n, k=k, dtype=self.dtype, layout="nt")

    def _layer_forward(self) -> list[Op]:
        """Returns the forward ops of all layers, without casts and logits.

        An op's count is the number of layers that have it.
        """
        heads = self.heads // self.tp
        work: dict[str, Compute] = {}
        for name, (n, k) in self._qkv(self.tp).items():
            work[name] = self._linear(n, k)
        work |= self._attention_core(heads)
        work["proj"] = self._linear(self.hidden, heads * self.value_width)
        found = _forward_ops(work, self.layers)
        dense = self.dense_layers if self.experts else self.layers
        if dense:
            found += _forward_ops(self._mlp("mlp", self.ffn // self.tp), dense)
        if self.experts:
            work = {}
            if self.shared_ffn:
                work = self._mlp("shared", self.shared_ffn // self.tp)
            rows = Permute(self.tokens, self.hidden, self.top_k, self.attention_dtype)
            work["permute"] = rows
            work |= self.experts_of(self.tokens).grouped_gemms()
            work["unpermute"] = replace(rows, direction="unpermute")
            found += _forward_ops(work, self.layers - dense)
        return found

    def _mlp(self, name: str, ffn: int) -> dict[str, Compute]:
        """Returns the forward GEMMs of an MLP, by op name.

        name: prefix of the op names, `mlp` or `shared`.
        ffn: width of the MLP on one GPU.
        """
        found: dict[str, Compute] = {}
        if self.gate_fused:
            found[f"{name}_up_gate"] = self._linear(2 * ffn, self.hidden)
        else:
            found[f"{name}_up"] = self._linear(ffn, self.hidden)
            if self.gated:
                found[f"{name}_gate"] = self._linear(ffn, self.hidden)
        found[f"{name}_down"] = self._linear(self.hidden, ffn)
        return found

    def _attention_core(self, heads: int) -> dict[str, Compute]:
        """Returns attention's forward workloads between qkv and proj, by op name.

        heads: number of query heads on one GPU.
        """
        if self.attention == "flash":
            fused = Attention(
                batch=self.mbs,
                heads=heads,
                kv_heads=self.kv_heads_per_gpu,
                seq_q=self.seq,
                seq_k=self.seq,
                head_dim=self.core_dim,
                dtype=self.attention_dtype,
                causal=self.causal,
            )
            return {"attention": fused}
        batch = self.mbs * heads
        dtype = self.attention_dtype
        scores = Gemm(self.seq, self.seq, self.head_dim, batch, dtype, "nt")
        softmax = Softmax(
            batch,
            self.seq,
            self.seq,
            dtype,
            mask="causal" if self.causal else "none",
            scale=self.head_dim**-0.5,
            mask_batch=self.mbs,
        )
        context = Gemm(self.seq, self.value_width, self.seq, batch, dtype, "nn")
        return {"scores": scores, "softmax": softmax, "context": context}


def _forward_ops(work: Mapping[str, Compute], count: int) -> list[Op]:
    """Returns forward ops with these names and workloads, each with the same count."""
    return [Op(name, "forward", workload, count) for name, workload in work.items()]


def _as_of_shape(text: str) -> str:
    """Replaces `MoE`'s field names in an error text by `TransformerShape`'s field names."""
    return text.replace("num_experts", "experts").replace("expert_ffn", "moe_ffn")


def backward_of(op: Op, fp8_recipe: str = "") -> tuple[Op, ...]:
    """Returns the backward ops of a forward op.

    A GEMM has two backward GEMMs, softmax and attention have one backward kernel each, and a
    permutation runs in the other direction. For c[m, n] = a[m, k] · b[k, n], the gradient of a is
    dc·bᵀ, which sums over n. The gradient of b is aᵀ·dc, which sums over m. If b is stored as n×k,
    its gradient is stored so too, and computed as dcᵀ·a.

    fp8_recipe: key of `recipes.RECIPES`, or "" for none. The recipe sets the gradients' dtypes for
        GEMMs in its forward dtype.
    """
    work = op.workload
    if isinstance(work, Permute):
        other = "permute" if work.direction == "unpermute" else "unpermute"
        return (Op(op.name, "backward", replace(work, direction=other), op.count),)
    if isinstance(work, Softmax | Attention):
        return (Op(op.name, "backward", replace(work, direction="backward"), op.count),)
    assert isinstance(work, Gemm | GroupedGemm), work
    dgrad = wgrad = work.dtype
    recipe = RECIPES.get(fp8_recipe)
    if recipe is not None and work.dtype == recipe.forward:
        dgrad = recipe.dgrad
        wgrad = recipe.wgrad
    # Layout of the data gradient's GEMM, and sides of the weight gradient, which is stored like b:
    # k×n, or n×k in layout nt.
    layout = "nt"
    height, width = (work.k, work.n)
    if work.layout == "nt":
        layout = "nn"
        height, width = (work.n, work.k)
    by_data = replace(work, n=work.k, k=work.n, dtype=dgrad, layout=layout)
    by_weight: Compute
    if isinstance(work, Gemm):
        by_weight = replace(work, m=height, n=width, k=work.m, dtype=wgrad, layout="tn")
    else:
        by_weight = replace(work, n=width, k=height, dtype=wgrad, layout="tn")
    return (Op(op.name, "dgrad", by_data, op.count), Op(op.name, "wgrad", by_weight, op.count))
