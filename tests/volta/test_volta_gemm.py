"""GEMM on V100 and T4: with triton 3.2, the last that makes tensor-core code for them, every tile
of their menu compiles to HMMA without spills. `make test-volta` runs this in an environment of its
own; elsewhere it is skipped.
"""

from itertools import product

import pytest
from ahead_of_time import SHARED_MEMORY_LIMIT_BYTES, compile_gemm
from made_operands import contiguous
from quantbench.kernels.gemm.config import align_bytes, configure
from quantbench.kernels.gemm.menu import tiles
from quantbench.kernels.launching import TRITON

from quantbench.launch import Tile
from quantbench.workload import Gemm

pytestmark = pytest.mark.skipif(TRITON >= (3, 3), reason="needs triton 3.2: make test-volta")

#: V100 multiplies 8×8×4 at a time, T4 16×8×8
OPCODE = {70: "HMMA.884", 75: "HMMA.1688"}
SCHEDULES = ("data_parallel", "persistent", "stream_k")
LAYOUTS = ("nn", "nt", "tn")


def cases(arch: int) -> list[tuple[int, str, str, int, Tile]]:
    """Every layout, schedule and tile, with rows of a multiple of 16 elements, of 8 and of
    nothing.
    """
    found = []
    for layout, schedule, size in product(LAYOUTS, SCHEDULES, (4096, 4104, 4097)):
        aligned = align_bytes(contiguous(Gemm(size, size, size, dtype="fp16", layout=layout)))
        found += [
            (arch, layout, schedule, size, tile) for tile in tiles(arch, "fp16", schedule, aligned)
        ]
    return found


@pytest.mark.parametrize(
    ("arch", "layout", "schedule", "size", "tile"), [*cases(70), *cases(75)], ids=str
)
def test_tiles_run_on_tensor_cores_without_spills(
    arch: int, layout: str, schedule: str, size: int, tile: Tile
) -> None:
    operands = contiguous(Gemm(size, size, size, dtype="fp16", layout=layout))
    config = configure(operands, schedule, tile, (arch // 10, arch % 10))
    built = compile_gemm(operands, config, arch)
    assert built.count(OPCODE[arch]) > 0
    assert (built.spills, built.stack_bytes) == (0, 0)
    assert built.shared_memory_bytes <= SHARED_MEMORY_LIMIT_BYTES[arch]
