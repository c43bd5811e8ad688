"""Names of library kernels seen in the wild, with what they must be read as.

Tiles are in our orientation: (block_m, block_n, block_k, stages). A library's name prints our n first.
"""

import pytest

from quantbench.errors import InputError
from quantbench.launch import Tile
from quantbench.providers.kernel_names import KernelName, parse
from quantbench.quantization import cdiv

# NVIDIA/cutlass issues 1025 and 2286, NVIDIA/TensorRT-LLM 1541, tile-ai/tilus 154, pytorch/pytorch traces, nsys and
# ncu listings in public repositories.
GEMMS = [
    ("volta_fp16_s884gemm_fp16_256x128_ldg8_f2f_nn", "volta", (128, 256, None, None)),
    ("volta_h884gemm_64x64_nt", "volta", (64, 64, None, None)),
    ("volta_h884gemm_128x64_ldg8_nn", "volta", (64, 128, None, None)),
    ("volta_h884gemm_256x64_ldg8_tn", "volta", (64, 256, None, None)),
    ("volta_s884gemm_fp16_64x64_ldg8_nn", "volta", (64, 64, None, None)),
    ("volta_sgemm_64x32_sliced1x4_nn", "volta", (32, 64, None, None)),
    ("volta_sgemm_128x64_tn", "volta", (64, 128, None, None)),
    ("volta_fp16_sgemm_fp16_128x128_nt", "volta", (128, 128, None, None)),
    ("turing_fp16_s1688gemm_fp16_128x64_sliced1x2_ldg8_f2f_tn", "turing", (64, 128, None, None)),
    ("turing_fp16_s1688gemm_fp16_256x128_ldg8_f2f_stages_32x1_nn", "turing", (128, 256, 32, 1)),
    ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn", "ampere", (256, 128, 64, 3)),
    ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "ampere", (256, 128, 64, 3)),
    ("ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x6_nn", "ampere", (64, 64, 64, 6)),
    ("ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_relu_f2f_stages_64x6_tn", "ampere", (64, 64, 64, 6)),
    ("ampere_s16816gemm_fp16_128x64_ldg8_stages_32x6_tn", "ampere", (64, 128, 32, 6)),
    ("ampere_fp16_s1688gemm_fp16_128x128_ldg8_relu_f2f_tn", "ampere", (128, 128, None, None)),
    ("ampere_h16816gemm_256x128_ldg8_stages_64x3_nt_v1", "ampere", (128, 256, 64, 3)),
    ("ampere_int32_i16832gemm_int8_256x128_ldg16_stages_64x3_nt_v1", "ampere", (128, 256, 64, 3)),
    ("ampere_sgemm_32x128_tn", "ampere", (128, 32, None, None)),
    ("ampere_sgemm_128x32_sliced1x4_nt", "ampere", (32, 128, None, None)),
    ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8", "cutlass", (128, 256, 32, 3)),
    ("cutlass_80_tensorop_f16_s16816gemm_relu_f16_128x128_32x4_tn_align8", "cutlass", (128, 128, 32, 4)),
    ("cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1", "cutlass", (128, 256, None, None)),
    ("cutlass_80_tensorop_s1688gemm_64x256_16x4_nn_align4", "cutlass", (256, 64, 16, 4)),
    ("cutlass_80_simt_sgemm_256x128_8x4_nn_align1", "cutlass", (128, 256, 8, 4)),
    ("cutlass_80_tensorop_i16832gemm_s8_256x128_64x3_tn_align16", "cutlass", (128, 256, 64, 3)),
    ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8", "cutlass", (16, 16, 128, 2)),
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
        "sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute_segment_k_off"
        "_kernel__5x_cublas",
        "xmma",
        (256, 128, 64, None),
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
        "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize256x128x32_warpgroupsize2x1x1_execute_segment_k_off"
        "_kernel__5x_cublas",
        "xmma",
        (128, 256, 32, None),
    ),
    (
        "sm89_xmma_gemm_e4m3e4m3_e4m3f32_f32_tn_n_tilesize64x64x64_stage4_warpsize2x2x1_tensor16x8x32"
        "_execute_kernel__5x_cublas",
        "xmma",
        (64, 64, 64, 4),
    ),
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "nvjet", (128, 256, 64, 4)),
    ("nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_NTN", "nvjet", (192, 192, 64, 3)),
    ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", "nvjet", (256, 128, 64, 4)),
    ("nvjet_tst_320x128_64x3_1x2_h_bz_coopB_TNT", "nvjet", (128, 320, 64, 3)),
    ("nvjet_sm90_tst_192x8_64x8_2x1_v_bz_TNT", "nvjet", (8, 192, 64, 8)),
    ("nvjet_tst_40x64_64x16_4x2_v_bz_TNN", "nvjet", (64, 40, 64, 16)),
    ("nvjet_sm90_tst_48x64_64x15_4x2_h_bz_bias_TNN", "nvjet", (64, 48, 64, 15)),
    ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNN", "nvjet", (256, 128, 64, 4)),
    ("nvjet_tst_256x96_64x5_2x1_2cta_v_badd_NNT", "nvjet", (96, 256, 64, 5)),
    ("nvjet_tss_256x128_64x4_1x2_h_bz_coopA_TNT", "nvjet", (128, 256, 64, 4)),
    ("nvjet_qqtst_112x128_128x7_2x1_v_bz_coopA_algo2_TNN", "nvjet", (128, 112, 128, 7)),
    ("nvjet_qqtst_128x256_128x6_2x2_2cta_h_bz_Avec32UE8M0_Bvec32UE8M0_TNT", "nvjet", (256, 128, 128, 6)),
    ("nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_TNT", "nvjet", (256, 128, 64, 6)),
    ("nvjet_sm103_hsh_128x256_64x6_2x1_2cta_v_bz_NNT", "nvjet", (256, 128, 64, 6)),
    ("nvjet_sm120_tst_mma_64x64x128_3_32x32x128_tmaAB_alignCD4_bz_TNNN", "nvjet", (64, 64, 128, 3)),
    ("nvjet_sm120_hss_mma_128x176x64_2_32x88x64_tmaAB_alignCD4_bz_NNNN", "nvjet", (176, 128, 64, 2)),
]


