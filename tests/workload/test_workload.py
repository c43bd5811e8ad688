"""FLOPs, bytes and the ops of a transformer, by hand and by published formulas."""

import json
from dataclasses import replace

import jsonschema
import pytest

from quantbench.errors import InputError
from quantbench.store.schema import schema
from quantbench.store.typed import decode, encode
from quantbench.workload import (
    Attention,
    Collective,
    Gemm,
    GroupedGemm,
    MoE,
    Op,
    Permute,
    Softmax,
    TransformerShape,
)


def test_bytes_of_block_scaled_products() -> None:
    # a: 256×512, b: 512×384. fp8_block: a scale of 4 bytes for 1×128 of a and 128×128 of b; mxfp4:
    # half a byte and a scale of 1 byte for 32 elements.
    a, b, out = 256 * 512, 512 * 384, 2 * 256 * 384
    assert Gemm(256, 384, 512, dtype="fp8_block").min_bytes == a + b + 4 * (256 * 4 + 4 * 3) + out
    assert Gemm(256, 384, 512, dtype="mxfp4").min_bytes == (a + b) // 2 + (a + b) // 32 + out
    assert Gemm(256, 384, 512, dtype="nvfp4").min_bytes == (a + b) // 2 + (a + b) // 16 + out
    assert Gemm(256, 384, 512, dtype="mxfp8").min_bytes == a + b + (a + b) // 32 + out


def test_gemm_work_by_hand() -> None:
    gemm = Gemm(m=2, n=3, k=4, batch=5, dtype="fp32")
    assert gemm.flops == 2 * 2 * 3 * 4 * 5
    assert gemm.min_bytes == 4 * 5 * (2 * 4 + 4 * 3 + 2 * 3)


@pytest.mark.parametrize(
    ("dtype", "bytes_in", "bytes_out"), [("fp8", 1, 2), ("int8", 1, 4), ("tf32", 4, 4)]
)
def test_narrow_inputs_are_written_wider(dtype: str, bytes_in: int, bytes_out: int) -> None:
    gemm = Gemm(m=16, n=32, k=64, dtype=dtype)
    assert gemm.min_bytes == bytes_in * (16 * 64 + 64 * 32) + bytes_out * 16 * 32


def test_softmax_work_by_hand() -> None:
    causal = Softmax(batch=2, rows=4, cols=4, dtype="fp16")
    assert causal.unmasked_elements == 2 * 10
    assert causal.min_bytes == 2 * (2 * 10 + 2 * 16)  # live elements are read, all are written
    masked = Softmax(batch=6, rows=4, cols=8, dtype="fp16", mask="full", mask_batch=3)
    assert masked.min_bytes == 2 * (2 * 6 * 32) + 3 * 32  # and a byte for each element of the mask
    backward = Softmax(batch=2, rows=4, cols=4, dtype="fp16", direction="backward")
    assert backward.min_bytes == 2 * (2 * 20 + 2 * 16)  # y and its gradient are read


def test_attention_work_by_hand() -> None:
    full = Attention(batch=1, heads=4, kv_heads=2, seq_q=8, seq_k=16, head_dim=32, causal=False)
    assert full.flops == 4 * (4 * 8 * 16) * 32
    assert full.min_bytes == 2 * (2 * 4 * 8 * 32 + 2 * 2 * 16 * 32) + 4 * 4 * 8
    causal = Attention(batch=1, heads=1, seq_q=4, seq_k=4, head_dim=8)
    assert causal.flops == 4 * 10 * 8
    backward = Attention(batch=1, heads=1, seq_q=4, seq_k=4, head_dim=8, direction="backward")
    assert backward.flops * 2 == causal.flops * 5


def forward_ops(shape: TransformerShape) -> dict[str, object]:
    return {op.name: op.workload for op in shape.ops(backward=False)}


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_layer_does_the_flops_of_the_megatron_formula(tp: int) -> None:
    # Narayanan et al. 2021 (arXiv 2104.04473), appendix: a layer's forward pass is 24·B·s·h² +
    # 4·B·s²·h, the logits 2·B·s·h·V; the backward pass is twice that. Spread over tp GPUs.
    h, s, b, layers, v = 4096, 2048, 2, 3, 51200
    shape = TransformerShape(
        hidden=h,
        heads=32,
        seq=s,
        vocab=v,
        layers=layers,
        mbs=b,
        tp=tp,
        attention="unfused",
        causal=False,
    )
    products = [op for op in shape.ops() if isinstance(op.workload, Gemm)]
    forward = sum(op.workload.flops * op.count for op in products if op.phase == "forward")
    backward = sum(op.workload.flops * op.count for op in products if op.phase != "forward")
    assert forward * tp == layers * (24 * b * s * h * h + 4 * b * s * s * h) + 2 * b * s * h * v
    assert backward == 2 * forward


