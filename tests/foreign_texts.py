"""Texts as other programs write them: model configurations, tables and training logs."""

from typing import Any

LLAMA_3_70B: dict[str, Any] = {  # meta-llama/Meta-Llama-3-70B
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 28672,
    "max_position_embeddings": 8192, "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8,
    "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip

FALCON_7B: dict[str, Any] = {  # tiiuae/falcon-7b: num_kv_heads is there and is not used
    "model_type": "falcon", "hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False,
    "num_attention_heads": 71, "num_hidden_layers": 32, "num_kv_heads": 71, "vocab_size": 65024,
}  # fmt: skip

GEMMA_3_12B: dict[str, Any] = {  # google/gemma-3-12b-it: head_dim and vocab_size are left to the config class
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "text_config": {
        "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16},
}  # fmt: skip

# The two lines of the documents, in full.
MS_LINE = (
    "[default7]: iteration 2/ 250000 | consumed samples: 384 | consumed tokens: 786432 | elapsed time per iteration "
    "(ms): 5350.0 | learning rate: 3.000E-07 | global batch size: 192 | lm loss: 1.119602E+01 | grad norm: 18.118 | "
    "num zeros: 0.0 | actual seq length: 2048 | number of skipped iterations: 0 | number of nan iterations: 0 | "
    "samples per second: 35.888 | TFLOPs: 48.77 |"
)


S_LINE = (
    " iteration        2/   95367 | consumed samples:         4096 | consumed tokens:      8388608 | elapsed time per "
    "iteration (s): 769.99 | learning rate: 3.787E-06 | global batch size:  2048 | lm loss: 6.384045E+01 | loss "
    "scale: 4096.0 | grad norm: 15906.210 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan "
    "iterations:   0 | samples per second: 2.660 | TFLOPs: 108.47 |"
)


def log_line(
    iteration: int, *, elapsed: object = 5350.0, loss: object = 2.5, prefix: str = "[default7]: "
) -> str:
    return (
        f"{prefix}iteration {iteration:8d}/  250000 | consumed samples: {192 * iteration:12d} | consumed tokens: "
        f"{192 * 2048 * iteration:14d} | elapsed time per iteration (ms): {elapsed} | learning rate: 3.000E-07 | "
        f"global batch size:   192 | lm loss: {loss} | number of skipped iterations:   0 | number of nan "
        "iterations:   0 | samples per second: 35.888 | TFLOPs: 48.77 |"
    )
