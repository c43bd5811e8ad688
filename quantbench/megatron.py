"""Checks whether Megatron-LM uses its fused CUDA kernel for scale, mask and softmax.

Otherwise, Megatron falls back to torch, which reads and writes the scores several times in fp32, in
every layer. `megatron_fused_available` is the entry point.
"""

from dataclasses import dataclass

from quantbench.errors import InputError, require_choice, require_int
from quantbench.workload.dtypes import VECTOR_DTYPES
from quantbench.workload.ops import MASKS, Softmax

# Constants of the kernels; GENERATIONS cites the sources.
_THREADS_PER_BLOCK = 128
_WARP_THREADS = 32
_TWO_ROWS_PER_WARP_UP_TO = 128  # number of columns, rounded up to a power of two
_VECTOR = 4  # required divisor of sq, sk or the number of attention matrices
_SMALLEST_SK = 17


@dataclass(frozen=True)
class Generation:
    """Conditions of one generation of the kernels.

    max_sk: maximum number of scores in a row.
    needs_mask: whether the kernel needs a mask.
    sk_multiple: required divisor of sk.
    """

    max_sk: int
    needs_mask: bool
    sk_multiple: int


# Generations of the kernels by maximum sk, with sources read in the repositories:
# "2048": NVIDIA/apex, apex/transformer/functional/fused_softmax.py, `is_kernel_available` (sk up to
# 2048, with a mask), `get_batch_per_block` and the limits in csrc/megatron/scaled_masked_softmax.h;
# also Megatron-LM of 2021.
# "4096": NVIDIA/Megatron-LM, megatron/core/fusions/fused_softmax.py (sk up to 4096, sk % 4 == 0, no
# mask needed).
# "16384": as "4096", with the limit of the current kernels in NVIDIA/apex,
# csrc/megatron/*_softmax.h.
GENERATIONS = {
    "2048": Generation(2048, needs_mask=True, sk_multiple=1),
    "4096": Generation(4096, needs_mask=False, sk_multiple=_VECTOR),
    "16384": Generation(16384, needs_mask=False, sk_multiple=_VECTOR),
}


@dataclass(frozen=True)
class Availability:
    """Availability of the fused kernel.

    reasons: text of each failed condition; empty if the kernel is available.
    """

    reasons: tuple[str, ...] = ()

    @property
    def available(self) -> bool:
        """Whether the fused kernel is available."""
        return not self.reasons


def batches_per_block(sk: int) -> int:
    """Returns the number of rows of `sk` scores that a block of Megatron's kernels processes.

    A block processes 8 rows of up to 128 scores, or 4 longer rows. For rows of fewer than 17
    scores, for which Megatron does not use the kernel, the number is higher.

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

    sq, sk: number of queries and of keys.
    heads_per_gpu: number of heads divided by the tensor-parallel degree.
    mbs: number of samples per micro-batch.
    mask: causal, full (a padding mask) or none.
    fusion_on: value of Megatron's option `masked_softmax_fusion`.
    generation: generation of the kernels, a key of GENERATIONS (2048, 4096 or 16384).

    Raises InputError for a causal mask if sq is not equal to sk.

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
    # A block of the causal kernel processes one row from each of `per_block` attention matrices. A
    # block of the other kernels processes `per_block` rows of one matrix.
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


def fused_softmax_failures(work: Softmax) -> tuple[str, ...]:
    """Returns the reasons why Megatron's fused kernel does not accept a softmax.

    The result is empty if the kernel accepts the softmax. For rows of up to 2048 scores, the oldest
    generation of the kernels is assumed; for longer rows, the newest.
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
