"""Checks whether Megatron-LM's fused CUDA kernel for scale, mask and softmax runs.

Otherwise Megatron falls back to torch, which reads and writes the scores several times in fp32, in
every layer.
"""

from dataclasses import dataclass

from quantbench.errors import InputError, require_choice, require_int
from quantbench.workload.dtypes import VECTOR_DTYPES
from quantbench.workload.ops import MASKS, Softmax

_THREADS_PER_BLOCK = 128
_WARP_THREADS = 32
_TWO_ROWS_PER_WARP_UP_TO = 128  # number of columns, rounded up to a power of two
_VECTOR = 4  # divisor that sq, sk and the number of attention matrices must have
_SMALLEST_SK = 17


@dataclass(frozen=True)
class Generation:
    """Conditions of one generation of the kernels.

    max_sk: longest row.
    needs_mask: whether the kernel needs a mask.
    sk_multiple: divisor that sk must have.
    """

    max_sk: int
    needs_mask: bool
    sk_multiple: int


# Sources, read in the repositories. "2048" is NVIDIA/apex,
# apex/transformer/functional/fused_softmax.py, `is_kernel_available` (sk up to 2048, with a mask),
# with `get_batch_per_block` and the limits in csrc/megatron/scaled_masked_softmax.h, and also
# Megatron-LM of 2021. "4096" is NVIDIA/Megatron-LM, megatron/core/fusions/fused_softmax.py (sk up
# to 4096, sk % 4 == 0, no mask needed). "16384" is the same, with the limit of the current kernels
# in NVIDIA/apex, csrc/megatron/*_softmax.h.
GENERATIONS = {
    "2048": Generation(2048, needs_mask=True, sk_multiple=1),
    "4096": Generation(4096, needs_mask=False, sk_multiple=_VECTOR),
    "16384": Generation(16384, needs_mask=False, sk_multiple=_VECTOR),
}


@dataclass(frozen=True)
class Availability:
    """Availability of the fused kernel.

    reasons: one text per failed condition.
    """

    reasons: tuple[str, ...] = ()

    @property
    def available(self) -> bool:
        return not self.reasons


def batches_per_block(sk: int) -> int:
    """Returns how many rows of `sk` scores one block of Megatron's softmax kernels processes.

    A block processes 8 rows of up to 128 columns, or 4 longer rows. It processes more rows of fewer
    than 17 columns, but the fused kernel is not used for them.

    >>> batches_per_block(128), batches_per_block(129)
    (8, 4)
    """
    columns = 1 << (require_int("batches_per_block", "sk", sk) - 1).bit_length()
    rows_per_warp = 2 if columns <= _TWO_ROWS_PER_WARP_UP_TO else 1
    return _THREADS_PER_BLOCK // min(columns, _WARP_THREADS) * rows_per_warp


def megatron_fused_available(
    *,
    sq: int,
    sk: int,
    heads_per_gpu: int,
    mbs: int,
    dtype: str = "bf16",
    mask: str = "causal",
    fusion_on: bool = True,
    generation: str = "2048",
) -> Availability:
    """Returns whether Megatron's fused softmax kernel accepts scores [mbs, heads_per_gpu, sq, sk].

    heads_per_gpu: number of heads divided by the tensor-parallel degree.
    mask: causal, full (a padding mask) or none.
    fusion_on: Megatron's option `masked_softmax_fusion`.
    generation: generation of the kernels, a key of GENERATIONS (2048, 4096 or 16384).

    Raises InputError for a causal mask with sq other than sk.

    >>> megatron_fused_available(sq=2048, sk=2048, heads_per_gpu=14, mbs=2).available
    True
    >>> megatron_fused_available(sq=2048, sk=2048, heads_per_gpu=14, mbs=1).reasons
    ('heads per GPU 14 · MBS 1 = 14 is not a multiple of 4',)
    """
    who = "megatron_fused_available"
    for name, value in (("sq", sq), ("sk", sk), ("heads_per_gpu", heads_per_gpu), ("mbs", mbs)):
        require_int(who, name, value)
    require_choice(who, "dtype", dtype, VECTOR_DTYPES)
    require_choice(who, "mask", mask, MASKS)
    require_choice(who, "generation", generation, tuple(GENERATIONS))
    rule = GENERATIONS[generation]
    if mask == "causal" and sq != sk:
        raise InputError(
            who, f"causal with sq = {sq}, sk = {sk}", "sq equal to sk, which Megatron asserts"
        )
    matrices = heads_per_gpu * mbs
    per_block = batches_per_block(sk)
    # A causal block processes one row of each of `per_block` attention matrices. Other blocks
    # process rows of one matrix.
    matrices_multiple = per_block if mask == "causal" else _VECTOR
    sq_multiple = _VECTOR if mask == "causal" else per_block
    reasons = []
    if not fusion_on:
        reasons.append("fusion is switched off")
    if dtype == "fp32":
        reasons.append("dtype fp32 is neither fp16 nor bf16")
    if mask == "none" and rule.needs_mask:
        reasons.append("there is no mask")
    if not _SMALLEST_SK <= sk <= rule.max_sk:
        reasons.append(f"sk = {sk} is not from {_SMALLEST_SK} to {rule.max_sk}")
    if sk % rule.sk_multiple:
        reasons.append(f"sk = {sk} is not a multiple of {rule.sk_multiple}")
    if sq % sq_multiple:
        reasons.append(f"sq = {sq} is not a multiple of {sq_multiple}")
    if matrices % matrices_multiple:
        product = f"heads per GPU {heads_per_gpu} · MBS {mbs} = {matrices}"
        reasons.append(f"{product} is not a multiple of {matrices_multiple}")
    return Availability(tuple(reasons))


def softmax_objections(work: Softmax) -> tuple[str, ...]:
    """Returns the reasons why Megatron's fused kernel does not accept a softmax.

    The result is empty if the kernel accepts it. Rows of up to 2048 scores are assumed to run the
    first generation of the kernels, and longer rows the last one.
    """
    return megatron_fused_available(
        sq=work.rows,
        sk=work.cols,
        heads_per_gpu=work.batch // work.mask_batch,
        mbs=work.mask_batch,
        dtype=work.dtype,
        mask=work.mask,
        generation="2048" if work.cols <= GENERATIONS["2048"].max_sk else "16384",
    ).reasons
