"""Reads the shape of a model from its Hugging Face config.json.

`describe` is the entry point. Model families use different keys for the same dimension. Properties
without a key, such as a gated MLP, follow from the model_type, as in Hugging Face transformers.
If the config has no context length or dropout, `describe` assumes a value and reports the
assumption.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from quantbench.errors import InputError, UnsupportedError
from quantbench.files import read_json, reason
from quantbench.workload.transformer import TransformerShape

# Largest sequence length that `describe` takes from a config. A config gives the model's longest
# context, up to millions of tokens, which training and serving rarely use.
LONGEST_DEFAULT_SEQ = 8192
# Largest file to read, in bytes. A config has a few kilobytes; much larger files are weights or
# tokenizers.
_LARGEST_BYTES = 2**24

# Alternative keys for each dimension, in order of preference.
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "attn_config.kv_n_heads",
)
_HEAD_DIM = ("head_dim", "kv_channels")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_FFN = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
_VOCAB = ("padded_vocab_size", "vocab_size")
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_DROPOUT = (
    "attention_dropout", "attn_pdrop", "hidden_dropout", "resid_pdrop", "resid_dropout", "dropout",
    "attn_config.attn_pdrop",
)  # fmt: skip
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERT_STEP = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")

# Keys of layers other than attention with an MLP or experts, and a description of these layers. A
# config in which such a key has a value is refused.
_OTHER_LAYERS = {
    "moe_num_experts": "experts of an unknown kind",
    "ffn_config.moe_num_experts": "experts of an unknown kind",
    "block_configs": "layers of different shapes",
    "cross_attention_layers": "cross-attention layers",
    "num_kv_shared_layers": "layers that share keys and values",
    "state_size": "state-space layers",
    "ssm_cfg": "state-space layers",
    "mamba_d_state": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "lru_width": "recurrent layers",
    "hybrid_override_pattern": "layers of different kinds, mostly state-space ones",
    "linear_num_key_heads": "linear-attention layers",
}
#: Keys of linear-attention layers without their prefix "linear_", in the order of
#: `LinearAttention`'s fields after hidden.
_LINEAR = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
_KNOWN_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
_DENSE = "decoder layers of attention and an MLP or experts"


@dataclass(frozen=True)
class _Family:
    """Properties of a model_type that a config may omit.

    gated: whether the MLP has a gate.
    gate_fused: whether the weights have the MLP's gate and up projections as one matrix.
    tied: whether embedding and logits share one matrix if the config lacks tie_word_embeddings.
    default_ffn: whether the MLP width is 4·hidden if the config lacks it.
    windowed: whether sliding_window applies if the config lacks use_sliding_window.
    attention: attention implementation, one of ATTENTIONS.
    experts: whether layers with experts are supported.
    defaults: values for keys that a config may omit; None for no defaults.
    """

    gated: bool
    gate_fused: bool = False
    tied: bool = False
    default_ffn: bool = False
    windowed: bool = True
    attention: str = "flash"
    experts: bool = False
    defaults: Mapping[str, int] | None = None


# Common families: models with a gated MLP, GPT-2 and its relatives, and models with a plain MLP.
_SWIGLU = _Family(gated=True)
_GPT = _Family(gated=False, tied=True, default_ffn=True)
_PLAIN = _Family(gated=False)
_GEMMA = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
}
_GEMMA2 = {**_GEMMA, "num_attention_heads": 8, "num_key_value_heads": 4}

_FAMILIES = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "stablelm", "olmo", "olmo2", "olmo3", "granite",
         "internlm2", "internlm3", "baichuan", "exaone4", "smollm3", "seed_oss", "deepseek_llm",
         "helium"),
        _SWIGLU,
    ),
    # The window of these models applies only if the config sets use_sliding_window to true.
    **dict.fromkeys(("qwen2", "qwen3"), _Family(gated=True, windowed=False)),
    **dict.fromkeys(
        ("mixtral", "minimax_m2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2",
        "glm4_moe",
        "glm_moe_dsa", "gpt_oss",
         "llama4_text"),
        _Family(gated=True, experts=True),
    ),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_5_moe_text"),
    _Family(gated=True, windowed=False, experts=True)),
    **dict.fromkeys(("cohere", "cohere2"), _Family(gated=True, tied=True)),
    **dict.fromkeys(("phi3", "glm", "glm4", "chatglm"), _Family(gated=True, gate_fused=True)),
    "gemma": _Family(gated=True, tied=True, defaults=_GEMMA),
    "gemma2": _Family(gated=True, tied=True, defaults=_GEMMA2),
    # Published multimodal configs omit most of these keys.
    "gemma3_text": _Family(
        gated=True, tied=True,
        defaults={**_GEMMA2, "vocab_size": 262208, "max_position_embeddings": 131072}
    ),
    **dict.fromkeys(("gpt2", "gpt_neo", "gpt_bigcode", "mpt"), _GPT),
    # Attention is unfused, because Megatron-DeepSpeed (in training) and transformers add ALiBi to
    # the scores in memory.
    "bloom": _Family(gated=False, tied=True, default_ffn=True, attention="unfused"),
    **dict.fromkeys(("falcon", "RefinedWeb", "RefinedWebModel"), _GPT),
    **dict.fromkeys(("gptj", "codegen"), _Family(gated=False, default_ffn=True)),
    "opt": _Family(gated=False, tied=True),
    "starcoder2": _Family(gated=False, tied=True),
    **dict.fromkeys(("gpt_neox", "phi", "persimmon", "nemotron", "arcee"), _PLAIN),
}  # fmt: skip


@dataclass(frozen=True, order=True)
class LinearAttention:
    """Linear-attention layers on one GPU: gated delta networks, as in Qwen3.5.

    key_dim, value_dim: widths of one head.
    conv_width: number of tokens that the causal convolution before the recurrence sees.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def cut(self, tp: int) -> "LinearAttention":
        """Returns one GPU's part of the layers.

        tp: tensor-parallel degree, which divides the heads.
        """
        return replace(self, key_heads=self.key_heads // tp, value_heads=self.value_heads // tp)

    @property
    def values(self) -> int:
        """Width of the values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution: the widths of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def products(self) -> set[tuple[int, int]]:
        """(n, k) of the GEMMs: inputs with the output gate, two scalars per value head, output."""
        inputs = (self.channels + self.values, self.hidden)
        return {inputs, (2 * self.value_heads, self.hidden), (self.hidden, self.values)}


@dataclass(frozen=True)
class Described:
    """Shape of a model, and the assumptions that were made for it.

    assumed: text of each assumption, by name of the shape's field.
    name: name of the model, for messages.
    linear: linear-attention layers, which `shape` cannot represent; None for none.
    """

    shape: TransformerShape
    assumed: Mapping[str, str]
    name: str = "the config"
    linear: LinearAttention | None = None


def describe(path: str | PathLike[str], *, hybrid: bool = False) -> Described:
    """Reads a model's shape for one sample on one GPU.

    The sequence length is the model's context, but at most LONGEST_DEFAULT_SEQ tokens. The dtype of
    the stored weights is ignored.

    path: a config.json, or the folder that contains it.
    hybrid: whether to accept linear-attention layers.

    Raises InputError for a file that cannot be read, and for a missing or invalid value. Raises
    UnsupportedError for layers other than attention with an MLP or experts, such as state-space
    layers.
    """
    file = Path(path)
    if os.path.isdir(path):
        file /= "config.json"
    config = _Config(file, _read(file))
    linear = _linear_attention(config) if hybrid else None
    _refuse_other_layers(config, linear)
    family = _family(config)
    hidden = config.integer(_HIDDEN)
    heads = config.integer(_HEADS)
    context = config.optional(_CONTEXT)
    assumed: dict[str, str] = {}
    seq = min(context or TransformerShape.seq, LONGEST_DEFAULT_SEQ)
    if context is None:
        assumed["seq"] = f"seq = {seq} (the config names no context)"
    elif seq < context:
        assumed["seq"] = f"seq = {seq} (cut from the config's context of {context})"
    dropout = _dropout(config)
    if dropout is None:
        assumed["dropout"] = "no dropout (the config names none)"
    try:
        shape = TransformerShape(
            hidden=hidden,
            heads=heads,
            kv_heads=_kv_heads(config, heads),
            ffn=_ffn(config, family, hidden),
            gated=family.gated,
            gate_fused=family.gate_fused,
            seq=seq,
            vocab=config.integer(_VOCAB),
            tied=config.flag("tie_word_embeddings", family.tied),
            layers=config.integer(_LAYERS),
            attention=family.attention,
            dropout=bool(dropout),
            sliding_window=_sliding_window(config, family),
            **_latent(config),
            **_experts(config, family),
        )
    except InputError as error:
        if error.operation == config.who:
            raise
        raise InputError(config.who, error.value, error.expected) from None
    return Described(shape, assumed, linear=linear)


class _Config:
    """Reads a config's values by key, with the model_type's defaults for missing keys.

    Dots in a key select nested objects. Errors name the file and the key.

    who: text that names the file, for error messages.
    """

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.who = f"config {file}"
        self.values = values
        nested = values.get("text_config")
        # Configs of multimodal models have the decoder's shape in text_config.
        if isinstance(nested, dict) and "hidden_size" not in values:
            self.values = nested
        self.model_type = str(self.values.get("model_type", values.get("model_type", "")))
        self._defaults = _FAMILIES.get(self.model_type, _PLAIN).defaults or {}

    def get(self, key: str) -> Any:
        """Returns the value of a key, or else the model_type's default, or else None."""
        value: Any = self.values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            return self._defaults.get(key)
        return value

    def optional(self, keys: tuple[str, ...]) -> int | None:
        """Returns the value of the first key that is present, or None if no key is present.

        keys: alternative keys, in order of preference.

        Raises InputError for a value that is not an integer of at least 1.
        """
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(self.who, f"{key} = {value!r}"[:120], "an integer of at least 1")
            return value
        return None

    def integer(self, keys: tuple[str, ...]) -> int:
        """Like `optional`, but raises InputError if no key is present."""
        value = self.optional(keys)
        if value is None:
            expected = f"an integer under {keys[0]}"
            if len(keys) > 1:
                expected += f" (or {', '.join(keys[1:])})"
            raise InputError(self.who, f"no key {keys[0]!r}", expected)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Returns a key's boolean, or `default` for a missing key.

        Raises InputError for a value that is no boolean.
        """
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(self.who, f"{key} = {value!r}"[:120], "true or false")
        return value


def _read(file: Path) -> Mapping[str, Any]:
    """Reads the JSON object in a file. Raises InputError if the file has no JSON object."""
    who = f"config {file}"
    try:
        values = read_json(file, most_bytes=_LARGEST_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(who, reason(error)[:120], "a config.json that can be read") from None
    if not isinstance(values, dict):
        raise InputError(who, f"a JSON {type(values).__name__}", "a JSON object")
    return values


def _linear_attention(config: _Config) -> LinearAttention | None:
    """Returns the config's linear-attention layers, or None if it has none."""
    if not config.get(f"linear_{_LINEAR[0]}"):
        return None
    sizes = [config.integer((f"linear_{name}",)) for name in _LINEAR]
    return LinearAttention(config.integer(_HIDDEN), *sizes)


def _refuse_other_layers(config: _Config, linear: LinearAttention | None) -> None:
    """Raises UnsupportedError for layers that are not attention with an MLP or experts.

    linear: linear-attention layers, which are then accepted; None to refuse them.
    """
    accepted = [f"linear_{_LINEAR[0]}", "linear_attention"] if linear else []
    for key, meaning in _OTHER_LAYERS.items():
        if config.get(key) and key not in accepted:
            raise UnsupportedError(config.who, f"{key}, {meaning}", _DENSE)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        for kind in kinds:
            if kind not in _KNOWN_LAYERS and kind not in accepted:
                raise UnsupportedError(config.who, f"layer_types with {kind!r}", _DENSE)
    if config.flag("is_encoder_decoder", False):
        raise UnsupportedError(config.who, "is_encoder_decoder = true", "a decoder-only model")
    projected = config.optional(("word_embed_proj_dim",))
    if projected is not None and projected != config.optional(_HIDDEN):
        what = f"word_embed_proj_dim = {projected}, embeddings narrower than the layers"
        raise UnsupportedError(config.who, what, "word_embed_proj_dim equal to hidden_size")


def _family(config: _Config) -> _Family:
    """Returns the model_type's family. For an unknown model_type, the activation decides.

    Raises InputError if the config has neither a model_type nor an activation. Raises
    UnsupportedError if the activation does not determine whether the MLP has a gate.
    """
    known = _FAMILIES.get(config.model_type)
    if known is not None:
        return known
    activation = config.get("hidden_act") or config.get("hidden_activation")
    if not config.model_type and not activation:
        expected = "a decoder's config.json: model_type, hidden_size, …"
        raise InputError(config.who, "no key 'model_type'", expected)
    if activation in ("silu", "swish"):
        # All known decoders with this activation have a gate (SwiGLU). Configs omit default values,
        # and the default of tie_word_embeddings is true in Hugging Face transformers.
        return _Family(gated=True, tied=True)
    what = f"model_type = {config.model_type!r} with hidden_act = {activation!r}"
    expected = "hidden_act silu, or one of " + ", ".join(sorted(_FAMILIES))
    unknown = "of which it is not known whether its MLP is gated"
    raise UnsupportedError(config.who, f"{what}, {unknown}", expected)


def _kv_heads(config: _Config, heads: int) -> int:
    """Returns the number of key/value heads, which is `heads` without grouped-query attention."""
    if config.model_type in ("falcon", "RefinedWeb", "RefinedWebModel"):
        # Falcon's old architecture ignores num_kv_heads. The first published 40B config
        # (RefinedWeb) has only n_head_kv.
        grouped = config.flag("new_decoder_architecture", config.model_type == "RefinedWeb")
        if grouped:
            return config.optional(("num_kv_heads", "n_head_kv")) or heads
        return 1 if config.flag("multi_query", True) else heads
    if config.flag("multi_query", config.model_type == "gpt_bigcode"):
        return 1
    if config.get("attn_config.attn_type") == "multiquery_attention":  # MPT
        return 1
    if config.model_type == "chatglm" and not config.flag("multi_query_attention", False):
        return heads
    return config.optional(_KV_HEADS) or heads


def _dropout(config: _Config) -> bool | None:
    """Returns whether any dropout rate is above 0, or None if the config has no rate."""
    found = None
    for key in _DROPOUT:
        rate = config.get(key)
        if rate is None:
            continue
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise InputError(config.who, f"{key} = {rate!r}"[:120], "a share from 0 to 1")
        found = found or rate > 0
    return found


def _sliding_window(config: _Config, family: _Family) -> int:
    """Returns the attention window in tokens, or 0 if no layer has one."""
    if not config.flag("use_sliding_window", family.windowed):
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        return 0
    return config.optional(("sliding_window",)) or 0


def _latent(config: _Config) -> dict[str, Any]:
    """Returns the shape's head_dim, and for latent attention also the shape's latent widths."""
    if not any(config.get(key) for key in _LATENT):
        return {"head_dim": config.optional(_HEAD_DIM) or 0}
    kv_rank = config.integer(("kv_lora_rank",))
    rope_dim = config.integer(("qk_rope_head_dim",))
    return {
        "head_dim": rope_dim + config.integer(("qk_nope_head_dim",)),
        "q_rank": config.optional(("q_lora_rank",)) or 0,
        "kv_rank": kv_rank,
        "rope_dim": rope_dim,
        "value_dim": config.integer(("v_head_dim",)),
    }


def _experts(config: _Config, family: _Family) -> dict[str, Any]:
    """Returns the shape's fields for experts and dense layers; {} for a model without experts."""
    experts = config.optional(_EXPERTS) or 1
    if experts == 1:
        return {}
    if not family.experts:
        what = f"{experts} experts of model_type = {config.model_type!r}"
        known = ", ".join(sorted(name for name in _FAMILIES if _FAMILIES[name].experts))
        raise UnsupportedError(config.who, what, f"one of {known}, whose layers are known")
    layers = config.integer(_LAYERS)
    width = config.optional(("moe_intermediate_size",)) or config.integer(_FFN)
    sparse = _sparse_layers(config, layers)
    shared = config.get("shared_expert_intermediate_size")
    if not shared:
        shared = width * (config.get("n_shared_experts") or 0)
    if config.model_type == "llama4_text":  # one expert of the same width runs for every token
        shared = width
    groups = config.optional(("n_group",)) or 1
    top = config.optional(("topk_group",)) or 1
    if groups > 1:
        top = config.integer(("topk_group",))
    if top > groups:
        raise InputError(config.who, f"topk_group = {top}", f"at most n_group = {groups}")
    # Groups of experts do not restrict a token that may use all groups.
    if top == groups:
        groups = top = 0
    return {
        "expert_groups": groups,
        "top_groups": top,
        "experts": experts,
        "top_k": config.integer(_TOP_K),
        "moe_ffn": width,
        "shared_ffn": shared,
        "dense_layers": layers - len(sparse),
        "dense_spread": sparse != list(range(layers - len(sparse), layers)),
    }


def _sparse_layers(config: _Config, layers: int) -> list[int]:
    """Returns the indices of the layers that have experts, ascending.

    If the config has the list `moe_layers`, that list is returned. Otherwise, the layers from
    first_k_dense_replace on have experts, without those in mlp_only_layers. With a step
    (_EXPERT_STEP), only every step-th layer has experts.
    """
    listed = config.get("moe_layers")
    if isinstance(listed, list):
        return sorted(map(int, listed))
    every = config.optional(_EXPERT_STEP) or 1
    first = config.get("first_k_dense_replace") or 0
    dense = {int(i) for i in config.get("mlp_only_layers") or ()}
    # moe_layer_freq (DeepSeek) counts layers from 0, and the other keys count from 1.
    offset = 0 if config.get("moe_layer_freq") else 1
    wanted = [i for i in range(layers) if i >= first and i not in dense]
    return [i for i in wanted if (i + offset) % every == 0]


def _ffn(config: _Config, family: _Family, hidden: int) -> int:
    """Returns the width of the MLP in layers without experts."""
    # Llama 4 uses intermediate_size for experts, and intermediate_size_mlp for other layers. The
    # config of a model with experts in all layers may have only the experts' width.
    width = config.optional(("intermediate_size_mlp", *_FFN, "moe_intermediate_size"))
    if width is not None:
        return width
    ratio = config.get("expansion_ratio")
    if ratio is not None:
        number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if not number or ratio <= 0 or (ratio * hidden) % 1:
            what = f"expansion_ratio = {ratio!r}"[:120]
            raise InputError(config.who, what, "a ratio that gives a whole MLP width")
        return int(ratio * hidden)
    if family.default_ffn:
        return 4 * hidden
    return config.integer(_FFN)
