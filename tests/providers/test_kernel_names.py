"""Names of library kernels seen in the wild, with what they must be read as.

Tiles are in our orientation: (block_m, block_n, block_k, stages). A library's name prints our n
first.
"""

from collections.abc import Iterator
from csv import DictReader
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quantbench.launch import Tile
from quantbench.providers.identity import split_k_of
from quantbench.providers.kernel_names import KernelName, parse
from quantbench.quantization import cdiv
from quantbench.workload import Gemm

HERE = Path(__file__)
SAMPLE = HERE.parents[1] / "data" / "neusight_gemms.csv"
# Kept beside the checkout, not in it.
WHOLE = HERE.parents[3] / "shared" / "data"

# NVIDIA/cutlass issues 1025 and 2286, NVIDIA/TensorRT-LLM 1541, tile-ai/tilus 154, pytorch/pytorch
# traces, nsys and ncu listings in public repositories.
GEMMS = [
    ("volta_fp16_s884gemm_fp16_256x128_ldg8_f2f_nn", "volta", (128, 256, None, None)),
    ("volta_h884gemm_64x64_nt", "volta", (64, 64, None, None)),
    ("volta_fp16_sgemm_fp16_128x128_nt", "volta", (128, 128, None, None)),
    ("turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_stages_32x1_nn", "turing", (128, 256, 32, 1)),
    ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn", "ampere", (256, 128, 64, 3)),
    (
        "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_relu_f2f_stages_64x6_tn",
        "ampere",
        (64, 64, 64, 6),
    ),
    ("ampere_s16816gemm_fp16_128x64_ldg8_stages_32x6_tn", "ampere", (64, 128, 32, 6)),
    ("ampere_h16816gemm_256x128_ldg8_stages_64x3_nt_v1", "ampere", (128, 256, 64, 3)),
    ("ampere_int32_i16832gemm_int8_256x128_ldg16_stages_64x3_nt_v1", "ampere", (128, 256, 64, 3)),
    (
        "Cijk_Ailk_Bljk_HHS_BH_MT128x96x32_MI16x16x16x1_SN_1LDSB1_GSU1_GSUASB_ISA1151_WSGRA1_WS32_WG32_4_1_WGM8",
        "tensile",
        (96, 128, 32, None),
    ),
    (
        "a8w8_blockscale_1x128x128_256x16x64x256_16x16_16x16_1x1_16x16x1_16x16x1_1x16x1x16_4_1x1_intrawave_v1",
        "ck",
        (16, 64, 256, None),
    ),
    (
        "a8w8_rowwise_256x32x64x512_16x16_1x2_32x8x1_32x8x1_1x32x1x8_8x8x1_1x2_intrawave_v3",
        "ck",
        (32, 64, 512, None),
    ),
    (
        "a8w8_blockscale_cktile_192x256x128_4x2x1_16x16x128_intrawave_0x1x0_1",
        "ck",
        (192, 256, 128, None),
    ),
    (
        "a8w8_bpreshuffle_cktile_0x0x8x4x1x0x0x0x0x1_96x128x256_1x4x1_16x16x128_default",
        "ck",
        (96, 128, 256, None),
    ),
    ("_ZN5aiter42f4gemm_bf16_per1x32Fp4_BpreShuffle_160x256E", "aiter", (160, 256, None, None)),
    ("_ZN5aiter24bf16gemm_bf16_tn_256x256E", "aiter", (256, 256, None, None)),
    ("flydsl_bpreshuflle_16x64x512_F8_F8_B16_0x3x0x2_default", "aiter", (16, 64, 512, None)),
    ("opus_gemm_512x128x256x64_2x4_16x16x32_0x0x0_nooob_4g_safe", "aiter", (128, 256, 64, None)),
    (
        "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8",
        "cutlass",
        (128, 256, 32, 3),
    ),
    (
        "cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1",
        "cutlass",
        (128, 256, None, None),
    ),
    ("cutlass_80_tensorop_s1688gemm_64x256_16x4_nn_align4", "cutlass", (256, 64, 16, 4)),
    ("cutlass_80_simt_sgemm_256x128_8x4_nn_align1", "cutlass", (128, 256, 8, 4)),
    ("cutlass_80_tensorop_i16832gemm_s8_256x128_64x3_tn_align16", "cutlass", (128, 256, 64, 3)),
    (
        "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8",
        "cutlass",
        (16, 16, 128, 2),
    ),
    (
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_i161616gemm_s8_forwardCompat_128x128_32x2_tn_align4>"
        "(T1::Params)",
        "cutlass",
        (128, 128, 32, 2),
    ),
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x64_32x4_tn_align8>"
        "(cutlass_80_tensorop_f16_s16816gemm_relu_f16_256x64_32x4_tn_align8::Params)",
        "cutlass",
        (64, 256, 32, 4),
    ),
    (
        "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_void_bf16_128x128x64_1x1x1_0_tnn_align8"
        "_warpspecialized_pingpong_epi_tma",
        "cutlass",
        (128, 128, 64, None),
    ),
    (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off"
        "_kernel__5x_cublas",
        "xmma",
        (128, 128, 64, None),
    ),
    (
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4"
        "_execute_kernel__5x_cublas",
        "xmma",
        (128, 128, 8, 3),
    ),
    (
        "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize96x128x32_stage4_warpsize2x2x1_tensor16x8x16_kernel",
        "xmma",
        (128, 96, 32, 4),
    ),
    (
        "sm89_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n_tilesize64x64x64_stage4_warpsize2x2x1_tensor16x8x32"
        "_execute_kernel__5x_cublas",
        "xmma",
        (64, 64, 64, 4),
    ),
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "nvjet", (128, 256, 64, 4)),
    ("nvjet_sm90_tst_48x64_64x15_4x2_h_bz_bias_TNN", "nvjet", (64, 48, 64, 15)),
    ("nvjet_tst_256x96_64x5_2x1_2cta_v_badd_NNT", "nvjet", (96, 256, 64, 5)),
    ("nvjet_qqtst_112x128_128x7_2x1_v_bz_coopA_algo2_TNN", "nvjet", (128, 112, 128, 7)),
    (
        "nvjet_qqtst_128x256_128x6_2x2_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT",
        "nvjet",
        (256, 128, 128, 6),
    ),
    ("nvjet_sm103_hsh_128x256_64x6_2x1_2cta_v_bz_NNT", "nvjet", (256, 128, 64, 6)),
    ("nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN", "nvjet", (64, 64, 128, 3)),
    (
        "nvjet_sm120_hss_mma_128x176x64_2_32x88x64_tmaAB_alignCD4_bz_NNNN",
        "nvjet",
        (176, 128, 64, 2),
    ),
]


