"""Fused softmax on V100 and T4: compiles with triton 3.2 without spills, within one block's shared
memory.
"""

import pytest
from ahead_of_time import SHARED_MEMORY_LIMIT_BYTES, compile_softmax
from quantbench.kernels.launching import TRITON

pytestmark = pytest.mark.skipif(TRITON >= (3, 3), reason="needs triton 3.2: make test-volta")


@pytest.mark.parametrize("arch", [70, 75])
@pytest.mark.parametrize("mask", ["causal", "full", "none"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("cols", [64, 1000, 2048, 4096, 16384])
def test_softmax_does_not_spill(cols: int, direction: str, mask: str, arch: int) -> None:
    built = compile_softmax(cols, direction=direction, mask=mask, dtype="fp16", arch=arch)
    assert (built.spills, built.stack_bytes) == (0, 0)
    assert built.shared_memory_bytes <= SHARED_MEMORY_LIMIT_BYTES[arch]
    assert built.opcodes
