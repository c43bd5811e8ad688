# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Defines the probes, two Triton kernels: `hold` holds a stream, and `stamp` reads SM counters.

`cuda_device.TorchCuda` launches the probes. They are written in Triton, which needs no CUDA
compiler on the machine. mypy does not check the kernels' bodies, which only Triton compiles.
"""

import triton
import triton.language as tl


@triton.jit
def now_ns():
    """Returns the GPU's global timer in ns."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def cycles():
    """Returns the cycle counter of this block's SM."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def sm():
    """Returns the index of the SM on which this block runs."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def hold(release_ptr, timed_out_ptr, timeout_ns):
    """Holds the stream until the host releases it or a time limit passes.

    The kernel returns when *release_ptr is no longer 0. After timeout_ns, it sets *timed_out_ptr to
    1 and returns. Both pointers refer to pinned host memory. The loads are volatile, because the
    compiler would otherwise reuse the first value.
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
    """Writes each SM's time and cycle counter to stamps_ptr[SM], an array [max_sms, 2].

    The time is the global timer in ns, and the counter is clock64 in cycles. The caller launches
    two blocks per SM, so that every SM gets a block. It does not matter which block of an SM writes
    last, because each block reads the time and the counter together.
    """
    index = sm()
    if index < max_sms:
        tl.store(stamps_ptr + 2 * index, now_ns())
        tl.store(stamps_ptr + 2 * index + 1, cycles())
