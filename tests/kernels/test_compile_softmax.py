"""The softmax kernels as machine code: 16-byte loads and stores, no spills, on every
architecture.
"""

from itertools import product

import pytest
from ahead_of_time import KernelResources, compile_softmax, few, in_test_aot
from quantbench.kernels.softmax import MAX_COLS, softmax_tile

DIRECTIONS = ("forward", "backward")
# Backward knows no difference between full and none.
MASKS = [
    *product(["forward"], ["causal", "full", "none"]),
    *product(["backward"], ["causal", "none"]),
]
CASES = list(product((80, 90, 100), MASKS, (128, 2048, MAX_COLS)))


def count(code: KernelResources, opcode: str, kind: str = "") -> int:
    return sum(n for name, n in code.opcodes.items() if name.startswith(opcode) and kind in name)


def loads(code: KernelResources, kind: str) -> int:
    return count(code, "LDG.E", f".{kind}")


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "mask", "cols"), few(CASES, 1))
def test_rows_in_eights_move_16_bytes_at_a_time(
    arch: int, mask: tuple[str, str], cols: int
) -> None:
    direction, masked = mask
    code = compile_softmax(cols, direction=direction, mask=masked, dtype="bf16", arch=arch)
    assert code.spills == 0
    assert code.stack_bytes == 0
    assert loads(code, "128") == count(code, "LDG")
    assert code.count("STG.E.128") == count(code, "STG")
    assert code.threads == 32 * (softmax_tile(cols, 2, direction).num_warps or 0)


@in_test_aot
def test_loads_under_way_per_thread() -> None:
    forward = compile_softmax(2048, dtype="bf16", arch=90)
    backward = compile_softmax(2048, direction="backward", dtype="bf16", arch=90)
    assert loads(forward, "128") == 4
    assert loads(backward, "128") == 4


# What a row's length is a multiple of decides the width of its loads: the cliff of this kernel.
@in_test_aot
@pytest.mark.parametrize(("cols", "kind"), [(2056, "128"), (2052, "64"), (2049, "U16")])
def test_loads_narrow_with_the_alignment_of_a_row(cols: int, kind: str) -> None:
    code = compile_softmax(cols, dtype="bf16", arch=90)
    assert loads(code, kind) == count(code, "LDG")
    assert code.spills == 0


@in_test_aot
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("cols", "dtype"), [(MAX_COLS, "fp32"), (MAX_COLS - 1, "bf16"), (1, "fp16")]
)
def test_extremes_do_not_spill(cols: int, dtype: str, direction: str) -> None:
    for arch in (80, 90):
        assert compile_softmax(cols, direction=direction, dtype=dtype, arch=arch).spills == 0


@pytest.mark.parametrize("cols", [1, 16, 17, 128, 2048, 4097, MAX_COLS])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_tile_holds_whole_rows_and_enough_of_them(
    cols: int, element_bytes: int, direction: str
) -> None:
    tile = softmax_tile(cols, element_bytes, direction)
    assert cols <= tile.block_n
    assert tile.block_n < max(2 * cols, 17)
    assert tile.elements >= 4096
    assert 1 <= (tile.num_warps or 0) <= 32