@pytest.mark.parametrize(("name", "family", "tile"), GEMMS, ids=[name for name, _, _ in GEMMS])
def test_a_product_and_its_tile(name: str, family: str, tile: tuple[int, int, int | None, int | None]) -> None:
    read = parse(name)
    assert (read.name, read.family, read.role, read.understood) == (name, family, "gemm", True)
    assert read.tile is not None
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
        ("nvjet_tst_128x8_64x12_2x1_v_bz_splitK_TNT", Tile(8, 128, block_k=64, stages=12)),
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


def test_sliced_is_no_split() -> None:
    # K is split over the warps of one block, not over blocks.
    assert not parse("volta_sgemm_64x32_sliced1x4_nn").split_k_unknown


def test_a_pair_of_sms_shares_the_printed_tile_in_cutlass() -> None:
    # 4096³ on a B200: a grid of 16×32 blocks under the name 256x256x64 (ncu, cuBLAS of CUDA 13.1).
    name = "cutlass3x_sm100_tensorop_h256x256x16gemm_f16_f16_f16_f16_f16_256x256x64_0_nnn_align8_2sm"
    tile = parse(name).tile
    assert tile is not None
    assert cdiv(4096, tile.block_m) * cdiv(4096, tile.block_n) == 16 * 32
    clustered = "cutlass3x_sm100_tensorop_gemm_bf16_bf16_f32_void_bf16_256x256x64_2x2x1_0_ttn_align8_stream_k_2sm"
    assert parse(clustered).tile == Tile(256, 128, block_k=64)
    assert (parse(clustered).cluster, parse(clustered).split_k_unknown) == ((2, 2), True)


