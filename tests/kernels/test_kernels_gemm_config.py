"""How a GEMM kernel is chosen: menus, the pick, alignment, descriptors, the share of stream-k.
Nothing is launched.
"""

import doctest
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_operands import contiguous
from quantbench.kernels import launching
from quantbench.kernels.gemm import config, host, menu
from quantbench.kernels.gemm.config import (
    Matrix,
    Operands,
    align_bytes,
    complete,
    configure,
    streamed_tiles,
)
from quantbench.kernels.gemm.menu import ARCHITECTURES, SCHEDULES, estimated_clocks, pick, tiles
from quantbench.kernels.launching import TRITON

from quantbench.errors import InputError
from quantbench.launch import Tile
from quantbench.workload import Gemm

H200, A100 = ((9, 0), 132), ((8, 0), 108)


@pytest.mark.parametrize("module", [launching, config, menu, host])
def test_examples_in_docstrings(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "tf32", "fp8"])
def test_menus_are_small_and_complete(arch: int, dtype: str) -> None:
    menu = tiles(arch, dtype)
    assert 2 <= len(menu) <= 8
    assert len(set(menu)) == len(menu)
    assert all(None not in (t.block_k, t.stages, t.num_warps) for t in menu)
    assert all(16 <= side <= 256 for t in menu for side in (t.block_m, t.block_n, t.block_k or 0))


def test_the_pick_follows_the_waves() -> None:
    """On 132 SMs, 128×256 tiles of 2048×2112 make 2048/128 · 9 = 144 blocks, two waves with the
    second almost empty; 2048×2048 makes 128, one wave. Stream-k pays for tiles, not for waves.
    """
    assert str(pick(Gemm(2048, 2048, 4096), "data_parallel", *H200)) == "128x256x64"
    assert pick(Gemm(16, 4096, 4096), "data_parallel", *H200).block_m == 64
    assert pick(Gemm(256, 256, 16384), "split_k", *A100).split_k > 1
    assert pick(Gemm(8192, 8192, 8192), "split_k", *A100).split_k == 1
    tile = Tile(128, 256, 64, stages=4, num_warps=8)
    one, two = (
        estimated_clocks(Gemm(2048, n, 4096), tile, "data_parallel", *H200) for n in (2048, 2112)
    )
    assert two == pytest.approx(2 * one, rel=1e-9)
    streamed = estimated_clocks(Gemm(2048, 2304, 4096), tile, "stream_k", *H200)
    assert streamed == pytest.approx(two * 144 / 264, rel=0.05)


@given(
    m=st.integers(1, 9000), n=st.integers(1, 9000), k=st.integers(1, 9000),
    dtype=st.sampled_from(["fp16", "fp32", "tf32", "fp8"]), schedule=st.sampled_from(SCHEDULES),
    aligned=st.sampled_from([1, 2, 4, 8, 16]),
)  # fmt: skip
def test_something_is_always_picked(
    m: int, n: int, k: int, dtype: str, schedule: str, aligned: int
) -> None:
    picked = pick(Gemm(m, n, k, dtype=dtype), schedule, *H200, aligned)
    assert picked.split_k == 1 or schedule == "split_k"
    assert picked.split_k == 1 or picked.split_k * (picked.block_k or 1) <= k


@pytest.mark.parametrize(
    ("tile", "schedule", "expected"),
    [
        (Tile(128, 256, 32), "persistent", Tile(128, 256, 32, stages=4, num_warps=8)),
        (Tile(64, 64, num_warps=2), "split_k", Tile(64, 64, 64, stages=4, num_warps=2)),
        (Tile(32, 32), "data_parallel", Tile(32, 32, 64, stages=4, num_warps=4)),
    ],
)
def test_a_tile_is_filled_up_from_the_menu(tile: Tile, schedule: str, expected: Tile) -> None:
    assert complete(tile, "bf16", schedule, (9, 0), 16) == expected


def test_rows_off_16_bytes_get_the_small_menu() -> None:
    aligned, odd = contiguous(Gemm(4096, 4096, 4104)), contiguous(Gemm(4096, 4096, 4100))
    assert (align_bytes(aligned), align_bytes(odd)) == (16, 8)
    assert (
        str(complete(Tile(128, 256), "bf16", "data_parallel", (9, 0), align_bytes(odd)))
        == "128x256x32"
    )
    assert max(t.elements for t in tiles(90, "bf16", align_bytes=8)) == 128 * 64


@pytest.mark.skipif(TRITON < (3, 6), reason="triton 3.2 has no descriptors")
def test_descriptors_from_hopper_on_where_they_can_address_the_operands() -> None:
    def built(
        gemm: Gemm, capability: tuple[int, int], schedule: str = "data_parallel", split_k: int = 1
    ) -> tuple:  # type: ignore[type-arg]
        tile = Tile(128, 128, split_k=split_k)
        config = configure(contiguous(gemm), schedule, tile, capability)
        return config.load_descriptors, config.store_descriptors

    square = Gemm(4096, 4096, 4096)
    assert built(square, (9, 0)) == (True, True)
    assert built(square, (8, 0)) == (False, False)
    assert built(Gemm(4096, 4096, 4100), (9, 0)) == (False, False)
    assert built(Gemm(4096, 4100, 4096, layout="nt"), (9, 0)) == (True, False)
    assert built(square, (9, 0), "split_k", 2) == (True, False)
    assert built(Gemm(4096, 4096, 4096, dtype="fp32"), (9, 0)) == (False, False)
    assert not configure(
        contiguous(square), "stream_k", Tile(64, 64), (9, 0), path="pointers"
    ).load_descriptors


def test_leading_dimensions_that_32_bits_cannot_address() -> None:
    far = Operands(Gemm(64, 64, 64), *(Matrix(False, 2**23, 0, 16, True),) * 3)
    with pytest.raises(InputError, match="a leading dimension of 8388608 elements"):
        configure(far, "data_parallel", Tile(64, 64), (8, 0))


@given(tiles_in_all=st.integers(1, 5000), programs=st.integers(1, 300))
def test_stream_k_leaves_whole_waves(tiles_in_all: int, programs: int) -> None:
    streamed = streamed_tiles(tiles_in_all, programs)
    whole = tiles_in_all - streamed
    assert whole % programs == 0
    assert 0 <= streamed <= min(tiles_in_all, 2 * programs - 1)
    assert (
        streamed == 0 or streamed > programs or whole == 0
    )  # more than one tile each, unless that is all there is
