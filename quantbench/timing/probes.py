# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Defines two small Triton kernels: one holds a stream, the other reads counters of the SMs.

They are written in Triton because it needs no CUDA compiler on the machine. mypy does not check
their bodies, which Triton's compiler reads.
"""

import triton
import triton.language as tl


@triton.jit
def now_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def cycles():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def sm():
    """Returns the number of the SM on which this block runs."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def hold(release_ptr, timed_out_ptr, timeout_ns):
    """Holds the stream until the host releases it or a time limit passes.

    The kernel returns when *release_ptr is no longer 0. After timeout_ns it sets *timed_out_ptr to
    1 and returns. Both pointers are to pinned host memory. The loads must be volatile, because the
    compiler would otherwise keep the first value.
    """
    begin_ns = now_ns()
    waiting = tl.load(release_ptr, volatile=True) == 0
    while waiting:
        late = now_ns() - begin_ns > timeout_ns
        if late:
            tl.store(timed_out_ptr, 1)
        waiting = (tl.load(release_ptr, volatile=True) == 0) & (late == 0)


@triton.jit
def stamp(stamps_ptr, max_sms):
    """Writes the time and the cycle counter of each SM to the SM's row of stamps (max_sms, 2).

    The time is the global timer in ns, and the counter is clock64 in cycles. The kernel must be
    launched with twice as many blocks as there are SMs, so that every SM gets a block. It does not
    matter which block of an SM writes last, because each block reads the two numbers together.
    """
    index = sm()
    if index < max_sms:
        tl.store(stamps_ptr + 2 * index, now_ns())
        tl.store(stamps_ptr + 2 * index + 1, cycles())
