"""Every GEMM kernel and every tile of the menus, compiled ahead of time: no spills, no stack,
shared memory within one block's limit, tensor-core opcodes. Needs no GPU.

`make test-aot` compiles each tile for sm_80, sm_90 and sm_100 with every schedule; formats and
layouts take turns, so that all of them occur for every architecture. QUANTBENCH_EXHAUSTIVE=1
compiles every combination instead (800 kernels).
"""

import itertools
import os
from dataclasses import dataclass, replace

import pytest
import torch
from ahead_of_time import (
    KernelResources,
    check_fits,
    compile_gemm,
    compile_kernel,
    few,
    in_test_aot,
)
from interpreter import ACTIVE
from made_operands import contiguous
from quantbench.kernels.gemm import grouped
from quantbench.kernels.gemm import kernels as gemm_kernels
from quantbench.kernels.gemm.config import Operands, align_bytes, configure
from quantbench.kernels.gemm.menu import tiles
from quantbench.kernels.launching import TRITON

from quantbench.launch import Tile
from quantbench.providers.inputs import input_templates, output_templates
from quantbench.workload import Gemm, GroupedGemm

pytestmark = [
    pytest.mark.skipif(ACTIVE, reason="compiling needs a process without the interpreter"),
    pytest.mark.skipif(TRITON < (3, 6), reason="triton 3.2 is for V100 and T4: tests/volta"),
]

EXHAUSTIVE = os.environ.get("QUANTBENCH_EXHAUSTIVE") == "1"
ARCHS = (80, 90, 100)
#: split_k is data_parallel's kernel, tested apart
SCHEDULES = ("data_parallel", "persistent", "stream_k")
LAYOUTS = ("nt", "nn", "tn")
#: What a product in a format must be made of, by architecture. HMMA: warp-level; HGMMA, QGMMA:
#: wgmma of Hopper;
#: UTCHMMA, UTCQMMA: tcgen05 of Blackwell.
OPCODES = {
    80: {"fp16": "HMMA", "bf16": "HMMA", "tf32": "HMMA"},
    90: {"fp16": "HGMMA", "bf16": "HGMMA", "tf32": "HGMMA", "fp8": "QGMMA"},
    100: {"fp16": "UTCHMMA", "bf16": "UTCHMMA", "tf32": "UTCHMMA", "fp8": "UTCQMMA"},
}
ALIGNED, HALF_LINE, ODD = 4096, 4104, 4097  # sizes that are multiples of 16, of 8 and of nothing


@dataclass(frozen=True)
class Case:
    arch: int
    gemm: Gemm
    schedule: str
    tile: Tile

    def __str__(self) -> str:
        warps = f"{self.tile.stages}s{self.tile.num_warps}w"
        return f"sm_{self.arch}-{self.gemm.dtype}-{self.gemm.layout}-{self.gemm.k}-{self.schedule}-{self.tile}-{warps}"


def menu_cases(arch: int, dtypes: tuple[str, ...], size: int) -> list[Case]:
    """All combinations, or one format and layout for each tile and schedule, taking turns."""
    turns = itertools.cycle(itertools.product(LAYOUTS, dtypes))
    cases = []
    for schedule in SCHEDULES:
        aligned = align_bytes(contiguous(Gemm(size, size, size, dtype=dtypes[0])))
        for index in range(len(tiles(arch, dtypes[0], schedule, aligned))):
            for layout, dtype in (
                itertools.product(LAYOUTS, dtypes) if EXHAUSTIVE else [next(turns)]
            ):
                gemm = Gemm(size, size, size, dtype=dtype, layout=layout)
                menu = tiles(arch, dtype, schedule, align_bytes(contiguous(gemm)))
                cases.append(
                    Case(arch, gemm, schedule, menu[index % len(menu)])
                )  # tf32 may have fewer
    return list(dict.fromkeys(cases))


