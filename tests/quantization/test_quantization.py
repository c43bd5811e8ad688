"""Hand-worked tiles and waves."""

import ast
from pathlib import Path

import pytest

from quantbench.errors import InputError
from quantbench.launch import Launch, Tile
from quantbench.quantization import (
    alignment_bytes,
    alignment_words,
    cdiv,
    credible_waves,
    gemm_alignment_bytes,
    idle_shares,
    kernel_change_words,
    quantize,
)
from quantbench.workload import Gemm, GroupedGemm
from quantbench.workload.ops import LAYOUTS


def test_one_full_wave_of_the_a100() -> None:
    # NVIDIA, "Matrix Multiplication Background User's Guide": M = 2304, N = 1536 with 256x128 tiles
    # is 9 · 12 = 108 tiles, one full wave on the 108 SMs of an A100.
    q = quantize(Gemm(m=2304, n=1536, k=4096), Tile(256, 128), sm_count=108)
    assert (q.num_tiles, q.num_waves, q.last_wave_tiles) == (108, 1, 108)
    assert q.tile_efficiency == 1.0
    assert q.wave_efficiency == 1.0
    assert q.efficiency == 1.0


def test_one_column_more_is_a_second_wave_that_is_nearly_empty() -> None:
    # 13 column tiles now: 117 tiles, 9 of them in a second wave, which takes as long as the first.
    q = quantize(Gemm(m=2304, n=1544, k=4096), Tile(256, 128), sm_count=108)
    assert (q.num_tiles, q.num_waves, q.last_wave_tiles) == (117, 2, 9)
    assert q.wave_efficiency == 117 / 216
    assert q.tile_efficiency == 2304 * 1544 / (9 * 256 * 13 * 128)


def test_two_blocks_per_sm_hold_twice_the_tiles() -> None:
    q = quantize(Gemm(m=2304, n=1544, k=4096), Tile(256, 128), sm_count=108, blocks_per_sm=2)
    assert (q.num_waves, q.last_wave_tiles, q.resident_blocks) == (1, 117, 216)


def test_waves_are_stated_only_of_single_blocks_and_where_the_rate_leaves_room() -> None:
    # 13 · 12 tiles on 108 SMs: two waves, 78 / 108 of whose slots are used, times 1544 / 1664 of
    # padding.
    gemm, tile = Gemm(m=3072, n=1544, k=4096), Tile(256, 128)
    used = 156 / 216 * 1544 / 1664
    waves = credible_waves(gemm, tile, 108, 1, peak_share=used)
    assert waves is not None
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
    assert (idle.kind, idle.words, idle.share) == (
        "fewer blocks than SMs",
        "128 blocks for 132 SMs",
        pytest.approx(4 / 132),
    )
    assert idle_shares(gemm, tile, 132, 2, peak_share=0.98) == ()


def test_v100_80_sms() -> None:
    # 4096 x 1280 with 128x128 tiles: 32 · 10 = 320 tiles, four waves of 80.
    q = quantize(Gemm(m=4096, n=1280, k=1024, dtype="fp16"), Tile(128, 128), sm_count=80)
    assert (q.num_tiles, q.num_waves, q.last_wave_tiles, q.wave_efficiency) == (320, 4, 80, 1.0)


def test_h100_132_sms_split_k_and_batch_multiply_the_blocks() -> None:
    gemm = Gemm(m=128, n=4096, k=16384, batch=2)
    q = quantize(gemm, Tile(128, 256, split_k=4), sm_count=132)
    assert q.num_tiles == 2 * 1 * 16 * 4
    assert (q.num_waves, q.last_wave_tiles) == (1, 128)


def test_one_tile_too_large() -> None:
    q = quantize(Gemm(m=1, n=1, k=1), Tile(64, 64), sm_count=1)
    assert (q.num_tiles, q.num_waves, q.last_wave_tiles, q.tile_efficiency) == (1, 1, 1, 1 / 4096)


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


def test_alignment_follows_the_stored_rows() -> None:
    # nt: a is stored m×k, b n×k, c m×n. Only m may be odd without cost.
    assert gemm_alignment_bytes(Gemm(m=129, n=128, k=64, layout="nt")) == 128
    assert gemm_alignment_bytes(Gemm(m=128, n=128, k=65, layout="nt")) == 2
    assert gemm_alignment_bytes(Gemm(m=129, n=128, k=64, layout="tn")) == 2
    assert gemm_alignment_bytes(Gemm(m=128, n=128, k=65, layout="tn")) == 128
    assert gemm_alignment_bytes(Gemm(m=129, n=128, k=65, layout="nn")) == 2
    # Formats narrower than c are multiplied with rows along k: 8 columns of int8 are 32 bytes of c
    # in every layout.
    for layout in LAYOUTS:
        assert gemm_alignment_bytes(Gemm(m=129, n=8, k=128, dtype="int8", layout=layout)) == 32
        assert gemm_alignment_bytes(Gemm(m=128, n=128, k=4, dtype="fp8", layout=layout)) == 4
    # An expert's rows are those of no weight.
    assert gemm_alignment_bytes(GroupedGemm((3, 5), n=128, k=129, dtype="bf16", layout="tn")) == 2
    assert (
        gemm_alignment_bytes(GroupedGemm((3, 5), n=128, k=128, dtype="nvfp4", layout="tn")) == 128
    )


def test_cdiv_is_exact_for_large_integers() -> None:
    assert cdiv(2**62 + 1, 2) == 2**61 + 1


def test_bad_device_is_refused() -> None:
    with pytest.raises(InputError, match=r"^quantize: sm_count = 0; expected an integer from 1"):
        quantize(Gemm(1, 1, 1), Tile(1, 1), sm_count=0)


def test_a_change_of_kernel_names_the_tiles_where_they_differ_and_else_the_kernels() -> None:
    a, b = Launch("a", tile=Tile(128, 256)), Launch("b", tile=Tile(64, 64))
    assert kernel_change_words(a, b) == "the library changed from 128x256 to 64x64"
    assert (
        kernel_change_words(a, Launch("b", tile=Tile(128, 256)))
        == "the library changed from a to b"
    )
    assert (
        kernel_change_words(Launch("k" * 100), b, longest=21)
        == f"the library changed from {'k' * 10}…{'k' * 10} to b"
    )


def test_alignment_in_words() -> None:
    assert alignment_words(4) == "rows aligned to 4 bytes, not 16"
    assert alignment_words(64, 128, verb="were") == "rows were aligned to 64 bytes, not 128"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [" pads to ", "the library changed", "aligned to ", " blocks for "]
)
def test_the_words_for_an_edge_are_in_one_module(words: str) -> None:
    package = Path(__file__).resolve().parents[2] / "quantbench"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for formatted in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(formatted, ast.JoinedStr)
        for part in formatted.values
        if isinstance(part, ast.Constant) and words in part.value
    }
    assert found == {"quantization.py"}
