"""Parses a GPU kernel's name into its library, role and tile.

Entry points: `parse`, and its result `KernelName`. Used by `identity`, `importers.runs` and `importers.aiter`.
quantbench's own kernels state their tile themselves and are not parsed.

Names of library kernels are not documented. The grammars here were derived from names seen in practice and checked
against the grids that were launched with them; tests/providers/test_kernel_names.py holds both, with their sources.
From a name that no grammar fits nothing is guessed.

Orientation of the tile. The libraries are column-major. torch passes them row-major tensors as the transposed problem
cᵀ = bᵀ·aᵀ, so the library's m is our n: names print `block_n` first and `block_m` second. The launches that show it:
  - nvjet, H100, 128 rows of x·Wᵀ with W 12352×2560: `nvjet_sm90_tst_96x128_64x7_2x1_v_bz_TNN` ran 130 blocks. That is
    ⌈12352/96⌉ = 129 rounded up to a cluster of 2 along n, times ⌈128/128⌉; the other order would give 194.
  - CUTLASS, sm_86, m rows by n = 6144: `cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8` ran
    grids of 256×3 for m = 4096 and 264×3 for m = 4107: ⌈m/128⌉·8 and 6144/256 = 8·3.
AMD. Tensile (rocBLAS, hipBLASLt) is column-major too: MI300X, 512 rows, n = 768, k = 3072, `Cijk_…_MT64x48x128_…` ran
264 blocks: ⌈768/64⌉·⌈512/48⌉·2, a split-k of two. Composable Kernel, CK Tile, FlyDSL and aiter's assembly are row-major
and print block_m first: aiter's instance lists name the fields, and f4gemm 256x256 runs ⌈n/256⌉×⌈m/256⌉ blocks.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from quantbench.errors import InputError, require_choice
from quantbench.launch import Tile

FAMILIES = (
    "nvjet", "cutlass", "xmma", "ampere", "turing", "volta", "pascal", "maxwell", "cublas", "tensile", "ck", "aiter",
    "splitk_reduce", "gemv", "triton", "flash", "efficient", "cudnn", "softmax", "elementwise", "other",
)  # fmt: skip
#: threads of a wavefront, AMD's warp, on the GPUs that these libraries serve (CDNA)
_WAVEFRONT = 64
_ROLES = ("gemm", "splitk_reduce", "attention", "softmax", "other")


@dataclass(frozen=True)
class KernelName:
    """Properties parsed from a kernel's name.

    tile: in our orientation (row-major m and n, see above); None if the name states none; for attention block_m counts
        queries and block_n keys.
    cluster: blocks per cluster along (m, n).
    split_k_unknown: whether the name states that the reduction is or may be split over blocks, but not over how many;
        tile.split_k is then 1.
    persistent: whether the grid is capped at the resident blocks, which loop over tiles; it then does not count tiles.
    understood: whether a grammar fits the name.
    """

    name: str
    family: str = "other"
    role: str = "other"
    tile: Tile | None = None
    cluster: tuple[int, int] | None = None
    split_k_unknown: bool = False
    persistent: bool = False
    understood: bool = True

    def __post_init__(self) -> None:
        require_choice("KernelName", "family", self.family, FAMILIES)
        require_choice("KernelName", "role", self.role, _ROLES)


def parse(name: str) -> KernelName:
    """Parses a kernel's name as the profiler prints it (demangled, with `void` and template arguments or without).

    >>> parse("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn").tile
    Tile(block_m=256, block_n=128, block_k=64, split_k=1, stages=3, num_warps=None)
    """
    bare = name.removeprefix("void ").strip()
    # xmma's `execute_split_k_kernel` is the pass that adds the parts up, not the product.
    if re.search(r"splitKreduce_kernel|execute_split_k_kernel|ReduceSplitK", bare):
        return KernelName(name, "splitk_reduce", "splitk_reduce")
    for grammar in _GRAMMARS:
        try:
            found = grammar(name, bare)
        except InputError:  # impossible sizes
            break
        if found is not None:
            return found
    role = "gemm" if re.search(r"gemm|nvjet|matmul", bare, re.IGNORECASE) else "other"
    return KernelName(name, role=role, understood=False)


_NVJET_HEAD = r"^nvjet_(?:sm\d+_)?[a-z]+_(?:tf32_)?"
_NVJET = re.compile(
    _NVJET_HEAD + r"(?P<n>\d+)x(?P<m>\d+)_(?P<k>\d+)x(?P<stages>\d+)"
    r"_(?P<cluster_n>\d+)x(?P<cluster_m>\d+)_(?P<options>\w+)_[NT]{3}$"
)
_NVJET_MMA = re.compile(
    _NVJET_HEAD + r"mma_(?P<n>\d+)x(?P<m>\d+)x(?P<k>\d+)_(?P<stages>\d+)_(?P<warp>\d+x\d+x\d+)"
    r"_(?P<options>\w+)_[NT]{4}$"
)


def _nvjet(name: str, bare: str) -> KernelName | None:
    if not bare.startswith("nvjet_"):
        return None
    match = _NVJET.match(bare) or _NVJET_MMA.match(bare)
    if match is None:
        return KernelName(name, "nvjet", "gemm", persistent=True, understood=False)
    # `2cta` blocks work in pairs, and the tile is still that of one block: 128x256x64 in 6 stages of 16 bits fits the
    # shared memory only when each block of the pair stages half of the 256.
    split = "splitK" in match["options"].split("_")
    return KernelName(name, "nvjet", "gemm", _tile(match), _cluster(match), split_k_unknown=split, persistent=True)


_CUTLASS_2 = re.compile(
    r"cutlass_\d+_(?:wmma_)?(?:tensorop|simt)_\w*?gemm(?:_[a-z]\w*?)?_(?P<n>\d+)x(?P<m>\d+)"
    r"(?:_(?P<k>\d+)x(?P<stages>\d+))?_[nt]{2}_align\d+"
)
_CUTLASS_3 = re.compile(
    r"cutlass3x_sm\d+_tensorop_\w*?gemm_\w+?_(?P<n>\d+)x(?P<m>\d+)x(?P<k>\d+)"
    r"(?:_(?P<cluster_n>\d+)x(?P<cluster_m>\d+)x\d+)?_\d+_[nt]{3}_align\d+(?P<options>\w*)"
)


def _cutlass(name: str, bare: str) -> KernelName | None:
    match = _CUTLASS_2.search(bare)
    if match is not None:
        return KernelName(name, "cutlass", "gemm", _tile(match))
    match = _CUTLASS_3.search(bare)
    if match is None:
        if re.search(r"cutlass\w*_\w*gemm_", bare):
            return KernelName(name, "cutlass", "gemm", understood=False)
        return None
    options = match["options"].split("_")
    tile = _tile(match)
    if "2sm" in options:
        # Here the printed tile is the pair's: 256x256x64 ran 16x32 blocks on 4096x4096 (one B200, cuBLAS 13).
        tile = Tile(tile.block_m, tile.block_n // 2, block_k=tile.block_k, stages=tile.stages)
    streamed = "stream_k" in match["options"]
    return KernelName(name, "cutlass", "gemm", tile, _cluster(match), split_k_unknown=streamed)


_XMMA = re.compile(
    r"^sm\d+_xmma_gemm_[a-z0-9]+_[a-z0-9]+_[a-z0-9]+_[nt]{2}_[nt]_tilesize(?P<n>\d+)x(?P<m>\d+)x(?P<k>\d+)"
    r"(?:_stage(?P<stages>\d+))?(?:_warpsize(?P<warps>\d+x\d+x\d+))?(?P<options>\w*)$"
)


def _xmma(name: str, bare: str) -> KernelName | None:
    if not re.match(r"^sm\d+_xmma_", bare):
        return None
    match = _XMMA.match(bare)
    if match is None:
        return KernelName(name, "xmma", "gemm" if "gemm" in bare else "other", understood=False)
    return KernelName(name, "xmma", "gemm", _tile(match), split_k_unknown="segment_k_on" in match["options"])


_NATIVE = re.compile(
    r"^(?P<family>maxwell|pascal|volta|turing|ampere)_(?:[a-z]+\d*_)?[a-z]{1,2}\d*(?:tf32)?gemm_(?:[a-z]+\d+_)?"
    r"(?P<n>\d+)x(?P<m>\d+)(?P<options>(?:_\w+?)*?)_[nt]{2}(?:_v\d+)?$"
)


_SMALL_SGEMM = re.compile(r"^[sdch]gemm_(?P<n>\d+)x(?P<m>\d+)x(?P<k>\d+)_[NT]{2}(?:_vec)?$", re.IGNORECASE)


def _native(name: str, bare: str) -> KernelName | None:
    """cuBLAS's older kernels, most of one architecture: `ampere_…gemm_…_128x256_…_stages_64x3_nn`."""
    match = _SMALL_SGEMM.match(bare)
    if match is not None:
        return KernelName(name, "cublas", "gemm", _tile(match))
    match = _NATIVE.match(bare)
    if match is None:
        return None
    stages = re.search(r"_stages_(?P<k>\d+)x(?P<stages>\d+)", match["options"])
    # `sliced1x4` is no split-k: four warps of one block share the reduction and add up in shared memory.
    split = "splitk" in match["options"].lower()
    return KernelName(name, match["family"], "gemm", _tile(match, stages), split_k_unknown=split)


