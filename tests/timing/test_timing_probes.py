"""The two helper kernels, compiled ahead of time: no GPU is needed to see what the machine code
does.
"""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiling needs a process without TRITON_INTERPRET", allow_module_level=True)

from ahead_of_time import compile_kernel, few

from quantbench.timing import probes

pytestmark = pytest.mark.slow

OPTIONS = {"num_warps": 1, "num_stages": 1}


@pytest.mark.parametrize("arch", few((90, 80), 1))
def test_hold_reads_the_flag_anew_each_time_round(arch: int) -> None:
    flag = torch.empty(1, dtype=torch.int32, device="meta")
    pointers = {"release_ptr": flag, "timed_out_ptr": flag}
    made = compile_kernel(probes.hold, {**pointers, "timeout_ns": 10**9 + 1, **OPTIONS}, arch)
    # One load before the loop and one in it, both seen by the host: a cached or hoisted load would
    # spin for ever.
    loads = [op for op in made.opcodes if op.startswith("LDG")]
    assert all("STRONG.SYS" in op for op in loads)
    assert sum(made.opcodes[op] for op in loads) >= 2
    assert made.count("BRA") >= 2
    assert (made.spills, made.stack_bytes, made.threads) == (0, 0, 32)


@pytest.mark.parametrize("arch", few((90, 80), 1))
def test_stamp_reads_clock_and_timer_and_writes_both(arch: int) -> None:
    stamps = torch.empty(400, dtype=torch.int64, device="meta")
    made = compile_kernel(probes.stamp, {"stamps_ptr": stamps, "max_sms": 200, **OPTIONS}, arch)
    assert sum(n for op, n in made.opcodes.items() if op.startswith("STG")) == 2
    assert made.count("CS2R") >= 1  # clock64
    assert (made.spills, made.threads) == (0, 32)