def test_gradients_of_a_linear_layer() -> None:
    ops = {
        op.label: op.workload
        for op in TransformerShape(hidden=1024, heads=8, seq=256, ffn=2816).ops()
    }
    assert ops["mlp_up"] == Gemm(m=256, n=2816, k=1024, layout="nt")
    assert ops["mlp_up.dgrad"] == Gemm(m=256, n=1024, k=2816, layout="nn")
    assert ops["mlp_up.wgrad"] == Gemm(m=2816, n=1024, k=256, layout="tn")


def test_grouped_query_and_gated_mlp() -> None:
    # LLaMA-3 8B: 32 heads, 8 key/value heads, ffn 14336, under tp 2.
    shape = TransformerShape(
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        gated=True,
        seq=512,
        vocab=128256,
        tp=2,
        tied=False,
    )
    ops = forward_ops(shape)
    assert ops["qkv"] == Gemm(m=512, n=(16 + 2 * 4) * 128, k=4096, layout="nt")
    assert ops["mlp_gate"] == ops["mlp_up"] == Gemm(m=512, n=7168, k=4096, layout="nt")
    assert ops["logits"] == Gemm(m=512, n=64128, k=4096, layout="nt")
    attention = ops["attention"]
    assert isinstance(attention, Attention)
    assert (attention.heads, attention.kv_heads) == (16, 4)


@pytest.mark.parametrize("causal", [True, False])
def test_unfused_attention_by_hand(causal: bool) -> None:
    shape = TransformerShape(
        hidden=512, heads=8, seq=128, mbs=3, tp=2, attention="unfused", causal=causal
    )
    ops = forward_ops(shape)
    assert ops["scores"] == Gemm(128, 128, 64, batch=3 * 4, layout="nt")
    mask = "causal" if causal else "none"
    assert ops["softmax"] == Softmax(3 * 4, 128, 128, mask=mask, scale=1 / 8, mask_batch=3)
    assert ops["context"] == Gemm(128, 64, 128, batch=3 * 4, layout="nn")


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        ("fp16", "fp16"),
        ("bf16", "bf16"),
        ("fp32", "fp32"),
        ("tf32", "fp32"),
        ("fp8", "bf16"),
        ("int8", "bf16"),
    ],
)
def test_attention_runs_in_a_format_that_it_has(dtype: str, attention: str) -> None:
    shape = TransformerShape(hidden=512, heads=8, dtype=dtype)
    assert shape.attention_dtype == attention
    assert (
        replace(shape, dtype="".join([*dtype])).attention_dtype == attention
    )  # as a name that was read from a file
    ops = forward_ops(shape)
    assert (ops["attention"].dtype, ops["qkv"].dtype) == (attention, dtype)


def test_key_value_heads_are_replicated_when_there_are_fewer_than_gpus() -> None:
    shape = TransformerShape(hidden=1024, heads=16, kv_heads=2, tp=8)
    assert shape.kv_heads_per_gpu == 1
    assert next(op for op in shape.ops() if op.name == "qkv").workload == Gemm(
        2048, (2 + 2) * 64, 1024, layout="nt"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gemm(m=0, n=1, k=1), r"^Gemm: m = 0; expected an integer from 1 to 2147483647$"),
        (
            lambda: Gemm(m=1, n=1, k=1, dtype="bf15"),
            r"^Gemm: dtype = 'bf15'; expected one of fp16, bf16",
        ),
        (
            lambda: Gemm(m=1, n=1, k=1, layout="tt"),
            r"^Gemm: layout = 'tt'; expected one of nn, nt, tn$",
        ),
        (
            lambda: Softmax(batch=1, rows=2, cols=4),
            r"causal with rows = 2, cols = 4; expected rows equal to cols$",
        ),
        (
            lambda: Softmax(batch=4, rows=4, cols=4, mask_batch=3),
            r"mask_batch = 3; expected a divisor of batch = 4$",
        ),
        (
            lambda: TransformerShape(hidden=96, heads=6, tp=4),
            r"heads = 6 with tp = 4; expected heads divisible by tp: 4 or 8$",
        ),
        (
            lambda: Collective("alltoall", 1024, 8),
            r"op = 'alltoall'; expected one of all_reduce",
        ),
        (
            lambda: Collective("all_reduce", 1024, 1),
            r"num_gpus = 1; expected an integer from 2",
        ),
        (
            lambda: Collective("all_reduce", 1023, 8),
            r"message_bytes = 1023; expected a multiple of 2",
        ),
        (
            lambda: Collective("all_reduce", 1024, 8, num_nodes=3),
            r"num_nodes = 3; expected a divisor of num_gpus = 8",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "workload",
    [
        Gemm(m=3, n=5, k=7, batch=2, dtype="fp16", layout="tn"),
        GroupedGemm((3, 0, 5), n=16, k=8, dtype="fp8", layout="nt"),
        Permute(tokens=4, hidden=8, top_k=2, direction="unpermute"),
        MoE(16, 8, 32, 4, 2, ep=2, distribution="power_law_1.2", seed=3),
        MoE(16, 8, 32, 4, 2, distribution=(3, 0, 1, 9)),
        Softmax(
            batch=4, rows=8, cols=16, mask="full", scale=0.125, mask_batch=2, direction="backward"
        ),
        Attention(batch=1, heads=8, kv_heads=2, seq_q=16, seq_k=32, head_dim=80, causal=False),
    ],
)
def test_workloads_survive_json(workload) -> None:
    stored = json.loads(json.dumps(encode(workload)))
    assert _decoded(stored) == workload
    (of_kind,) = (
        one for one in schema("record")["properties"]["workload"]["anyOf"] if _accepts(one, stored)
    )
    assert of_kind["properties"]["kind"] == {"const": workload.kind}