@pytest.mark.parametrize(("name", "family", "tile"), GEMMS, ids=[name for name, _, _ in GEMMS])
def test_a_product_and_its_tile(
    name: str, family: str, tile: tuple[int, int, int | None, int | None]
) -> None:
    read = parse(name)
    assert (read.family, read.role) == (family, "gemm")
    assert (read.tile.block_m, read.tile.block_n, read.tile.block_k, read.tile.stages) == tile
    assert read.tile.split_k == 1
    assert not read.split_k_unknown


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", (2, 1)),
        ("nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_NTN", (1, 2)),
        ("nvjet_tst_40x64_64x16_4x2_v_bz_TNN", (2, 4)),
        ("nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN", None),
        ("ampere_sgemm_32x128_tn", None),
    ],
)
def test_a_cluster_follows_its_tile(name: str, cluster: tuple[int, int] | None) -> None:
    assert parse(name).cluster == cluster


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("nvjet_sm90_tst_32x64_64x16_4x1_v_bz_splitK_TNN", Tile(64, 32, block_k=64, stages=16)),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_splitK_NTT", Tile(128, 256, block_k=64, stages=4)),
        (
            "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x128x64_warpgroupsize1x1x1_execute_segment_k_on"
            "_kernel__5x_cublas",
            Tile(128, 64, block_k=64),
        ),
    ],
)
def test_split_k_without_a_number_is_said(name: str, tile: Tile) -> None:
    read = parse(name)
    assert read.split_k_unknown
    assert read.tile == tile