def _tile(*matches: re.Match[str] | None) -> Tile:
    """The tile from the groups `m`, `n` (ours), `k`, `split`, `stages`, and `warps` or `threads` of the matches."""
    parts = {name: text for match in matches if match for name, text in match.groupdict().items() if text is not None}
    sizes = {name: int(text) for name, text in parts.items() if text.isdigit()}
    warps = sizes["threads"] // _WAVEFRONT if "threads" in sizes else None
    if "warps" in parts:
        warps = math.prod(map(int, parts["warps"].split("x")))
    return Tile(sizes["m"], sizes["n"], sizes.get("k"), sizes.get("split", 1), sizes.get("stages"), warps)


def _cluster(match: re.Match[str]) -> tuple[int, int] | None:
    along_m, along_n = (int(match.groupdict().get(f"cluster_{side}") or 0) for side in "mn")
    return (along_m, along_n) if along_n else None  # 0x0: chosen when launched


_TENSILE = re.compile(
    r"^(?:Custom\d*_)?C[a-z]{3}_A[a-z]{3}_B[a-z]{3}_\w*?_?MT(?P<n>\d+)x(?P<m>\d+)x(?P<k>\d+)(?P<options>\w*)"
)


def _tensile(name: str, bare: str) -> KernelName | None:
    match = _TENSILE.match(bare)
    if match is None:
        return KernelName(name, "tensile", "gemm", understood=False) if re.search(r"Cijk_A", bare) else None

    def option(letters: str) -> tuple[int, ...] | None:
        found = re.search(rf"_{letters}(\d+(?:_\d+)*)(?=_|$)", match["options"])
        return None if found is None else tuple(map(int, found[1].split("_")))

    # Global split-u is the split-k. hipBLASLt's kernels with user arguments get it at launch; stream-k (SK > 0) divides
    # tiles among a fixed number of blocks.
    split = (option("GSU") or (0,))[0]
    group, wave = option("WG"), option("WS")
    warps = None if group is None or wave is None else math.prod(group[:3]) // wave[0]
    tile = replace(_tile(match), split_k=max(1, split), num_warps=warps)
    stream_k = (option("SK") or (0,))[0] > 0
    return KernelName(name, "tensile", "gemm", tile, split_k_unknown=split == 0, persistent=stream_k)


