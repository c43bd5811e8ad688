"""The rules on divisibility: what breaks them, at which tensor-parallel degree, in whose library,
and their sources.
"""

from dataclasses import replace

import pytest

from quantbench.alignment_rules import EFFECTS, RULES, broken_by_shape, broken_rules
from quantbench.analysis.rules import RULES as RULES_OF_THUMB
from quantbench.device import lookup
from quantbench.latency.libraries import LIBRARIES
from quantbench.workload import Attention, Gemm, GroupedGemm, TransformerShape
from quantbench.workload.dtypes import GEMM_DTYPES

LLAMA = TransformerShape(hidden=4096, heads=32, ffn=11008, gated=True, vocab=32000, tp=8)


def test_every_rule_names_its_sources_and_only_known_formats_libraries_and_effects() -> None:
    assert len({rule.id for rule in (*RULES, *RULES_OF_THUMB)}) == len(RULES) + len(RULES_OF_THUMB)
    for rule in (*RULES, *RULES_OF_THUMB):
        assert rule.sources
        assert all(source.startswith("https://") for source in rule.sources)
    for rule in RULES:
        assert set(rule.dtypes) <= set(GEMM_DTYPES)
        assert set(rule.libraries) <= set(LIBRARIES)
        assert rule.effect in EFFECTS


@pytest.mark.parametrize(
    ("gemm", "library", "broken"),
    [
        (Gemm(64, 4096, 688, dtype="fp8_block", layout="nt"), "vllm", {"crashes: k 768", "falls back: k 768"}),
        (Gemm(64, 4096, 688, dtype="fp8_block", layout="nt"), "torch", set()),
        (Gemm(64, 4090, 4096, dtype="fp8", layout="nt"), "torch", {"crashes: n 4096", "falls back: n 4096"}),
        (Gemm(64, 4090, 4096, dtype="fp8", layout="nt"), "vllm", {"wastes: n 4096", "falls back: n 4096"}),
        (Gemm(65, 4096, 4080, dtype="nvfp4", layout="nt"), "torch", {"falls back: k 4096"}),
        (Gemm(65, 4096, 4080, dtype="nvfp4", layout="nt"), "sglang", {"falls back: k 4096", "wastes: k 4096"}),
        (Gemm(100, 150, 64), "", {"falls back: n 152"}),
        (Gemm(4096, 4096, 4096, dtype="mxfp8"), "", set()),
    ],
)  # fmt: skip
def test_the_rules_that_a_product_breaks(gemm: Gemm, library: str, broken: set[str]) -> None:
    found = broken_rules(gemm, library=library, tp=8)
    assert {f"{one.rule.effect}: {one.name} {one.to}" for one in found} == broken


def test_scale_blocks_are_cut_by_tensor_parallelism_only() -> None:
    shape = replace(LLAMA, dtype="fp8_block")
    crash = [one for one in broken_by_shape(shape, library="vllm") if one.rule.effect == "crashes"]
    assert {(one.name, one.size, one.to) for one in crash} == {("ffn / tp", 1376, 1408)}
    assert set(crash[0].ops) == {"mlp_up", "mlp_gate", "mlp_down"}
    assert not broken_by_shape(replace(shape, tp=1), library="vllm")


def test_mxfp8_wants_32_tokens_of_each_gpu_in_training() -> None:
    shape = replace(LLAMA, dtype="mxfp8", seq=16 * 99, ffn=11264)
    training = {one.name: one.to for one in broken_by_shape(shape, library="torch")}
    assert training == {"tokens": 1600, "tokens / tp": 224}
    assert not broken_by_shape(shape, library="torch", backward=False)
    assert not broken_by_shape(replace(shape, seq=32 * 8), library="torch")


def test_experts_are_padded_one_by_one() -> None:
    work = GroupedGemm((100, 0, 5, 128), 4096, 4096, dtype="fp8_block", layout="nt")
    (one,) = broken_rules(work, library="vllm")
    assert (one.size, one.to, one.rule.effect) == (233, 384, "wastes")


def test_head_dim_is_padded_to_the_widths_that_kernels_exist_for() -> None:
    def widths(head_dim: int) -> set[int]:
        work = Attention(batch=1, heads=8, kv_heads=8, seq_q=256, seq_k=256, head_dim=head_dim)
        return {one.to for one in broken_rules(work)}

    assert (widths(132), widths(128), widths(80), widths(300)) == ({136, 192}, set(), {96}, {304})


def test_rules_of_software_that_a_gpu_cannot_run_are_left_out() -> None:
    work = Attention(batch=1, heads=8, kv_heads=8, seq_q=256, seq_k=256, head_dim=80, dtype="fp16")
    assert broken_rules(work, device=lookup("a100-sxm4-80gb"))
    assert not broken_rules(work, device=lookup("v100-sxm2-16gb"))
