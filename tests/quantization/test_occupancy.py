"""Blocks per SM by hand."""

import pytest

from quantbench.errors import InputError
from quantbench.quantization import resident_blocks


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "smem_bytes", "blocks"),
    [
        # Registers: 128·32 = 4096 a warp, 4 warps in each partition's 16384, 16 warps, two blocks
        # of 8.
        ((8, 0), 256, 128, 0, 2),
        # 92·32 = 2944 → 3072 a warp, 5 warps a partition, 20 warps, two blocks of 7 (21 warps would
        # make it three: kokkos/kokkos 5739).
        ((8, 0), 224, 92, 0, 2),
        # The same block with 80 and 64 registers: 3 and 4 blocks (measured on an RTX 4070 Ti
        # SUPER).
        ((8, 9), 256, 80, 0, 3),
        ((8, 9), 256, 64, 0, 4),
        # Shared memory: 24576 + 1024 kept by the driver = 25600, four times in 102400; one byte
        # more: three times.
        ((8, 9), 128, 32, 24_576, 4),
        ((8, 9), 128, 32, 24_577, 3),
        # A three-stage Hopper product: 168·32 = 5376 a warp, 3 warps a partition, 12 warps: one
        # block of 12.
        ((9, 0), 384, 168, 213_016, 1),
        # The largest block of shared memory on sm_90 just fits.
        ((9, 0), 128, 32, 232_448, 1),
        ((9, 0), 128, 32, 232_449, 0),
        # Volta keeps none for the driver and hands out 256 bytes at a time: 98304 / 32768 = 3.
        ((7, 0), 128, 32, 32_768, 3),
        ((7, 0), 128, 32, 32_769, 2),
        # Warps: 48 on sm_86, 3 blocks of 16. Blocks: 16 there, though the warps would suffice for
        # more.
        ((8, 6), 512, 16, 0, 3),
        ((8, 6), 32, 16, 0, 16),
        # 9 warps are checked as if they were 12: 12·5632 = 67584 > 65536, though 9·5632 would fit.
        ((8, 0), 288, 176, 0, 0),
        ((6, 1), 128, 32, 0, None),  # not guessed
    ],
)
def test_by_hand(
    capability: tuple[int, int], threads: int, registers: int, smem_bytes: int, blocks: int | None
) -> None:
    found = resident_blocks(
        capability, threads=threads, registers=registers, shared_memory_bytes=smem_bytes
    )
    assert found == blocks


@pytest.mark.parametrize(("columns", "blocks"), [(0, 3), (128, 3), (256, 2), (512, 1)])
def test_tensor_memory_limits_blocks_too(columns: int, blocks: int) -> None:
    found = resident_blocks(
        (10, 0),
        threads=128,
        registers=64,
        shared_memory_bytes=66_560,
        tensor_memory_columns=columns,
    )
    assert found == blocks


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", 0), ("threads", 1025), ("registers", 257), ("shared_memory_bytes", -1)],
)
def test_impossible_launches(name: str, value: int) -> None:
    launch = {"threads": 128, "registers": 32, "shared_memory_bytes": 0, name: value}
    with pytest.raises(InputError, match=f"{name} = {value}"):
        resident_blocks((8, 0), **launch)