# Blocks launched for y = x·Wᵀ with W n×k and m rows, bf16 (torch.profiler, H100 with 132 SMs; W 12352×2560 and kin).
# Tiles count up to whole clusters. None of these fills the device, so no grid was cut to it.
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
def test_nvjet_prints_our_n_first_whatever_the_last_letter(name: str, m: int, n: int, blocks: int) -> None:
    read = parse(name)
    assert read.tile is not None
    assert read.cluster is not None
    tiles_m = cdiv(cdiv(m, read.tile.block_m), read.cluster[0]) * read.cluster[0]
    tiles_n = cdiv(cdiv(n, read.tile.block_n), read.cluster[1]) * read.cluster[1]
    assert tiles_m * tiles_n == blocks


@pytest.mark.parametrize(("m", "grid_x"), [(4096, 256), (4107, 264), (4480, 280), (4608, 288), (4736, 296)])
def test_cutlass_prints_our_n_first(m: int, grid_x: int) -> None:
    # y = x·Wᵀ with W 6144×6144 in bf16 on a GA102, Nsight Systems: grids of (…, 3), rasterised 8 tiles of n deep.
    tile = parse("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8").tile
    assert tile is not None
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
        ("void splitKreduce_kernel<32, 16, int, __half, __half>(int)", "splitk_reduce", "splitk_reduce"),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize64x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4"
            "_execute_split_k_kernel__5x_cublas",
            "splitk_reduce",
            "splitk_reduce",
        ),
        ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8, 9, false, float>", "gemv", "gemm"),
        ("std::enable_if<true, void>::type internal::gemvx::kernel<int, int, __nv_bfloat16>", "gemv", "gemm"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "gemv", "gemm"),
        ("triton_tem_fused_mm_t_view_14", "triton", "gemm"),
        ("triton_poi_fused_cat_3", "triton", "other"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 11, false>", "softmax", "softmax"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>", "softmax", "softmax"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "elementwise",
            "other",
        ),
        ("void flash::compute_attn_ws<flash::FlashAttnFwdSm90>", "flash", "attention"),
    ],
)
def test_kernels_without_a_tile(name: str, family: str, role: str) -> None:
    assert parse(name) == KernelName(name, family, role)


@pytest.mark.parametrize(
    ("name", "family", "tile"),
    [
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)128, (int)128, (int)32, (int)4>>",
            "flash",
            Tile(128, 32, num_warps=4),
        ),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, 4>, true>", "flash", Tile(64, 64, num_warps=4)),
        (
            "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<(int)64, (int)64, (int)128,"
            " (int)8, (int)2>>",
            "flash",
            Tile(64, 128, num_warps=8),
        ),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Kernel)", "efficient", Tile(64, 128)),
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
    assert parse(name) == KernelName(name, family, "attention", tile)


@pytest.mark.parametrize(
    ("name", "family", "role"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz...", "nvjet", "gemm"),  # cut off by a table
        ("nvjet_sss_tf32_128x256_TNT", "nvjet", "gemm"),
        ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_25", "cutlass", "gemm"),
        ("sm90_xmma_gemm_f32f32_f32_nn_n_tilesize128x128x32", "xmma", "gemm"),
        ("void magma_sgemmEx_kernel<float, float, float, true, false, 6, 4, 6, 3, 4>(int)", "other", "gemm"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0, 0, 4096, 1024>", "other", "gemm"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "other", "other"),
        ("", "other", "other"),
    ],
)
def test_what_is_not_understood_is_kept_and_said(name: str, family: str, role: str) -> None:
    assert parse(name) == KernelName(name, family, role, understood=False)


def test_only_nvjet_walks_over_tiles() -> None:
    assert parse("nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_NTN").persistent
    assert not parse("ampere_sgemm_32x128_tn").persistent


def test_family_and_role_are_closed_lists() -> None:
    with pytest.raises(InputError, match="KernelName: family = 'cublas'; expected one of nvjet, "):
        KernelName("x", family="cublas")
    with pytest.raises(InputError, match="KernelName: role = 'matmul'; expected one of gemm, "):
        KernelName("x", role="matmul")