@pytest.mark.parametrize(
    ("name", "split_k", "unknown"),
    [
        # Tensile's global split-u; 0 or none where hipBLASLt takes it at launch or its stream-k has
        # no such number
        (
            "Custom2_Cijk_Ailk_Bljk_HHS_BH_MT128x32x64_MI32x32x8x1_SN_1LDSB0_GRVW8_GSU18_LPB8_WG128_2_1",
            18,
            False,
        ),
        (
            "Cijk_Alik_Bljk_BBS_BH_Bias_UserArgs_MT64x48x128_MI16x16x1_GRVWB8_GSUAMBSK_ISA942_SK0_WS64_WG16_4_4",
            1,
            True,
        ),
        (
            "Cijk_Alik_Bljk_BBS_BH_UserArgs_MT256x208x64_MI16x16x1_GSU0_GSUAMB_ISA950_SK3_SKFTR0_WS64_WG64_4_1.kd",
            1,
            True,
        ),
        (
            "flydsl_gemm5_abf16_wbf16_bf16_t16x64x64_split_k9_block_m_warp1_block_n_warp2_c_to_ldsFalse_gfx950",
            9,
            False,
        ),
        ("flydsl_bpreshuflle_16x64x512_F8_F8_B16_0x3x0x2_default_ks4", 4, False),
        ("_ZN5aiter39bf16gemm_fp32bf16_tn_32x64_splitk_cleanE", 1, True),
        ("opus_gemm_flatmm_splitk_256x32x32x128_2x1_16x16x32_0x0x0_wgpcu2_nooob", 1, True),
    ],
)
def test_split_k_of_amd_kernels(name: str, split_k: int, unknown: bool) -> None:
    read = parse(name)
    assert (read.tile.split_k, read.split_k_unknown) == (split_k, unknown)
    work = Gemm(4096, 4096, 4096)
    tiles = (cdiv(4096, read.tile.block_n), cdiv(4096, read.tile.block_m), 1)
    if read.family == "tensile" or split_k > 1:  # not from the grid
        assert split_k_of(tiles, read, work, splitting=False) == (None if unknown else split_k)


def test_warps_of_amd_kernels_have_64_threads() -> None:
    ck = parse("a8w8_rowwise_128x16x32x128_16x16_1x1_8x16x1_8x16x1_1x16x1x8_4x4x1_1x1_interwave_v2")
    tile = parse("a8w8_blockscale_cktile_192x256x128_4x2x1_16x16x128_intrawave_0x1x0_1")
    tensile = parse("Cijk_Alik_Bljk_BBS_BH_MT64x48x128_MI16x16x1_GSU2_ISA942_WS64_WG16_4_4")
    assert [name.tile and name.tile.num_warps for name in (ck, tile, tensile)] == [2, 8, 4]


def test_tensile_prints_our_n_first() -> None:
    # y = x·Wᵀ with 512 rows, n = 768, k = 3072 on an MI300X: MT64x48x128 ran 264 workgroups in a
    # split of two.
    tile = parse("Cijk_Alik_Bljk_BBS_BH_MT64x48x128_MI16x16x1_GSU2_ISA942_WS64_WG16_4_4").tile
    assert cdiv(768, tile.block_n) * cdiv(512, tile.block_m) * tile.split_k == 264


def _launches(row: dict[str, Any]) -> tuple[str, Gemm, tuple[int, int, int], bool]:
    """Kernel, product, grid and whether a reduction kernel followed, of a row with our names of the
    columns.
    """
    m, n, k, batch, x, y, z = (
        int(row[c]) for c in ("m", "n", "k", "batch", "grid_x", "grid_y", "grid_z")
    )
    layout = "nt" if row["op"] == "linear" else "nn"
    work = Gemm(m, n, k, batch=batch, dtype="fp32", layout=layout)
    return row["kernel"], work, (x, y, z), "splitkreduce" in row["kernels"]


def _sampled() -> Iterator[dict[str, Any]]:
    names = {
        "OPName": "op",
        "B": "batch",
        "M": "m",
        "K": "n",
        "N": "k",
        "Kernel Name": "kernel",
        "Kernels": "kernels",
    }
    names |= {f"Grid {axis}": f"grid_{axis}" for axis in "xyz"}
    with SAMPLE.open(encoding="utf-8") as stream:
        for row in DictReader(stream):
            yield {names[column]: value for column, value in row.items() if column in names}


def _grid_is_told(row: dict[str, Any]) -> bool:
    kernel, work, grid, reduced = _launches(row)
    name = parse(kernel)
    across, down = cdiv(work.n, name.tile.block_n), cdiv(work.m, name.tile.block_m)
    split = split_k_of(grid, name, work, splitting=reduced)
    if name.family == "cublas":  # spreads its tiles over x, y and z alike
        return grid[0] * grid[1] * grid[2] == across * down * work.batch * (split or 0)
    return grid == (across, down, work.batch * (split or 0))


def test_cublas_sgemm_launches_a_block_per_tile_batch_and_split() -> None:
    rows = list(_sampled())
    assert [row for row in rows if not _grid_is_told(row)] == []
    assert {row["op"] for row in rows} == {"linear", "bmm"}