# Composable Kernel as aiter names it: threads per block, then m, n, k of the tile. CK Tile: the tile, then wavefronts
# along m, n, k (csrc/ck_gemm_a8w8_blockscale, gemm_a8w8_blockscale_instance.py and …_cktile_instance.py).
_CK = re.compile(
    r"^a\dw\d_(?:rowwise|bpreshuffle|blockscale)_(?:bpreshuffle_)?(?:1x128x128_)?(?P<threads>\d+)x(?P<m>\d+)x(?P<n>\d+)"
    r"x(?P<k>\d+)_\w+_v\d+$"
)
_CK_TILE = re.compile(
    r"^a\dw\d_\w+_cktile_(?:\d(?:x\d)+_)?(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_(?P<warps>\d+x\d+x\d+)_\d+x\d+x\d+_\w+$"
)
# Kernels written for aiter: assembly, FlyDSL, opus.
_AITER = (
    re.compile(r"^_ZN5aiter\d+\w+?gemm_\w+?_(?P<m>\d+)x(?P<n>\d+)(?P<options>\w*)E$"),
    re.compile(r"^flydsl_gemm\d+_\w+?_t(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_split_k(?P<split>\d+)_\w+$"),
    re.compile(r"^flydsl_bpreshuf\w+?_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_\w+?(?:_ks(?P<split>\d+))?$"),
    re.compile(r"^opus_gemm_(?P<options>[a-z_]*)(?P<threads>\d+)x(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)_\w+$"),
)


