"""Parses the name of a GPU kernel into its library, role and tile (`parse`).

Names of library kernels are not documented. The grammars (regular expressions) here were derived
from real names, and checked against the grids of the launches. The names and grids are listed, with
their sources, in tests/providers/test_kernel_names.py. A name that fits no grammar has no tile.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod

from quantbench.errors import InputError
from quantbench.launch import Tile

#: threads of a wavefront, AMD's counterpart of a warp, on the GPUs of AMD's libraries (CDNA)
_WAVEFRONT = 64


@dataclass(frozen=True)
class KernelName:
    """Properties that were parsed from the name of a kernel.

    family: library or group of kernels, from `_KINDS`. For most of cuBLAS's own kernels it is the
        architecture, such as ampere.
    role: gemm, splitk_reduce, attention, softmax or other.
    tile: tile for row-major m and n (see the note above `_KINDS`); None if the name states no tile.
        For attention, block_m counts queries and block_n counts keys.
    cluster: number of blocks in a cluster along (m, n); None if the name states none.
    split_k_unknown: whether the reduction is, or may be, split over a number of blocks that the
        name does not state. tile.split_k is then 1.
    persistent: whether the grid has at most the resident blocks, which loop over tiles. The grid of
        such a kernel does not give the number of tiles.
    """

    family: str
    role: str
    tile: Tile | None = None
    cluster: tuple[int, int] | None = None
    split_k_unknown: bool = False
    persistent: bool = False


def parse(name: str) -> KernelName:
    """Parses the demangled name of a kernel, as the profiler prints it.

    The name may begin with `void`. quantbench's own kernels are not parsed, because their providers
    state the tile.

    >>> parse("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn").tile
    Tile(block_m=256, block_n=128, block_k=64, split_k=1, stages=3, num_warps=None)
    """
    bare = name.removeprefix("void ").strip()
    for family, role, sign, *grammars in _KINDS:
        match = next(filter(None, (re.search(grammar, bare) for grammar in grammars)), None)
        if match is not None:
            try:
                return _read(family, role, match)
            except InputError:  # the name states impossible sizes
                return KernelName(family, role)
        if sign and re.search(sign, bare):
            return KernelName(family, role)
    return KernelName("other", "other")


def _read(family: str, role: str, match: re.Match[str]) -> KernelName:
    """Converts the named groups of a matched grammar to properties of the kernel.

    The groups m, n, k, split and stages describe the tile, warps or threads the block, and
    cluster_m and cluster_n the cluster. The group `options` is a part of the name with further
    properties, which this function parses.
    """
    stated = {group: text for group, text in match.groupdict().items() if text is not None}
    options = stated.get("options", "")
    # cuBLAS's own kernels state block_k and the number of stages in their options.
    if in_options := re.search(r"_stages_(?P<k>\d+)x(?P<stages>\d+)", options):
        stated |= in_options.groupdict()
    sizes = {group: int(text) for group, text in stated.items() if text.isdigit()}
    warps = None
    if "threads" in sizes:
        warps = sizes["threads"] // _WAVEFRONT
    if "warps" in stated:
        warps = prod(map(int, stated["warps"].split("x")))
    tile = Tile(
        sizes["m"], sizes["n"], sizes.get("k"), sizes.get("split", 1), sizes.get("stages"), warps
    )
    if "2sm" in options.split("_"):
        # Names with 2sm state the tile of a pair of blocks. On a B200 with cuBLAS 13, 256x256x64
        # ran 16x32 blocks for an output of 4096x4096.
        tile = replace(tile, block_n=tile.block_n // 2)
    if family == "tensile":
        return _with_options(KernelName(family, role, tile), tile, options)
    # `sliced1x4` is not split-k: four warps of one block share the reduction and add up their
    # partial sums in shared memory.
    splits = re.search(r"splitk|stream_k|segment_k_on", options, re.IGNORECASE) is not None
    cluster = None
    if sizes.get("cluster_n"):  # 0x0 means that the cluster is chosen at launch
        cluster = sizes["cluster_m"], sizes["cluster_n"]
    return KernelName(
        stated.get("family", family),
        role,
        tile,
        cluster,
        split_k_unknown=splits,
        persistent=family == "nvjet" or "persistent" in options,
    )


def _with_options(name: KernelName, tile: Tile, options: str) -> KernelName:
    """Adds the properties in Tensile's options, such as `_GSU2` and `_WG16_4_4`."""

    def option(letters: str) -> list[int]:
        """Returns the numbers after the letters of an option; [0] if it is missing."""
        found = re.search(rf"_{letters}(\d+(?:_\d+)*)(?=_|$)", options)
        if found is None:
            return [0]
        return [int(number) for number in found[1].split("_")]

    # GSU (global split-u) is Tensile's split_k. hipBLASLt's kernels with user arguments get their
    # split_k at launch, so a name with GSU0 or without GSU does not state it. Stream-k (SK > 0)
    # divides tiles among a fixed number of blocks.
    split = option("GSU")[0]
    wave = option("WS")[0]
    threads = prod(option("WG")[:3])
    warps = threads // wave if threads and wave else None
    return replace(
        name,
        tile=replace(tile, split_k=max(1, split), num_warps=warps),
        split_k_unknown=split == 0,
        persistent=option("SK")[0] > 0,
    )


