"""Hand-worked tiles and waves."""

from dataclasses import replace

import pytest

from quantbench.errors import InputError
from quantbench.launch import Launch, Tile
from quantbench.quantization import (
    alignment_bytes,
    credible_waves,
    gemm_alignment_bytes,
    idle_shares,
    kernel_change_words,
    quantize,
)
from quantbench.workload import Gemm, GroupedGemm
from quantbench.workload.ops import LAYOUTS


def test_waves_are_stated_only_of_single_blocks_and_where_the_rate_leaves_room() -> None:
    # 13 · 12 tiles on 108 SMs: two waves, 78 / 108 of whose slots are used, times 1544 / 1664 of
    # padding.
    gemm, tile = Gemm(m=3072, n=1544, k=4096), Tile(256, 128)
    used = 156 / 216 * 1544 / 1664
    waves = credible_waves(gemm, tile, 108, 1, peak_share=used)
    assert (waves.num_waves, waves.efficiency) == (2, pytest.approx(used))
    assert credible_waves(gemm, tile, 108, 1, peak_share=used + 0.01) is None
    assert credible_waves(gemm, tile, 108, 1, peak_share=None) is not None
    assert credible_waves(gemm, tile, 108, 2, peak_share=0.1) is None
    assert credible_waves(gemm, tile, 108, None, peak_share=0.1) is None


def test_idle_shares_leave_room_for_the_rate() -> None:
    gemm, tile = Gemm(m=3072, n=1544, k=4096), Tile(256, 128)

    def words(blocks_per_sm: int | None, peak_share: float | None) -> list[str]:
        return [idle.words for idle in idle_shares(gemm, tile, 108, blocks_per_sm, peak_share)]

    pads, waves = "n = 1544 pads to 1664", "wave 2 of 2 is 44 % full"
    assert words(1, 0.6) == words(1, None) == [waves, pads]
    assert words(1, 0.8) == words(2, 0.6) == words(None, 0.6) == [pads]
    assert words(1, 0.95) == []


def test_fewer_blocks_than_sms_leave_sms_idle_whatever_an_sm_holds() -> None:
    # The product of 52 % idle at 72 % of peak: 128 blocks, two of which fit on an SM, run on 128 of
    # 132 SMs.
    gemm, tile = Gemm(m=512, n=4096, k=4096), Tile(128, 128)
    (idle,) = idle_shares(gemm, tile, 132, 2, peak_share=0.72)
    assert (idle.kind, idle.words) == ("fewer blocks than SMs", "128 blocks for 132 SMs")
    assert idle.share == pytest.approx(4 / 132)
    assert idle_shares(gemm, tile, 132, 2, peak_share=0.98) == ()


@pytest.mark.parametrize(
    ("gemm", "tile", "sms", "held", "tiles", "waves", "last", "tile_efficiency"),
    [
        # NVIDIA, "Matrix Multiplication Background User's Guide": M = 2304, N = 1536 with 256x128
        # tiles is 9 · 12 = 108 tiles, one full wave on the 108 SMs of an A100. One column more is a
        # second wave that takes as long as the first; two blocks per SM hold twice the tiles.
        (Gemm(2304, 1536, 4096), Tile(256, 128), 108, 1, 108, 1, 108, 1.0),
        (Gemm(2304, 1544, 4096), Tile(256, 128), 108, 1, 117, 2, 9, 1544 / 1664),
        (Gemm(2304, 1544, 4096), Tile(256, 128), 108, 2, 117, 1, 117, 1544 / 1664),
        # Split k and batch multiply the blocks.
        (Gemm(128, 4096, 16384, batch=2), Tile(128, 256, split_k=4), 132, 1, 2 * 16 * 4, 1, 128, 1.0),
        (Gemm(1, 1, 1), Tile(64, 64), 1, 1, 1, 1, 1, 1 / 4096),
    ],
)  # fmt: skip
def test_tiles_and_waves(
    gemm: Gemm, tile: Tile, sms: int, held: int, tiles: int, waves: int, last: int, tile_efficiency: float
) -> None:  # fmt: skip
    q = quantize(gemm, tile, sm_count=sms, blocks_per_sm=held)
    assert (q.num_tiles, q.num_waves, q.last_wave_tiles) == (tiles, waves, last)
    assert q.resident_blocks == sms * held
    assert q.tile_efficiency == pytest.approx(tile_efficiency)
    assert q.wave_efficiency == tiles / (waves * sms * held)
    assert q.efficiency == pytest.approx(q.tile_efficiency * q.wave_efficiency)


@pytest.mark.parametrize(
    ("row", "dtype", "expected"),
    [
        (150, "bf16", 4),
        (128, "bf16", 128),
        (108, "fp16", 8),
        (8, "bf16", 16),
        (1, "fp8", 1),
        (7, "fp32", 4),
    ],
)
def test_alignment_of_rows(row: int, dtype: str, expected: int) -> None:
    assert alignment_bytes(row, dtype) == expected


NVFP4 = GroupedGemm((3, 5), n=128, k=128, dtype="nvfp4", layout="tn")


@pytest.mark.parametrize(
    ("work", "aligned"),
    [
        # nt: a is stored m×k, b n×k, c m×n. Only m may be odd without cost.
        (Gemm(m=129, n=128, k=64, layout="nt"), 128),
        (Gemm(m=128, n=128, k=65, layout="nt"), 2),
        (Gemm(m=129, n=128, k=64, layout="tn"), 2),
        (Gemm(m=128, n=128, k=65, layout="tn"), 128),
        (Gemm(m=129, n=128, k=65, layout="nn"), 2),
        # Formats narrower than c are multiplied with rows along k: 8 columns of int8 are 32 bytes of
        # c in every layout.
        *((Gemm(m=129, n=8, k=128, dtype="int8", layout=layout), 32) for layout in LAYOUTS),
        *((Gemm(m=128, n=128, k=4, dtype="fp8", layout=layout), 4) for layout in LAYOUTS),
        # An expert's rows are those of no weight.
        (replace(NVFP4, k=129, dtype="bf16"), 2),
        (NVFP4, 128),
    ],
)
def test_alignment_follows_the_stored_rows(work: Gemm | GroupedGemm, aligned: int) -> None:
    assert gemm_alignment_bytes(work) == aligned


def test_bad_device_is_refused() -> None:
    with pytest.raises(InputError, match=r"^quantize: sm_count = 0; expected an integer from 1"):
        quantize(Gemm(1, 1, 1), Tile(1, 1), sm_count=0)


def test_a_change_of_kernel_names_the_tiles_where_they_differ_and_else_the_kernels() -> None:
    a, b = Launch("a" * 100, tile=Tile(128, 256)), Launch("b", tile=Tile(64, 64))
    assert kernel_change_words(a, b).endswith("from 128x256 to 64x64")
    words = kernel_change_words(a, replace(b, tile=a.tile), longest=21)
    assert words.endswith(f"from {'a' * 10}…{'a' * 10} to b")
