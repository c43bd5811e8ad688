"""Memory of a stage, worked out by hand and held against the tables."""

from dataclasses import replace
from typing import Any

import pytest
from planner_doubles import PLAIN, bloom_like, job

from quantbench.device import lookup
from quantbench.planner.layout import Layout, StageKind
from quantbench.planner.memory import (
    GIB,
    embedding_parameters,
    in_flight,
    memory,
    stage_parameters,
)
from quantbench.workload import TransformerShape
from quantbench.workload.recipes import RECIPES

SMALL = TransformerShape(
    hidden=1024, heads=16, layers=4, vocab=51200, seq=512, attention="unfused", dropout=True
)
SCORES = 5 * 16 * 512 / 1024


def test_parameters_of_a_stage() -> None:
    of = job(gpus=8, gbs=8, shape=SMALL)
    each = 12 * 1024**2 + 9 * 1024
    embedding = 51200 * 1024
    assert embedding_parameters(SMALL, 1) == embedding
    whole = StageKind(4, 1, first=True, last=True)
    untied = replace(of, shape=replace(SMALL, tied=False))
    for one, kind, layers, matrices in (
        (of, whole, 4, 1),
        (untied, whole, 4, 2),
        (of, StageKind(2, 1, first=True), 2, 1),
        (of, StageKind(1, 2), 1, 0),
    ):
        found = stage_parameters(one, Layout(2 * layers, 1, 4 // layers, 1), kind)
        assert found == (layers * each + matrices * embedding, 0)


@pytest.mark.parametrize(
    ("zero", "each"),
    [(0, (2, 2, 16)), (1, (2, 2, 2)), (2, (2, 0.25, 2)), (3, (0.25, 0.25, 2))],
)
def test_zero_shards_states_then_gradients_then_weights(
    zero: int, each: tuple[float, float, float]
) -> None:
    of, layout = job(gpus=8, gbs=8, shape=SMALL), Layout(8, 1, 1, 1, zero=zero)
    count, _ = stage_parameters(of, layout, StageKind(4, 1, first=True, last=True))
    found = memory(of, layout, PLAIN)
    parts = (found.weights, found.gradients, found.optimizer)
    assert parts == tuple(count * bytes_each for bytes_each in each)


@pytest.mark.parametrize(
    ("optimizer", "stack", "dtype", "each"),
    [
        ("adam", "", "bf16", (2, 20)),
        ("fused_adam", "nemo", "bf16", (2, 16)),
        ("adam_8bit", "", "bf16", (2, 10)),
        ("fused_adam", "megatron", "fp16", (2, 16)),
        ("fused_adam", "megatron", "bf16", (4, 12)),
    ],
)
def test_optimizers(optimizer: str, stack: str, dtype: str, each: tuple[int, int]) -> None:
    shape = replace(SMALL, dtype=dtype)
    of = job(gpus=1, gbs=8, shape=shape, optimizer=optimizer, stack=stack)
    found = memory(of, Layout(1, 1, 1, 1, zero=0), PLAIN)
    assert (found.gradients, found.optimizer) == tuple(n * found.weights / 2 for n in each)


@pytest.mark.parametrize(
    ("tp", "options", "per_element"),
    [
        (1, {"recompute": "none"}, 34 + SCORES),
        (4, {"recompute": "none"}, 10 + (24 + SCORES) / 4),
        (4, {"recompute": "none", "sequence_parallel": True}, (34 + SCORES) / 4),
        (4, {"recompute": "selective"}, 10 + 24 / 4),
        (4, {}, 2),
    ],
)
def test_activations_of_a_gpt_layer_as_published(
    tp: int, options: dict[str, Any], per_element: float
) -> None:
    # Korthikanti et al., equations 1 and 2: s·b·h·(34 + 5·a·s/h) alone, s·b·h·(10 + 24/t +
    # 5·a·s/(h·t)) over t GPUs.
    found = memory(job(gpus=tp, gbs=8, shape=SMALL), Layout(1, tp, 1, 2, **options), PLAIN)
    assert found.activations == 4 * 512 * 2 * 1024 * per_element


def test_flash_attention_keeps_no_probabilities() -> None:
    fused = job(gpus=1, gbs=8, shape=replace(SMALL, attention="flash"))
    found = memory(fused, Layout(1, 1, 1, 1, recompute="none"), PLAIN)
    assert found.activations == 4 * (512 * 1024 * 34 + 16 * 512 * 4)


@pytest.mark.parametrize(
    ("gpu", "recipe", "stack", "each"),
    [
        ("h100-sxm5-80gb", "tensorwise", "megatron-bridge", 1 + 1),
        ("h100-sxm5-80gb", "tensorwise", "megatron", 2 + 1 + 1),
        ("b200-sxm-180gb", "tensorwise", "megatron-bridge", 1),
        ("b200-sxm-180gb", "mxfp8", "nemo", 2 * 33 / 32),
        ("b200-sxm-180gb", "nvfp4", "megatron-bridge", 2 + 2 * 9 / 16),
    ],
)
def test_copies_of_quantized_weights(gpu: str, recipe: str, stack: str, each: float) -> None:
    """As Transformer Engine's documentation adds them up; the embedding stays in 16 bits."""
    dense = job(gpus=2, gbs=8, shape=SMALL)
    shape = replace(SMALL, dtype=RECIPES[recipe].forward, fp8_recipe=recipe)
    where = replace(dense.cluster, device=lookup(gpu))
    of = replace(dense, shape=shape, cluster=where, stack=stack)
    wide, narrow = (memory(one, Layout(1, 2, 1, 1), PLAIN).weights for one in (dense, of))
    assert narrow - wide == (each - 2) * 4 * 12 * 1024**2 / 2


def test_micro_batches_in_flight() -> None:
    plain = Layout(8, 4, 12, 2)
    assert [in_flight(plain, stage, 128) for stage in (0, 1, 11)] == [12, 11, 1]
    assert in_flight(plain, 0, 5) == 5  # no more than there are
    # Interleaved, the first stage holds 1 + (p - 1)/(p·v) times as much.
    assert in_flight(replace(plain, interleave=3), 0, 128) == pytest.approx(12 * (1 + 11 / 36))


def test_the_first_stage_is_the_fullest_and_logits_can_change_that() -> None:
    assert memory(job(), Layout(8, 4, 12, 2), PLAIN).stage == 0
    # With as few micro-batches as one there is nothing in flight, and the logits weigh.
    wide = job(gpus=4, gbs=1, shape=bloom_like(layers=2, hidden=2048, heads=16))
    assert memory(wide, Layout(1, 2, 2, 1), PLAIN).stage == 1


def test_slack_and_base_are_added() -> None:
    found = memory(job(), Layout(8, 4, 12, 2), replace(PLAIN, base_gib=2.0, activation_slack=0.5))
    assert found.base == 2 * GIB
    assert found.slack == 0.5 * (found.activations + found.working)
    assert found.total_gib == pytest.approx(found.total / GIB)
