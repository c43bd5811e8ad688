"""The attention kernels as machine code: tensor cores at work, no spills, within the shared memory
of a block.
"""

import pytest
from ahead_of_time import (
    KernelResources,
    check_fits,
    compile_backward,
    compile_delta,
    compile_forward,
    few,
    in_test_aot,
)
from quantbench.kernels.attention.menu import (
    WITH_DESCRIPTORS,
    Loads,
    Setting,
    backward_tiles,
    forward_menu,
)
from quantbench.kernels.launching import TRITON, widest

#: Opcodes of 16-bit matrix products by architecture.
TENSOR_CORES = {80: "HMMA", 86: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}

pytestmark = pytest.mark.skipif(TRITON < (3, 6), reason="triton 3.2 compiles no attention")


def loads_of(arch: int, head_dim: int) -> Loads:
    """As contiguous bf16 tensors arrive."""
    width = 2 * widest(8, head_dim)
    return Loads(width, descriptors=arch in WITH_DESCRIPTORS and width == 16)


def is_well_compiled(code: KernelResources, tensor_cores: str | None = None) -> None:
    check_fits(code)
    assert code.count(tensor_cores or TENSOR_CORES[code.arch]) > 0


def entries(*places: tuple[int, int]) -> list[tuple[int, int, Setting]]:
    return [
        (arch, head_dim, setting)
        for arch, head_dim in places
        for setting in forward_menu(arch, head_dim, loads_of(arch, head_dim))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head_dim", "setting"),
    few(entries(
        (80, 64), (80, 128), (80, 192), (80, 256), (86, 128),
        (90, 64), (90, 96), (90, 128), (90, 192), (90, 256), (90, 72), (90, 100), (90, 150), (90, 75),
        (100, 64), (100, 128), (100, 256),
    ), 2),
    ids=str,
)  # fmt: skip
def test_the_menu_of_forward(arch: int, head_dim: int, setting: Setting) -> None:
    loads = loads_of(arch, head_dim)
    is_well_compiled(compile_forward(setting, head_dim, arch, descriptors=loads.descriptors))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "head_dim"), few([(a, d) for d in (64, 128, 256) for a in (80, 90, 100)], 1)
)
def test_backward(arch: int, head_dim: int) -> None:
    loads = loads_of(arch, head_dim)
    # Blocks of 32 rows are too short for sm_100's tensor memory, and take the older instruction.
    tiles = backward_tiles(arch, head_dim, loads)
    for code in compile_backward(tiles, head_dim, arch, descriptors=loads.descriptors):
        is_well_compiled(code)


@in_test_aot
def test_delta_and_rows_that_no_descriptor_can_address() -> None:
    assert compile_delta(100, 90).spills == 0
    tiles = backward_tiles(90, 150, Loads(4))
    for code in compile_backward(tiles, 150, 90, descriptors=False):
        is_well_compiled(code)


@in_test_aot
def test_a_full_mask() -> None:
    setting = forward_menu(80, 128, Loads())[0]
    is_well_compiled(compile_forward(setting, 128, 80, causal=False, descriptors=False))


@in_test_aot
@pytest.mark.parametrize("causal", [True, False])
def test_the_overlapped_schedule_computes_beside_the_products(causal: bool) -> None:
    """Between the first and the last matrix instruction of the loop stand its exponentials; here
    only that nothing is serialised, at the register count that lets a block of 8 warps run."""
    setting = forward_menu(90, 128, Loads(descriptors=True))[0]
    assert setting.schedule == "overlapped"
    code = compile_forward(setting, 128, 90, causal=causal, descriptors=True)
    is_well_compiled(code)


# Rule 7 in machine code: what head_dim is a multiple of decides how many bytes a thread copies at a
# time.
@in_test_aot
@pytest.mark.parametrize(("head_dim", "width"), [(128, "128"), (100, "64"), (150, None)])
def test_copies_narrow_with_the_alignment_of_head_dim(head_dim: int, width: str | None) -> None:
    setting = forward_menu(80, head_dim, loads_of(80, head_dim))[0]
    code = compile_forward(setting, head_dim, 80, descriptors=False)
    copies = [name for name in code.opcodes if name.startswith("LDGSTS")]
    assert copies
    assert all(
        (width in name.split(".")) if width else not {"64", "128"} & set(name.split("."))
        for name in copies
    )


@in_test_aot
def test_fp32_goes_without_tensor_cores() -> None:
    setting = forward_menu(80, 64, Loads(), fp32=True)[0]
    code = compile_forward(setting, 64, 80, dtype="fp32", descriptors=False)
    is_well_compiled(code, "FFMA")
    assert code.count("HMMA") == 0
