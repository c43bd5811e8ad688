"""Advice on models with experts: what skew and padding cost, and shapes with as many parameters on
as many GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from commands import run

from quantbench.advice.advise import advise
from quantbench.advice.edges import edges
from quantbench.advice.space import Space, least_ep, shapes_near, weights_bytes
from quantbench.device import lookup
from quantbench.latency.model_times import ModelTimes
from quantbench.workload import TransformerShape
from quantbench.workload.presets import preset

H100 = lookup("h100-sxm5-80gb")
QWEN = replace(preset("qwen3-30b-a3b"), ep=4, mbs=2)


def changed(base: TransformerShape, dimension: str) -> list[TransformerShape]:
    """The shapes near `base` in which a dimension changes; "hidden": in which the others follow
    it.
    """
    return [
        one
        for group, found in shapes_near(base, Space()).items()
        if group.changed == dimension
        for one in found
    ]


def test_other_experts_have_equal_active_and_total_parameters() -> None:
    found = changed(QWEN, "experts")
    assert {one.moe_ffn for one in found} >= {384, 1536}
    for one in found:
        assert one.parameters == pytest.approx(QWEN.parameters, rel=0.05)
        assert one.active_parameters == pytest.approx(QWEN.active_parameters, rel=0.05)


def test_weights_that_exceed_a_gpu_are_said_with_the_least_ep_that_holds_them() -> None:
    times, kimi = ModelTimes(H100), preset("kimi-k2")
    advice = advise(kimi, times, top=0)
    assert advice.too_large == "weights of 1912 GiB on a GPU of 80 GiB; they fit from ep = 48 on"
    assert not advice.keep
    assert (
        weights_bytes(replace(kimi, ep=48))
        < H100.memory_bytes
        < weights_bytes(replace(kimi, ep=32))
    )
    assert least_ep(kimi, H100.memory_bytes) == 48
    assert least_ep(kimi, 2**34) == 0  # what every GPU holds exceeds it already
    assert not advise(replace(kimi, ep=48), times, top=0).too_large


def test_what_is_tried_is_said() -> None:
    said = Space(keep=("mbs",)).words(QWEN)
    assert "hidden within" not in said
    assert "ep in powers of 2" in said
    assert said.endswith("kept: mbs")
    wide = replace(preset("llama-3-8b"), head_dim=256)  # heads · head_dim is not hidden
    assert "heads as they are" in Space().words(wide)
    assert len({(one.heads, one.head_dim) for one in changed(wide, "hidden")}) == 1


def test_heads_are_not_narrower_than_their_rotary_part() -> None:
    latent = TransformerShape(
        hidden=4096, heads=32, layers=8, vocab=51200, kv_rank=512, rope_dim=96, value_dim=128
    )  # fmt: skip
    assert {one.head_dim for one in changed(latent, "hidden")} == {128, 256}


def test_tp_and_ep_share_the_same_gpus_and_tokens() -> None:
    for one in changed(QWEN, "tp and ep"):
        assert (one.tp * one.ep, one.tokens * one.ep) == (QWEN.tp * QWEN.ep, QWEN.tokens * QWEN.ep)


def test_more_gpus_that_exchange_tokens_are_never_surely_faster() -> None:
    advice = advise(preset("gpt-oss-120b"), ModelTimes(lookup("b200-sxm-180gb")))
    (more,) = (one.found for one in advice.singles if one.found.shape.ep > 1)
    assert more.low > 0
    assert not more.sure
    back = advise(more.shape, ModelTimes(lookup("b200-sxm-180gb")))
    assert all(
        one.found.sure == (one.found.low > 0)
        for one in back.compared
        if one.found.shape.ep <= more.shape.ep
    )
    said = run("advise --gpu b200-sxm-180gb --model gpt-oss-120b")
    assert "without the exchange between more GPUs, which is not priced" in " ".join(said.split())
    assert "surely faster, by" not in said


def test_a_gain_that_rests_on_attention_outside_a_sliding_window_is_not_sure() -> None:
    windowed, times = preset("gemma-3-27b"), ModelTimes(H100)
    whole = advise(replace(windowed, sliding_window=0), times, top=3)
    assert "attention: a smaller part of the model" in whole.better[0].found.reasons
    found = {one.found.shape: one.found for one in advise(windowed, times, top=50).compared}
    one = found[replace(whole.better[0].found.shape, sliding_window=windowed.sliding_window)]
    assert (one.gain, one.high) == (whole.better[0].found.gain, whole.better[0].found.high)
    assert one.low < 0 < whole.better[0].found.low


def test_skew_is_an_edge_from_balanced_experts_and_rows_one_from_whole_tiles() -> None:
    def of(**changes: object) -> dict[str, object]:
        ops = replace(QWEN, **changes).modelled_ops()  # type: ignore[arg-type]
        return {
            edge.kind: edge.before
            for edge in edges(next(op for op in ops if op.name == "experts"), H100)
        }

    assert of(seq=4096) == {}  # 2,048 rows for each expert
    assert list(of(seq=4096, routing="power_law_1.2")) == ["skew"]
    before = of(seq=300)["tile edge"]  # 150 rows: one tile of 128 and a part of another
    assert max(before.tokens_per_expert) == 128  # type: ignore[attr-defined]