def _decoded(data: object) -> object:
    return decode(Op, {"name": "gemm", "phase": "forward", "workload": data, "count": 1}).workload


def _accepts(one: dict[str, object], stored: object) -> bool:
    return jsonschema.Draft202012Validator(one).is_valid(stored)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "Op: workload = None; expected Gemm or GroupedGemm"),
        (
            {"kind": "conv"},
            "expected Gemm or GroupedGemm or Permute or MoE or Softmax",
        ),
        (
            {"kind": "gemm", "m": 1, "n": 1, "k": 1, "q": 1},
            "Gemm: field 'q' is unknown",
        ),
        ({"kind": "gemm", "m": 1}, "Gemm: field 'k' is missing"),
        ({"kind": "gemm", "m": "1", "n": 1, "k": 1}, "Gemm: m = '1'"),
    ],
)
def test_foreign_json_is_refused(data, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _decoded(data)


def test_layer_weights_of_a_gpt_and_of_grouped_gated_layers() -> None:
    assert TransformerShape(hidden=1024, heads=16).layer_weights(2) == 12 * 1024**2 // 2
    llama = TransformerShape(hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True)
    assert llama.layer_weights() == 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    # With 16 GPUs, two share each key/value head: one head of 128 remains on each.
    assert llama.layer_weights(16) == 2 * 4096 * 128 * (2 + 1) + 3 * 4096 * 14336 // 16
    assert all(
        isinstance(shape.layer_weights(2), int)
        for shape in (llama, TransformerShape(hidden=1024, heads=16))
    )


def test_weights_of_experts_and_latent_attention_by_hand() -> None:
    shape = TransformerShape(
        hidden=1536, heads=12, head_dim=96, layers=7, vocab=1024, ffn=2560, gated=True,
        tied=False, experts=16, top_k=3, moe_ffn=640, shared_ffn=320, dense_layers=2, ep=4,
        kv_rank=256, q_rank=384, rope_dim=32, value_dim=64, tp=2,
    )  # fmt: skip
    down = 1536 * (384 + 256 + 32)
    divided = 384 * 12 * 96 + 256 * 12 * (64 + 64) + 12 * 64 * 1536
    assert shape.layer_weights(dense=True) == down + divided + 3 * 1536 * 2560
    router = 16 * 1536
    mlp = 3 * 1536 * (16 * 640 + 320)
    assert shape.layer_weights() == down + divided + mlp + router
    assert shape.layer_weights(2) == down + divided // 2 + mlp // 2 + router
    used = 3 * 1536 * (3 * 640 + 320)
    assert shape.layer_weights(active=True) == down + divided + used + router
    outside = 2 * (down + divided + 3 * 1536 * 2560) + 2 * 1024 * 1536
    assert shape.parameters == outside + 5 * (down + divided + mlp + router)
    assert shape.active_parameters == outside + 5 * (down + divided + used + router)
    routed = 5 * 3 * 1536 * 16 * 640
    assert shape.parameters_per_gpu == (shape.parameters - routed + routed / 4) / 2


def test_columns_and_experts_of_a_shape_on_several_gpus() -> None:
    shape = TransformerShape(
        hidden=512, heads=8, kv_heads=4, head_dim=96, tp=2, experts=8, top_k=2, moe_ffn=256,
        ep=4, expert_tp=1,
    )  # fmt: skip
    assert shape.qkv_columns == forward_ops(shape)["qkv"].n == 4 * 96 + 2 * (96 + 96)
    # Four GPUs are two groups of tp = 2, each with 100 tokens.
    assert shape.experts_of(100).tokens == 200