_SIZES = r"(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)"
_NVJET = r"^nvjet_(?:sm\d+_)?[a-z]+_(?:tf32_)?"

# Orientation of the tile. NVIDIA's libraries are column-major. torch passes row-major tensors as
# the transposed problem cᵀ = bᵀ·aᵀ, so a library's m is quantbench's n: names state `block_n` first
# and `block_m` second. Two launches show it:
#   - nvjet, H100, 128 rows of x·Wᵀ with W 12352×2560: `nvjet_sm90_tst_96x128_64x7_2x1_v_bz_TNN`
#     ran 130 blocks. That is ⌈12352/96⌉ = 129 rounded up to a cluster of 2 along n, times
#     ⌈128/128⌉; the other order would give 194.
#   - CUTLASS, sm_86, m rows by n = 6144:
#     `cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8` ran grids of 256×3 for
#     m = 4096 and 264×3 for m = 4107: ⌈m/128⌉·8 and 6144/256 = 8·3.
# AMD's Tensile (rocBLAS, hipBLASLt) is column-major too: on MI300X with 512 rows, n = 768 and
# k = 3072, `Cijk_…_MT64x48x128_…` ran 264 blocks, which is ⌈768/64⌉·⌈512/48⌉·2 with split_k = 2.
# Composable Kernel, CK Tile, FlyDSL and aiter's assembly are row-major, and their names state
# block_m first: aiter's instance lists name the fields, and f4gemm 256x256 runs
# ⌈n/256⌉×⌈m/256⌉ blocks.