def _row_major(name: str, bare: str) -> KernelName | None:
    """AMD's row-major kernels, whose names print block_m first."""
    for family, grammar in (("ck", _CK), ("ck", _CK_TILE), *(("aiter", own) for own in _AITER)):
        match = grammar.match(bare)
        if match is None:
            continue
        options = match.groupdict().get("options") or ""
        split, persistent = "splitk" in options, "persistent" in options
        return KernelName(name, family, "gemm", _tile(match), split_k_unknown=split, persistent=persistent)
    return None


_FLASH_TRAITS = re.compile(
    r"Flash_(?:fwd|bwd)_kernel_traits<(?:\(int\))?\d+, ?(?:\(int\))?(\d+), ?(?:\(int\))?(\d+), ?(?:\(int\))?(\d+)"
)
_EFFICIENT = re.compile(r"fmha_cutlass[FB]_(?:f16|bf16|f32)_(?:not)?aligned_(\d+)x(\d+)_")
_CUDNN_SDPA = re.compile(r"^cudnn_generated_\w*sdpa_\w*flash_(fprop|bprop)\w*?_knob_\w*?(\d+)x(\d+)x(\d+)_")


def _attention(name: str, bare: str) -> KernelName | None:
    if re.search(r"flash_(?:fwd|bwd)\w*_kernel|\w*flash_bwd\w*|FlashAttn(?:Fwd|Bwd)", bare) and "sdpa" not in bare:
        traits = _FLASH_TRAITS.search(bare)  # head_dim, queries, keys, warps
        tile = None if traits is None else Tile(int(traits[1]), int(traits[2]), num_warps=int(traits[3]))
        return KernelName(name, "flash", "attention", tile)
    if "fmha_cutlass" in bare or "PyTorchMemEffAttention" in bare:
        sizes = _EFFICIENT.search(bare)
        tile = None if sizes is None else Tile(int(sizes[1]), int(sizes[2]))
        return KernelName(name, "efficient", "attention", tile, understood=sizes is not None)
    if bare.startswith("cudnn_") and "sdpa" in bare:
        shape = _CUDNN_SDPA.match(bare)  # queries, keys, head_dim; the backward pass is not known to print them so
        tile = Tile(int(shape[2]), int(shape[3])) if shape is not None and shape[1] == "fprop" else None
        return KernelName(name, "cudnn", "attention", tile, understood=shape is not None)
    return None


def _plain(name: str, bare: str) -> KernelName | None:
    if re.search(r"gemv|gemmSN_|gemmk1_kernel|^dot_kernel", bare):
        return KernelName(name, "gemv", "gemm")
    if bare.startswith("triton_"):
        return KernelName(name, "triton", "gemm" if bare.startswith("triton_tem_") else "other")
    if re.search(r"softmax", bare, re.IGNORECASE):
        return KernelName(name, "softmax", "softmax")
    if "elementwise_kernel" in bare:
        return KernelName(name, "elementwise", "other")
    return None


_GRAMMARS = (_nvjet, _attention, _plain, _cutlass, _xmma, _native, _tensile, _row_major)