@pytest.mark.skipif(not WHOLE.exists(), reason="no ../shared beside the checkout")
@pytest.mark.slow
def test_every_grid_of_the_measured_products_is_what_the_name_tells() -> None:
    rows = pq.read_table(WHOLE / "neusight_fp32.parquet").to_pylist()
    products = [row for row in rows if row["op"] != "softmax"]
    wrong = [row for row in products if not _grid_is_told(row)]
    assert wrong == []
    assert {row["gpu"] for row in products if row["op"] == "linear"} >= {
        "v100-pcie-32gb",
        "a100-pcie-40gb",
    }


@pytest.mark.skipif(not WHOLE.exists(), reason="no ../shared beside the checkout")
def test_every_tuned_kernel_of_aiter_has_a_tile() -> None:
    table = pq.read_table(WHOLE / "amd_tuned_gemms.parquet", columns=["kernel", "split_k"])
    kernels = {row["kernel"]: row["split_k"] for row in table.to_pylist()}
    # Names of libraries, not of kernels: torch, Triton, hipBLASLt's solution of a skinny product.
    assert {name for name in kernels if parse(name).tile is None} == {
        "auto",
        "native",
        "sol2",
        "triton",
    }
    stated = {
        name: tile.split_k for name in kernels if (tile := parse(name).tile) and "_split_k" in name
    }
    assert stated == {name: kernels[name] for name in stated}


def test_sliced_is_no_split() -> None:
    # K is split over the warps of one block, not over blocks.
    assert not parse("volta_sgemm_64x32_sliced1x4_nn").split_k_unknown


def test_a_pair_of_sms_shares_the_printed_tile_in_cutlass() -> None:
    # 4096³ on a B200: a grid of 16×32 blocks under the name 256x256x64 (ncu, cuBLAS of CUDA 13.1).
    name = (
        "cutlass3x_sm100_tensorop_h256x256x16gemm_f16_f16_f16_f16_f16_256x256x64_0_nnn_align8_2sm"
    )
    tile = parse(name).tile
    assert cdiv(4096, tile.block_m) * cdiv(4096, tile.block_n) == 16 * 32
    clustered = "cutlass3x_sm100_tensorop_gemm_bf16_bf16_f32_void_bf16_256x256x64_2x2x1_0_ttn_align8_stream_k_2sm"
    assert parse(clustered).tile == Tile(256, 128, block_k=64)
    assert (parse(clustered).cluster, parse(clustered).split_k_unknown) == ((2, 2), True)


# Blocks launched for y = x·Wᵀ with W n×k and m rows, bf16 (torch.profiler, H100 with 132 SMs; W
# 12352×2560 and kin). Tiles count up to whole clusters. None of these fills the device, so no grid
# was cut to it.
NVJET_GRIDS = [
    ("nvjet_sm90_tst_128x32_64x10_4x1_v_bz_TNT", 32, 12288, 96),
    ("nvjet_sm90_tst_128x32_64x10_4x1_v_bz_TNT", 32, 12352, 100),
    ("nvjet_sm90_tst_96x64_64x10_2x1_v_bz_TNN", 64, 12288, 128),
    ("nvjet_sm90_tst_96x64_64x10_2x1_v_bz_TNN", 64, 12352, 130),
    ("nvjet_sm90_tst_96x128_64x7_2x1_v_bz_TNN", 128, 12352, 130),
    ("nvjet_sm90_tst_80x64_64x11_2x1_v_bz_TNN", 64, 10240, 128),
    ("nvjet_sm90_tst_144x128_64x6_2x1_v_bz_TNN", 128, 18432, 128),
    ("nvjet_sm90_tst_192x32_64x7_4x1_v_bz_TNT", 32, 18432, 96),
    ("nvjet_sm90_tst_256x8_64x6_4x1_v_bz_TNT", 4, 18432, 72),
    ("nvjet_sm90_tst_64x8_64x16_1x4_h_bz_TNT", 128, 64, 16),
    ("nvjet_sm90_tst_64x64_64x13_4x2_h_bz_TNT", 128, 2560, 80),
]


@pytest.mark.parametrize(("name", "m", "n", "blocks"), NVJET_GRIDS)
def test_nvjet_prints_our_n_first_whatever_the_last_letter(
    name: str, m: int, n: int, blocks: int
) -> None:
    read = parse(name)
    tiles_m = cdiv(cdiv(m, read.tile.block_m), read.cluster[0]) * read.cluster[0]
    tiles_n = cdiv(cdiv(n, read.tile.block_n), read.cluster[1]) * read.cluster[1]
    assert tiles_m * tiles_n == blocks


