"""Every rule of layouts, kept and broken, and how layers fall onto stages."""

from dataclasses import replace

import pytest
from planner_doubles import bloom_like, job

from quantbench.errors import InputError
from quantbench.planner.constraints import is_possible, violations
from quantbench.planner.layout import Job, Layout, StageKind, stage_kinds

GOOD = Layout(dp=8, tp=4, pp=12, mbs=2)
GROUPED = replace(bloom_like(heads=48, hidden=6144), kv_heads=6, seq=2050)


@pytest.mark.parametrize(
    ("layout", "of", "names"),
    [
        (GOOD, job(), set()),
        (Layout(8, 8, 10, 4), job(gpus=320), {"gpus", "stages"}),
        (Layout(32, 2, 1, 4), job(gpus=64, gbs=192), {"gbs"}),
        (Layout(1, 4, 96, 1), job(), {"stages"}),
        (Layout(8, 3, 16, 1), job(), {"heads % tp", "ffn % tp", "hidden % tp", "kv_heads", "stages", "vocab",
                                      "fused softmax"}),
        (Layout(8, 16, 3, 1), job(), {"tp in a node", "vocab"}),
        (replace(GOOD, zero=2), job(), {"ZeRO with stages"}),
        (replace(GOOD, zero=2), job(stack="torchtitan"), set()),
        (replace(GOOD, interleave=5), job(), {"interleave"}),
        (replace(GOOD, interleave=2), job(), {"interleave"}),  # 128 micro-batches are no whole groups of 12
        (Layout(64, 1, 4, 1, interleave=4, partition="uneven"), job(256, 4096, bloom_like(61)), set()),
        (Layout(64, 1, 4, 1, interleave=16, partition="uneven"), job(256, 4096, bloom_like(61)), {"interleave"}),
        (GOOD, job(shape=bloom_like(70)), {"stages"}),
        (replace(GOOD, partition="embedding"), job(shape=bloom_like(70)), set()),
        (replace(GOOD, partition="embedding"), job(), {"stages"}),
        (replace(GOOD, partition="uneven"), job(shape=bloom_like(71)), set()),
        (Layout(96, 4, 1, 1, sequence_parallel=True), job(gbs=96, shape=GROUPED), {"kv_heads", "sequence parallel"}),
        (Layout(96, 2, 1, 1, cp=2), job(gbs=96, shape=replace(bloom_like(), seq=2050)), {"context parallel"}),
        (Layout(384, 1, 1, 1, ep=2), job(gbs=384), {"experts"}),
        (Layout(48, 8, 1, 1), job(gbs=2016, shape=bloom_like(heads=96, hidden=14400)), {"head_dim % 8"}),
        (Layout(4, 8, 12, 1), job(shape=bloom_like(heads=112)), {"fused softmax"}),  # 14 heads a GPU
        (Layout(32, 1, 12, 4), job(), {"bubble"}),
        (Layout(48, 8, 1, 1), job(gbs=48, shape=replace(bloom_like(), vocab=50264)), {"vocab"}),
    ],
)  # fmt: skip
def test_rules_that_a_layout_breaks(layout: Layout, of: Job, names: set[str]) -> None:
    broken = violations(of, layout)
    softmax = {"fused softmax"} - names if of.shape.seq % 4 else set()
    assert {v.name for v in broken} - softmax == names
    assert is_possible(of, layout) == (not any(v.strict for v in broken))
    assert all(v.message for v in broken)


@pytest.mark.parametrize("changes", [{"zero": 4}, {"recompute": "some"}, {"partition": "x"}])
def test_layouts_refuse_what_is_none(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match="Layout: "):
        replace(GOOD, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"dp_overlap": 1.5}, {"optimizer": "sgd"}])
def test_jobs_refuse_what_is_none(changes: dict[str, object]) -> None:
    with pytest.raises(InputError):
        job(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ((72, 1, "layers"), [StageKind(72, 1, first=True, last=True)]),
        ((70, 2, "embedding"), [StageKind(35, 1, first=True), StageKind(35, 1, last=True)]),
        ((7, 2, "uneven"), [StageKind(3, 1, first=True), StageKind(4, 1, last=True)]),
        (
            (11, 4, "uneven"),
            [StageKind(2, 1, first=True), StageKind(3, 2), StageKind(3, 1, last=True)],
        ),
    ],
)
def test_how_layers_fall_onto_stages(
    arguments: tuple[int, int, str], kinds: list[StageKind]
) -> None:
    assert list(stage_kinds(*arguments)) == kinds


@pytest.mark.parametrize(
    ("spread", "interleave", "dense"),
    [
        (False, 1, [3, 3, 0, 0]),
        # Chunks of one layer go around the stages: layers 0 to 5 are on stages 0, 1, 2, 3, 0, 1.
        (False, 3, [2, 2, 1, 1]),
        (True, 1, [1.5, 1.5, 1.5, 1.5]),
    ],
)
def test_which_stages_hold_the_layers_without_experts(
    spread: bool, interleave: int, dense: list[float]
) -> None:
    kinds = stage_kinds(12, 4, "layers", 6, spread, interleave)
    assert [kind.dense for kind in kinds for _ in range(kind.count)] == dense


@pytest.mark.parametrize("pp", [1, 2, 4, 8, 61])
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_no_layer_is_lost(pp: int, interleave: int) -> None:
    kinds = stage_kinds(61, pp, "uneven", 3, False, interleave)
    assert sum(kind.dense * kind.count for kind in kinds) == pytest.approx(3)
    assert sum(kind.layers * kind.count for kind in kinds) == 61
    assert sum(kind.count for kind in kinds) == pp
    assert (kinds[0].first, kinds[-1].last) == (True, True)
