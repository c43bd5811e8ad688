"""FP8 recipes: the formats of gradients, the bytes of casts, and what stays in 16 bits."""

from collections import Counter
from dataclasses import replace

import pytest

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import CachedTimes, copy_us
from quantbench.store.typed import decode, encode
from quantbench.workload import Op, TransformerShape
from quantbench.workload.ops import Cast
from quantbench.workload.recipes import RECIPES

SHAPE = TransformerShape(
    hidden=1024, heads=8, ffn=4096, gated=True, vocab=32000, seq=512, layers=3, tp=2, dtype="fp8"
)


def dtypes(shape: TransformerShape) -> dict[str, set[str]]:
    products = [op for op in shape.ops() if op.workload.kind == "gemm"]
    return {
        phase: {op.workload.dtype for op in products if op.phase == phase and op.name != "logits"}
        for phase in ("forward", "dgrad", "wgrad")
    }


def test_without_a_recipe_every_product_has_the_same_format_and_nothing_is_cast() -> None:
    assert dtypes(SHAPE) == {"forward": {"fp8"}, "dgrad": {"fp8"}, "wgrad": {"fp8"}}
    assert not [op for op in SHAPE.ops() if op.name == "cast"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_have_the_formats_of_the_recipe_and_logits_16_bits(recipe: str) -> None:
    named = RECIPES[recipe]
    shape = replace(SHAPE, dtype=named.forward, fp8_recipe=recipe)
    found = dtypes(shape)
    assert found == {phase: {getattr(named, phase)} for phase in found}
    assert {op.workload.dtype for op in shape.ops() if op.name == "logits"} == {"bf16"}


def test_only_casts_that_no_kernel_before_can_fuse_are_ops_and_write_both_copies() -> None:
    shape = replace(SHAPE, dtype="fp8_block", fp8_recipe="block")
    casts = Counter((op.phase, op.workload) for op in shape.ops() if op.name == "cast")

    def cast(rows: int, cols: int) -> Cast:
        return Cast(rows, cols, to="fp8_block", copies=2)

    # x of proj, which attention wrote; the gradients of what qkv, proj and down write. Norms and
    # activations cast the other inputs, and weights are cast once per step.
    assert casts == Counter(
        {
            ("forward", cast(512, 512)): 1,
            ("backward", cast(512, 1536)): 1,
            ("backward", cast(512, 1024)): 2,
        }
    )
    assert cast(512, 1024).min_bytes == round(512 * 1024 * (2 + 2 * (1 + 4 / 128)))


def test_a_forward_pass_and_bf16_weight_gradients_need_no_second_copy() -> None:
    forward = replace(SHAPE, fp8_recipe="tensorwise").ops(backward=False)
    mixed = replace(SHAPE, fp8_recipe="tensorwise_bf16_wgrad").ops()
    for ops in (forward, mixed):
        assert {op.workload.copies for op in ops if isinstance(op.workload, Cast)} == {1}


def test_casts_take_their_bytes_over_the_bandwidth_and_are_said_to_be_unmeasured() -> None:
    spec, cast = lookup("h100-sxm5-80gb"), Cast(4096, 4096, to="fp8", reads=2, copies=2)
    found = CachedTimes(ModelTimes(spec)).estimate(cast)
    assert found.latency_us == copy_us(4096 * 4096 * 6, spec)
    assert "casts" in found.unmeasured
    op = Op("cast", "forward", cast, 1)
    assert decode(Op, encode(op)) == op


def test_the_format_must_be_that_of_the_recipe() -> None:
    with pytest.raises(InputError, match="fp8_block"):
        replace(SHAPE, fp8_recipe="block")
    with pytest.raises(InputError, match="fp8_recipe"):
        replace(SHAPE, fp8_recipe="fast")