def compiled(case: Case) -> KernelResources:
    operands = contiguous(case.gemm)
    capability = (case.arch // 10, case.arch % 10)
    config = configure(operands, case.schedule, case.tile, capability)
    return compile_gemm(operands, config, case.arch)


TENSOR_CORE = [case for arch in ARCHS for case in menu_cases(arch, tuple(OPCODES[arch]), ALIGNED)]
UNALIGNED = [case for arch in ARCHS for case in menu_cases(arch, ("fp16",), ODD)]
SCALAR = [case for arch in ARCHS for case in menu_cases(arch, ("fp32",), ALIGNED)]


@pytest.mark.slow
@pytest.mark.parametrize("case", few(TENSOR_CORE, 3), ids=str)
def test_menu_tiles_run_on_tensor_cores_without_spills(case: Case) -> None:
    built = compiled(case)
    check_fits(built)
    assert built.count(OPCODES[case.arch][case.gemm.dtype]) > 0
    assert built.count("FFMA") == 0
    if case.arch >= 90:
        assert built.count("UTMALDG") > 0  # loads by the TMA unit
        assert built.count("UTMASTG") > 0
    elif case.gemm.dtype != "fp8":  # which some layouts transpose in registers
        assert built.count("LDGSTS") > 0  # straight into shared memory


@pytest.mark.slow
@pytest.mark.parametrize("case", few(UNALIGNED, 1), ids=str)
def test_odd_sizes_still_run_on_tensor_cores(case: Case) -> None:
    built = compiled(case)
    check_fits(built)
    assert built.count(OPCODES[case.arch][case.gemm.dtype]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", few(SCALAR, 1), ids=str)
def test_fp32_products_are_not_rounded_to_tf32(case: Case) -> None:
    built = compiled(case)
    check_fits(built)
    assert built.count("FFMA") + built.count("FFMA2") > 0
    assert sum(built.count(opcode) for opcode in ("HMMA", "HGMMA", "UTCHMMA")) == 0


@in_test_aot
@pytest.mark.parametrize("arch", ARCHS)
def test_split_k_and_its_addition(arch: int) -> None:
    tile = replace(tiles(arch, "bf16")[0], split_k=4)
    built = compiled(Case(arch, Gemm(ALIGNED, ALIGNED, ALIGNED, layout="nt"), "split_k", tile))
    check_fits(built)
    assert built.count(OPCODES[arch]["bf16"]) > 0
    sizes = {"batches": 1, "batch_stride_c": 0} | dict.fromkeys(("m", "n", "ldc"), ALIGNED)
    parts, c = (
        torch.empty(ALIGNED, ALIGNED, dtype=d, device="meta")
        for d in (torch.float32, torch.bfloat16)
    )
    constants = {
        "ALIGN_C": 16,
        "SPLIT_K": 4,
        "BLOCK_M": 32,
        "BLOCK_N": 128,
        "num_warps": 4,
        "num_stages": 3,
    }
    adding = compile_kernel(
        gemm_kernels.gemm_add_parts, {"parts": parts, "c": c} | sizes | constants, arch
    )
    check_fits(adding)
    assert any(opcode.startswith("LDG.") and ".128" in opcode for opcode in adding.opcodes)


@in_test_aot
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_batched_products(arch: int, schedule: str) -> None:
    gemm = Gemm(ALIGNED, ALIGNED, ALIGNED, batch=16, layout="nt")
    built = compiled(Case(arch, gemm, schedule, tiles(arch, "bf16", schedule)[0]))
    check_fits(built)
    assert built.count(OPCODES[arch]["bf16"]) > 0


@in_test_aot
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_half_a_line_are_still_loaded_16_bytes_at_a_time(layout: str) -> None:
    """triton itself knows of multiples of 16 elements only and would load 2 bytes at a time: see
    `known_multiple`.
    """
    tile = Tile(128, 128, 32, stages=3, num_warps=8)
    built = compiled(
        Case(80, Gemm(HALF_LINE, HALF_LINE, HALF_LINE, layout=layout), "data_parallel", tile)
    )
    loads = {
        opcode: n for opcode, n in built.opcodes.items() if opcode.startswith(("LDGSTS.", "LDG."))
    }
    assert loads
    assert all(".128" in opcode for opcode in loads)


@in_test_aot
def test_a_persistent_kernel_prefetches_the_next_tile() -> None:
    """Flattened, one loop loads and multiplies: as many load instructions as for a single tile, two
    epilogues.
    """
    persistent, single = (
        compiled(
            Case(90, Gemm(ALIGNED, ALIGNED, ALIGNED, layout="nt"), schedule, tiles(90, "bf16")[0])
        )
        for schedule in ("persistent", "data_parallel")
    )
    assert persistent.count("UTMALDG") == single.count("UTMALDG")
    assert persistent.count("HGMMA") == single.count("HGMMA")
    assert persistent.count("UTMASTG") == 2 * single.count("UTMASTG")


def stored(work: GroupedGemm) -> Operands:
    """Storage of newly allocated operands."""
    of_weights = work.layout == "tn"
    m, k = (work.k, work.rows) if of_weights else (work.rows, work.k)
    one, batched = (
        contiguous(Gemm(m, work.n, k, batch, work.dtype, work.layout))
        for batch in (1, work.num_experts)
    )
    return replace(one, c=batched.c) if of_weights else replace(one, b=batched.b)


def grouped_cases() -> list[tuple[int, GroupedGemm, str, Tile]]:
    """Every tile for every architecture; formats, layouts and schedules take turns.
    QUANTBENCH_EXHAUSTIVE=1: all.
    """
    found = []
    for arch in ARCHS:
        menu = tiles(arch, "bf16")
        formats = [dtype for dtype in ("bf16", "fp8") if dtype in OPCODES[arch]]
        kinds = list(itertools.product(LAYOUTS, formats, grouped.SCHEDULES))
        for index in range(len(menu)):
            for layout, dtype, schedule in kinds if EXHAUSTIVE else [kinds[5 * index % len(kinds)]]:
                work = GroupedGemm((4096, 0, 4000), n=4096, k=4096, dtype=dtype, layout=layout)
                found.append((arch, work, schedule, tiles(arch, dtype, schedule)[index]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    few(grouped_cases(), 1),
    ids=lambda case: f"sm_{case[0]}-{case[1].layout}-{case[2]}-{case[3]}",
)
def test_tiles_of_grouped_products(case: tuple[int, GroupedGemm, str, Tile]) -> None:
    arch, work, schedule, tile = case
    (a, b), c = input_templates(work), output_templates(work)[0]
    operands, path = stored(work), "pointers" if work.layout == "tn" else "auto"
    config = configure(operands, schedule, tile, (arch // 10, arch % 10), path=path)
    arguments, _ = grouped.kernel_arguments(a, b, c, operands, config, work.tokens_per_expert)
    built = compile_kernel(grouped.KERNELS[schedule], arguments, arch)
    check_fits(built)
    assert built.count(OPCODES[arch][work.dtype]) > 0
