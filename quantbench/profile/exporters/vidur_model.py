"""What Vidur calls models and machines, and what one GPU computes of a model there.

Source: vidur/config/{model,device_sku,node_sku}_config.py of Vidur 0.0.26, and data/profiling/ of its source tree. Its
own vocabulary sizes are kept, for its loader only takes rows that state them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantbench.errors import InputError
from quantbench.importers.vidur import GEMM_OPS
from quantbench.profile.exporters.options import WHO
from quantbench.workload import Gemm, TransformerShape
from quantbench.workload.presets import preset

#: preset → (name in the release, folder in the source tree, vocab_size, max_model_len)
MODELS = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf", 32768, 4096),
    "llama-2-70b": ("meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-70b-hf", 32768, 4096),
    "llama-3-8b": ("meta-llama/Llama-3-8B", "meta-llama/Meta-Llama-3-8B", 128256, 4096),
    "llama-3-70b": ("meta-llama/Llama-3-70B", "meta-llama/Meta-Llama-3-70B", 128256, 8192),
}
#: device slug → (device_sku, node sku). Others get their slug, which Vidur must be taught first.
_SKUS = {
    "a100-sxm4-80gb": ("a100", "a100_dgx"), "h100-sxm5-80gb": ("h100", "h100_dgx"), "l40-48gb": ("l40", "l40_pcie"),
    "a40-48gb": ("a40", "a40_pairwise_nvlink"),
}  # fmt: skip


@dataclass(frozen=True)
class VidurModel:
    """A model as Vidur keys its rows. name, source_name: in the release and in the source tree; vocab, max_model_len:
    Vidur's own."""

    name: str
    source_name: str
    shape: TransformerShape
    vocab: int
    max_model_len: int

    @classmethod
    def of(cls, text: str) -> VidurModel:
        """A preset that Vidur has too. Raises InputError for others."""
        if text not in MODELS:
            given = f"--model {text}" if text else "no --model (a row is of one model there)"
            raise InputError(WHO, given, "one of " + ", ".join(MODELS))
        name, source_name, vocab, max_model_len = MODELS[text]
        shape = preset(text)
        return cls(name, source_name, replace(shape, gate_fused=shape.gated), vocab, max_model_len)

    def keys(self, tp: int) -> dict[str, int | bool]:
        """The columns by which mlp.csv's rows are found."""
        shape = self.shape
        return {
            "n_head": shape.heads, "n_kv_head": shape.kv_heads, "n_embd": shape.hidden, "n_expanded_embd": shape.ffn,
            "vocab_size": self.vocab, "use_gated_mlp": shape.gated, "num_tensor_parallel_workers": tp,
        }  # fmt: skip

    def products(self, tokens: int, tp: int) -> dict[str, Gemm]:
        """Vidur's op → the product that one GPU runs for it."""
        names = {ours: theirs for theirs, ours in GEMM_OPS.items()} | {"mlp_up_gate": "mlp_up_proj"}
        shape = replace(self.shape, seq=tokens, mbs=1, tp=tp)
        return {
            names[op.name]: op.workload
            for op in shape.ops(backward=False)
            if op.name in names and isinstance(op.workload, Gemm)
        }

    def heads(self, tp: int) -> tuple[int, int]:
        """(query heads, key/value heads) of one GPU."""
        return self.shape.heads // tp, replace(self.shape, tp=tp).kv_heads_per_gpu

    def passes_bytes(self, tokens: int, tp: int) -> dict[str, int]:
        """Vidur's op → bytes that it reads and writes in 16-bit elements, for ops that are no product: what memory
        alone decides. Norms, residuals and the embedding run whole on every GPU."""
        shape, width = self.shape, 2
        rotated = sum(self.heads(tp)) * shape.head_dim
        hidden, ffn = shape.hidden, shape.ffn // tp
        per_token = {
            "emb": 2 * hidden, "input_layernorm": 2 * hidden, "post_attention_layernorm": 2 * hidden,
            "attn_rope": 2 * rotated, "mlp_act": (3 if shape.gated else 2) * ffn, "add": 3 * hidden,
        }  # fmt: skip
        return {op: tokens * elements * width for op, elements in per_token.items()}


def skus(slug: str) -> tuple[str, str]:
    """(device_sku, network sku) of a device."""
    return _SKUS.get(slug, (slug.replace("-", "_"), slug.replace("-", "_")))


def has_sku(slug: str) -> bool:
    """Whether Vidur 0.0.26 knows the device."""
    return slug in _SKUS