@pytest.mark.parametrize(
    ("m", "grid_x"), [(4096, 256), (4107, 264), (4480, 280), (4608, 288), (4736, 296)]
)
def test_cutlass_prints_our_n_first(m: int, grid_x: int) -> None:
    # y = x·Wᵀ with W 6144×6144 in bf16 on a GA102, Nsight Systems: grids of (…, 3), rasterised 8
    # tiles of n deep.
    tile = parse("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8").tile
    assert cdiv(6144, tile.block_n) == 8 * 3
    assert cdiv(m, tile.block_m) * 8 == grid_x


@pytest.mark.parametrize(
    ("name", "family", "role"),
    [
        (
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false>",
            "splitk_reduce",
            "splitk_reduce",
        ),
        (
            "void splitKreduce_kernel<32, 16, int, __half, __half>(int)",
            "splitk_reduce",
            "splitk_reduce",
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4"
            "_execute_split_k_kernel__5x_cublas",
            "splitk_reduce",
            "splitk_reduce",
        ),
        ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8, 9, false, float>", "gemv", "gemm"),
        (
            "std::enable_if<true, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>",
            "gemv",
            "gemm",
        ),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "gemv", "gemm"),
        ("triton_tem_fused_mm_t_view_14", "triton", "gemm"),
        ("triton_poi_fused_cat_3", "triton", "other"),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false>",
            "softmax",
            "softmax",
        ),
        (
            "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>",
            "softmax",
            "softmax",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "elementwise",
            "other",
        ),
        ("void flash::compute_attn_ws<flash::FlashAttnFwdSm90>", "flash", "attention"),
    ],
)
def test_kernels_without_a_tile(name: str, family: str, role: str) -> None:
    assert parse(name) == KernelName(family, role)


@pytest.mark.parametrize(
    ("name", "family", "tile"),
    [
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)128, (int)128, (int)32, (int)4>>",
            "flash",
            Tile(128, 32, num_warps=4),
        ),
        (
            "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, 4>, true>",
            "flash",
            Tile(64, 64, num_warps=4),
        ),
        (
            "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<(int)64, (int)64, (int)128,"
            " (int)8, (int)2>>",
            "flash",
            Tile(64, 128, num_warps=8),
        ),
        (
            "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Kernel)",
            "efficient",
            Tile(64, 128),
        ),
        ("fmha_cutlassB_bf16_aligned_128x128_k128_sm80", "efficient", Tile(128, 128)),
        (
            "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_6_128x64x64_4x1x1_cga1x1x1_kernel0_0",
            "cudnn",
            Tile(128, 64),
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x256_4x1x1_kernel0_0",
            "cudnn",
            Tile(64, 128),
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm80_flash_bprop_wmma_f16_knob_2_64x128x64_1x4x1_cga1x1x1_kernel0_0",
            "cudnn",
            None,
        ),
    ],
)
def test_attention_kernels(name: str, family: str, tile: Tile | None) -> None:
    assert parse(name) == KernelName(family, "attention", tile)


@pytest.mark.parametrize(
    ("name", "family", "role"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz...", "nvjet", "gemm"),  # cut off by a table
        ("nvjet_sss_tf32_128x256_TNT", "nvjet", "gemm"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_M", "tensile", "gemm"),
        ("ampere_sgemm_0x128_tn", "cublas", "gemm"),
        ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_25", "cutlass", "gemm"),
        ("sm90_xmma_gemm_f32f32_f32_nn_n_tilesize128x128x32", "xmma", "gemm"),
        (
            "void magma_sgemmEx_kernel<float, float, float, true, false, 6, 4, 6, 3, 4>(int)",
            "other",
            "gemm",
        ),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0, 0, 4096, 1024>", "other", "gemm"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "other", "other"),
        ("", "other", "other"),
    ],
)
def test_nothing_is_guessed_from_a_name_that_no_grammar_fits(
    name: str, family: str, role: str
) -> None:
    assert parse(name) == KernelName(family, role)


def test_kernels_that_walk_over_tiles() -> None:
    assert parse("nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_NTN").persistent
    assert parse("opus_gemm_persistent_512x128x128x64_2x4_16x16x32_0x0x0").persistent
    assert not parse("ampere_sgemm_32x128_tn").persistent