#: Kinds of kernels, as (family, role, sign, grammars). The sign and the grammars are regular
#: expressions. A name belongs to the first kind with a grammar or a sign that matches. The named
#: groups of a grammar state the tile. If only the sign matches, the tile is unknown.
_KINDS: tuple[tuple[str, ...], ...] = (
    # xmma's `execute_split_k_kernel` only adds up the partial sums of a split-k GEMM.
    ("splitk_reduce", "splitk_reduce", r"splitKreduce_kernel|execute_split_k_kernel|ReduceSplitK"),
    (
        # With `2cta`, blocks work in pairs, but the name states the tile of one block. This follows
        # from 128x256x64 with 6 stages in a 16-bit dtype, which fits into shared memory only if
        # each block of the pair stages half of the 256.
        "nvjet", "gemm", r"^nvjet_",
        _NVJET + r"(?P<n>\d+)x(?P<m>\d+)_(?P<k>\d+)x(?P<stages>\d+)"
        r"_(?P<cluster_n>\d+)x(?P<cluster_m>\d+)_(?P<options>\w+)_[NT]{3}$",
        _NVJET + r"mma_(?P<n>\d+)x(?P<m>\d+)x(?P<k>\d+)_(?P<stages>\d+)_\d+x\d+x\d+"
        r"_(?P<options>\w+)_[NT]{4}$",
    ),
    # Only names of forward passes are known to state a tile.
    (
        "cudnn", "attention", r"^cudnn_.*sdpa",
        r"^cudnn_generated_\w*sdpa_\w*flash_fprop\w*?_knob_\w*?(?P<m>\d+)x(?P<n>\d+)x\d+_",
    ),
    (
        "flash", "attention", r"flash_(?:fwd|bwd)\w*_kernel|flash_bwd|FlashAttn(?:Fwd|Bwd)",
        r"Flash_(?:fwd|bwd)_kernel_traits<(?:\(int\))?\d+, ?(?:\(int\))?(?P<m>\d+)"
        r", ?(?:\(int\))?(?P<n>\d+), ?(?:\(int\))?(?P<warps>\d+)",
    ),
    (
        "efficient", "attention", r"fmha_cutlass|PyTorchMemEffAttention",
        r"fmha_cutlass[FB]_(?:f16|bf16|f32)_(?:not)?aligned_(?P<m>\d+)x(?P<n>\d+)_",
    ),
    ("gemv", "gemm", r"gemv|gemmSN_|gemmk1_kernel|^dot_kernel"),
    ("triton", "gemm", r"^triton_tem_"),
    ("triton", "other", r"^triton_"),
    ("softmax", "softmax", r"(?i)softmax"),
    ("elementwise", "other", r"elementwise_kernel"),
    (
        "cutlass", "gemm", r"cutlass\w*_\w*gemm_",
        r"cutlass_\d+_(?:wmma_)?(?:tensorop|simt)_\w*?gemm(?:_[a-z]\w*?)?_(?P<n>\d+)x(?P<m>\d+)"
        r"(?:_(?P<k>\d+)x(?P<stages>\d+))?_[nt]{2}_align\d+",
        r"cutlass3x_sm\d+_tensorop_\w*?gemm_\w+?_(?P<n>\d+)x(?P<m>\d+)x(?P<k>\d+)"
        r"(?:_(?P<cluster_n>\d+)x(?P<cluster_m>\d+)x\d+)?_\d+_[nt]{3}_align\d+(?P<options>\w*)",
    ),
    (
        "xmma", "gemm", r"^sm\d+_xmma_.*gemm",
        r"^sm\d+_xmma_gemm_[a-z0-9]+_[a-z0-9]+_[a-z0-9]+_[nt]{2}_[nt]"
        r"_tilesize(?P<n>\d+)x(?P<m>\d+)x(?P<k>\d+)(?:_stage(?P<stages>\d+))?"
        r"(?:_warpsize(?P<warps>\d+x\d+x\d+))?(?P<options>\w*)$",
    ),
    # cuBLAS's own kernels. Most of their names begin with an architecture:
    # `ampere_…gemm_…_128x256_…_stages_64x3_nn`.
    ("cublas", "gemm", "", r"(?i)^[sdch]gemm_(?P<n>\d+)x(?P<m>\d+)x(?P<k>\d+)_[NT]{2}(?:_vec)?$"),
    (
        "cublas", "gemm", "",
        r"^(?P<family>maxwell|pascal|volta|turing|ampere)_(?:[a-z]+\d*_)?"
        r"[a-z]{1,2}\d*(?:tf32)?gemm_(?:[a-z]+\d+_)?(?P<n>\d+)x(?P<m>\d+)"
        r"(?P<options>(?:_\w+?)*?)_[nt]{2}(?:_v\d+)?$",
    ),
    (
        "tensile", "gemm", r"Cijk_A",
        r"^(?:Custom\d*_)?C[a-z]{3}_A[a-z]{3}_B[a-z]{3}_\w*?_?MT"
        r"(?P<n>\d+)x(?P<m>\d+)x(?P<k>\d+)(?P<options>\w*)",
    ),
    # AMD's row-major kernels, as aiter names them. Names of Composable Kernel state the threads per
    # block and then the tile. Names of CK Tile state the tile and then the wavefronts along m, n, k
    # (aiter, csrc/ck_gemm_a8w8_blockscale: gemm_a8w8_blockscale_instance.py and
    # …_cktile_instance.py).
    (
        "ck", "gemm", "",
        r"^a\dw\d_(?:rowwise|bpreshuffle|blockscale)_(?:bpreshuffle_)?(?:1x128x128_)?"
        r"(?P<threads>\d+)x" + _SIZES + r"_\w+_v\d+$",
        r"^a\dw\d_\w+_cktile_(?:\d(?:x\d)+_)?" + _SIZES
        + r"_(?P<warps>\d+x\d+x\d+)_\d+x\d+x\d+_\w+$",
    ),
    # aiter's own kernels, which are written in assembly, FlyDSL and opus.
    (
        "aiter", "gemm", "",
        r"^_ZN5aiter\d+\w+?gemm_\w+?_(?P<m>\d+)x(?P<n>\d+)(?P<options>\w*)E$",
        r"^flydsl_gemm\d+_\w+?_t" + _SIZES + r"_split_k(?P<split>\d+)_\w+$",
        r"^flydsl_bpreshuf\w+?_" + _SIZES + r"_\w+?(?:_ks(?P<split>\d+))?$",
        r"^opus_gemm_(?P<options>[a-z_]*)(?P<threads>\d+)x" + _SIZES + r"_\w+$",
    ),
    ("other", "gemm", r"(?i)gemm|nvjet|matmul"),
)  # fmt: skip
