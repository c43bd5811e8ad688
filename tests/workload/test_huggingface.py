"""Configs of each family, cut to the keys that matter, as their repositories on Hugging Face have
them.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from foreign_texts import FALCON_7B, GEMMA_3_12B, LLAMA_3_70B

from quantbench.errors import InputError, QuantbenchError, UnsupportedError
from quantbench.workload.huggingface import LONGEST_DEFAULT_SEQ, describe
from quantbench.workload.presets import preset
from quantbench.workload.transformer import TransformerShape

LLAMA_2_7B: dict[str, Any] = {  # meta-llama/Llama-2-7b-hf, an old one without num_key_value_heads
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
FALCON_40B: dict[str, Any] = {  # tiiuae/falcon-40b
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 8192, "multi_query": True,
    "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
    "parallel_attn": True, "vocab_size": 65024,
}  # fmt: skip

FAMILIES: dict[str, tuple[dict[str, Any], TransformerShape]] = {
    "llama, all heads": (LLAMA_2_7B, preset("llama-2-7b")),
    "llama, grouped": (LLAMA_3_70B, preset("llama-3-70b")),
    "mistral": (
        {"model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
         "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 8, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000},
        preset("mistral-7b"),
    ),
    "gemma": (
        {"model_type": "gemma", "head_dim": 256, "hidden_act": "gelu", "hidden_size": 3072,
         "intermediate_size": 24576, "max_position_embeddings": 8192, "num_attention_heads": 16,
         "num_hidden_layers": 28, "num_key_value_heads": 16, "vocab_size": 256000},
        preset("gemma-7b"),
    ),
    "gemma3, nested and sparse": (
        GEMMA_3_12B,
        TransformerShape(hidden=3840, heads=16, kv_heads=8, head_dim=256, layers=48, ffn=15360, gated=True,
                         vocab=262208, seq=LONGEST_DEFAULT_SEQ, tied=True, sliding_window=1024),
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_ctx": 1024, "n_embd": 1600, "n_head": 25, "n_inner": None, "n_layer": 48,
         "n_positions": 1024, "vocab_size": 50257, "attn_pdrop": 0.1, "resid_pdrop": 0.1},
        preset("gpt2-xl"),
    ),
    "gpt_neox": (
        {"model_type": "gpt_neox", "hidden_act": "gelu_fast", "hidden_size": 6144, "intermediate_size": 24576,
         "max_position_embeddings": 2048, "num_attention_heads": 64, "num_hidden_layers": 44,
         "tie_word_embeddings": False, "vocab_size": 50432},
        replace(preset("gpt-neox-20b"), attention="flash"),
    ),
    "bloom": (
        {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880,
         "seq_length": 2048, "pretraining_tp": 4, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        replace(preset("bloom-176b"), dropout=False),
    ),
    "opt": (
        {"model_type": "opt", "activation_function": "relu", "ffn_dim": 36864, "hidden_size": 9216,
         "max_position_embeddings": 2048, "num_attention_heads": 72, "num_hidden_layers": 64, "vocab_size": 50272,
         "word_embed_proj_dim": 9216, "dropout": 0.1, "attention_dropout": 0.0},
        replace(preset("opt-66b"), attention="flash"),
    ),
    "falcon, grouped": (FALCON_40B, preset("falcon-40b")),
    "falcon, multi-query": (
        FALCON_7B,
        TransformerShape(hidden=4544, heads=71, kv_heads=1, layers=32, vocab=65024, seq=2048, tied=True),
    ),
    "falcon-40b, first published config": (
        {"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60,
         "vocab_size": 65024},
        preset("falcon-40b"),
    ),
    "gpt_bigcode": (
        {"model_type": "gpt_bigcode", "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576,
         "n_layer": 40, "n_positions": 8192, "vocab_size": 49152},
        TransformerShape(hidden=6144, heads=48, kv_heads=1, layers=40, ffn=24576, vocab=49152, seq=8192, tied=True),
    ),
    "mpt, grouped": (
        {"model_type": "mpt", "d_model": 4608, "expansion_ratio": 4, "max_seq_len": 4096, "n_heads": 48,
         "n_layers": 32, "vocab_size": 70400, "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 8}},
        TransformerShape(hidden=4608, heads=48, kv_heads=8, layers=32, vocab=70400, seq=4096, tied=True),
    ),
    "phi3": (
        {"model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
         "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
         "num_key_value_heads": 32, "tie_word_embeddings": False, "vocab_size": 32064},
        TransformerShape(hidden=3072, heads=32, layers=32, ffn=8192, gated=True, gate_fused=True, vocab=32064,
                         seq=4096, tied=False),
    ),
    "chatglm": (
        {"model_type": "chatglm", "hidden_size": 4096, "ffn_hidden_size": 13696, "kv_channels": 128,
         "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32, "num_layers": 28,
         "padded_vocab_size": 65024, "seq_length": 8192, "tie_word_embeddings": False},
        TransformerShape(hidden=4096, heads=32, kv_heads=2, layers=28, ffn=13696, gated=True, gate_fused=True,
                         vocab=65024, seq=8192, tied=False),
    ),
    "a model_type nobody has heard of, with SwiGLU": (
        {"model_type": "aquila9", "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2816,
         "num_attention_heads": 16, "num_hidden_layers": 4, "tie_word_embeddings": False, "vocab_size": 1000},
        TransformerShape(hidden=1024, heads=16, layers=4, ffn=2816, gated=True, vocab=1000, seq=2048, tied=False),
    ),
}  # fmt: skip


def written(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    config, shape = FAMILIES[family]
    assert describe(written(tmp_path, config)).shape == shape


def test_a_folder_and_a_string_do_as_well(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_2_7B)
    assert describe(str(tmp_path)).shape == preset("llama-2-7b")


def test_what_a_config_leaves_open_is_told(tmp_path: Path) -> None:
    long = {**LLAMA_3_70B, "max_position_embeddings": 131072}
    found = describe(written(tmp_path, long))
    assert found.assumed == {
        "seq": "seq = 8192 (cut from the config's context of 131072)", "dropout": "no dropout (the config names none)"
    }  # fmt: skip
    assert describe(written(tmp_path, {**LLAMA_3_70B, "attention_dropout": 0.0})).assumed == {}


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"sliding_window": 4096, "model_type": "qwen2"}, 0),
        ({"sliding_window": 4096, "model_type": "qwen2", "use_sliding_window": True}, 4096),
        ({"sliding_window": 512, "layer_types": ["full_attention"] * 80}, 0),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]}, 512),
    ],
)
def test_a_sliding_window_is_taken_where_layers_have_one(
    tmp_path: Path, keys: dict[str, Any], window: int
) -> None:
    assert describe(written(tmp_path, {**LLAMA_3_70B, **keys})).shape.sliding_window == window


@pytest.mark.parametrize(
    ("keys", "dropout"),
    [
        ({"attention_dropout": 0.1}, True),
        ({"attn_pdrop": 0.0, "resid_pdrop": 0.1}, True),
        ({"dropout": 0}, False),
    ],
)
def test_dropout_is_taken_from_the_config(
    tmp_path: Path, keys: dict[str, Any], dropout: bool
) -> None:
    assert describe(written(tmp_path, {**LLAMA_3_70B, **keys})).shape.dropout is dropout


def test_a_dropout_that_is_no_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"attention_dropout = 2; expected a share from 0 to 1"):
        describe(written(tmp_path, {**LLAMA_3_70B, "attention_dropout": 2}))


DEEPSEEK_V3: dict[str, Any] = {  # deepseek-ai/DeepSeek-V3
    "model_type": "deepseek_v3", "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "n_group": 8, "topk_group": 4,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_attention_heads": 128,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "tie_word_embeddings": False, "vocab_size": 129280,
}  # fmt: skip
MAVERICK: dict[str, Any] = {  # meta-llama/Llama-4-Maverick-17B-128E-Instruct
    "model_type": "llama4", "text_config": {
        "model_type": "llama4_text", "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 2, "num_local_experts": 128, "head_dim": 128,
        "num_experts_per_tok": 1, "num_attention_heads": 40, "num_key_value_heads": 8, "num_hidden_layers": 48,
        "vocab_size": 202048, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "total", "active", "dense"),
    # billions of parameters as their model cards state them, without the drafting layer of
    # DeepSeek-V3
    [(DEEPSEEK_V3, 671, 37, 3), (MAVERICK, 400, 17, 24)],
)
def test_layers_with_and_without_experts_add_up_to_the_published_parameters(
    tmp_path: Path, config: dict[str, Any], total: float, active: float, dense: int
) -> None:
    shape = describe(written(tmp_path, config)).shape
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.005)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert (shape.dense_layers, shape.dense_spread) == (dense, config is MAVERICK)


def test_the_config_of_deepseek_is_its_preset(tmp_path: Path) -> None:
    assert replace(describe(written(tmp_path, DEEPSEEK_V3)).shape, seq=4096) == preset(
        "deepseek-v3"
    )
    anywhere = describe(written(tmp_path, {**DEEPSEEK_V3, "n_group": 1, "topk_group": 1})).shape
    assert (anywhere.expert_groups, anywhere.top_groups) == (0, 0)


def test_latent_attention_has_its_products_and_as_many_flops_of_attention(tmp_path: Path) -> None:
    ops = {
        op.name: op
        for op in replace(describe(written(tmp_path, DEEPSEEK_V3)).shape, tp=8).ops(backward=False)
    }
    expected = {"latent_down": (2112, 7168), "q_up": (3072, 1536), "kv_up": (4096, 512)}
    assert {name: (ops[name].workload.n, ops[name].workload.k) for name in expected} == expected
    attention = ops["attention"].workload
    # Keys of 192 and values of 128, no two of the 16 heads on a GPU share them.
    assert attention.flops == 2 * 16 * (8192 * 8193 // 2) * (192 + 128)
    assert (attention.heads, attention.kv_heads) == (16, 16)
    assert (ops["mlp_down"].count, ops["experts_down"].count) == (3, 58)


def without(config: dict[str, Any], left_out: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != left_out}


def test_linear_attention_is_described_if_it_is_asked_for(tmp_path: Path) -> None:
    layers = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_value_head_dim": 64,
    }
    path = written(tmp_path, {**LLAMA_3_70B, **layers})
    with pytest.raises(UnsupportedError, match="linear_num_key_heads, linear-attention layers"):
        describe(path)
    found = describe(path, hybrid=True)
    assert found.shape == describe(written(tmp_path, LLAMA_3_70B)).shape
    assert found.linear is not None
    # On 4 GPUs: 4 heads each of queries and keys of 128, 16 heads of values of 64 and their gates.
    products = {(2 * 4 * 128 + 2 * 16 * 64, 8192), (2 * 16, 8192), (8192, 16 * 64)}
    assert found.linear.cut(4).products == products


REFUSED: dict[str, tuple[object, type[QuantbenchError], str]] = {
    "experts of an unknown model": (
        {**LLAMA_3_70B, "num_local_experts": 8},
        UnsupportedError,
        "8 experts of model_type = 'llama'; expected one of deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe, "
        "glm_moe_dsa, gpt_oss, kimi_k2, llama4_text, minimax_m2, mixtral, qwen2_moe, qwen3_5_moe_text, "
        "qwen3_moe, qwen3_vl_moe_text, "
        "whose layers are known",
    ),
    "a part of latent attention": (
        without(DEEPSEEK_V3, "v_head_dim"),
        InputError,
        "no key 'v_head_dim'; expected an integer under v_head_dim",
    ),
    "another part of latent attention": (
        without(DEEPSEEK_V3, "kv_lora_rank"),
        InputError,
        "no key 'kv_lora_rank'; expected an integer under kv_lora_rank",
    ),
    "groups of experts alone": (
        without(DEEPSEEK_V3, "topk_group"),
        InputError,
        "no key 'topk_group'; expected an integer under topk_group",
    ),
    "more groups than there are": (
        {**DEEPSEEK_V3, "topk_group": 9},
        InputError,
        "topk_group = 9; expected at most n_group = 8",
    ),
    "nothing": ({}, InputError, "no key 'model_type'; expected a decoder's config.json: model_type, hidden_size, …"),
    "state space": (
        {"model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64, "state_size": 16, "vocab_size": 50280},
        UnsupportedError,
        "state_size, state-space layers; expected decoder layers of attention and an MLP or experts",
    ),
    "linear attention": (
        {**LLAMA_3_70B, "layer_types": ["linear_attention", "full_attention"]},
        UnsupportedError,
        "layer_types with 'linear_attention'; expected decoder layers of attention and an MLP or experts",
    ),
    "encoder and decoder": (
        {**LLAMA_3_70B, "model_type": "t5", "is_encoder_decoder": True},
        UnsupportedError,
        "is_encoder_decoder = true; expected a decoder-only model",
    ),
    "opt-350m": (
        {"model_type": "opt", "ffn_dim": 4096, "hidden_size": 1024, "max_position_embeddings": 2048,
         "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 50272, "word_embed_proj_dim": 512},
        UnsupportedError,
        "word_embed_proj_dim = 512, embeddings narrower than the layers; expected word_embed_proj_dim equal to "
        "hidden_size",
    ),
    "no hidden size": (
        {"model_type": "llama", "num_attention_heads": 32},
        InputError,
        "no key 'hidden_size'; expected an integer under hidden_size (or n_embd, n_embed, d_model)",
    ),
    "no MLP width": (
        without(LLAMA_2_7B, "intermediate_size"),
        InputError,
        "no key 'intermediate_size'; expected an integer under intermediate_size (or ffn_hidden_size, ffn_dim, "
        "n_inner)",
    ),
    "a number in quotes": (
        {**LLAMA_2_7B, "num_hidden_layers": "32"},
        InputError,
        "num_hidden_layers = '32'; expected an integer of at least 1",
    ),
    "heads per layer": (
        {**LLAMA_2_7B, "num_attention_heads": [12, 16]},
        InputError,
        "num_attention_heads = [12, 16]; expected an integer of at least 1",
    ),
    "heads that do not divide hidden": (
        {**LLAMA_2_7B, "num_attention_heads": 30},
        InputError,
        "hidden = 4096 with heads = 30; expected hidden divisible by heads, best into multiples of 8: 4080 or 4320",
    ),
    "a list": ([1, 2], InputError, "a JSON list; expected a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_clear_line(tmp_path: Path, case: str) -> None:
    config, kind, message = REFUSED[case]
    path = written(tmp_path, config)
    with pytest.raises(kind) as caught:
        describe(path)
    assert str(caught.value) == f"config {path}: {message}"


def test_an_unknown_mlp_is_not_guessed(tmp_path: Path) -> None:
    path = written(tmp_path, {**LLAMA_2_7B, "model_type": "newllm", "hidden_act": "gelu"})
    with pytest.raises(UnsupportedError) as caught:
        describe(path)
    assert str(caught.value).startswith(
        f"config {path}: model_type = 'newllm' with hidden_act = 'gelu', of which it is not known whether its MLP is"
        " gated; expected hidden_act silu, or one of RefinedWeb, "
    )
