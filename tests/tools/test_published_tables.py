"""What the words of NeuSight's, DeepBench's and aiter's tables mean."""

from typing import Any

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.launch import Tile
from quantbench.quantization import cdiv
from quantbench.workload import Gemm, Softmax
from tools.published_tables import DATA, NEUSIGHT, read_aiter, read_deepbench, read_neusight

V100 = lookup("v100-pcie-32gb")
needs_files = pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}")

NEUSIGHT_ROW: dict[str, Any] = {
    "op": "linear", "latency_ms": 0.2, "batch": 2, "m": 512, "n": 768, "k": 1024, "kernel": "volta_sgemm_128x64_tn",
    "grid_x": 12, "grid_y": 8, "grid_z": 2, "block_x": 128, "block_y": 1,
    "kernels": ";volta_sgemm_128x64_tn;splitKreduce_kernel",
}  # fmt: skip


def test_neusight_folds_the_batch_of_a_linear_layer_and_tells_the_split() -> None:
    softmax = {"op": "softmax", "latency_ms": 0.5, "rows": 16384, "cols": 1024, "kernel": ""}
    batched = {**NEUSIGHT_ROW, "op": "bmm", "kernel": "volta_sgemm_128x64_nn"}
    linear, bmm, last = read_neusight([NEUSIGHT_ROW, batched, softmax], V100)
    assert linear.workload == Gemm(1024, 768, 1024, dtype="fp32", layout="nt")
    assert bmm.workload == Gemm(512, 768, 1024, batch=2, dtype="fp32")
    assert (last.workload, last.latency_us) == (
        Softmax(1, 16384, 1024, dtype="fp32", mask="none"),
        500.0,
    )
    assert linear.launch.tile.split_k == 2
    assert last.launch is None


@needs_files
@pytest.mark.slow
def test_every_launch_of_neusight_is_as_many_blocks_as_tiles() -> None:
    for row in NEUSIGHT.rows("v100-pcie-32gb").rows:
        work, launch = row.workload, row.launch
        if isinstance(work, Gemm) and launch is not None and launch.tile is not None:
            tiles = cdiv(work.m, launch.tile.block_m) * cdiv(work.n, launch.tile.block_n)
            assert launch.num_blocks == tiles * work.batch * launch.tile.split_k


@pytest.mark.parametrize(("a_t", "b_t"), ["NN", "TN", "NT"])
def test_deepbench_layouts_are_those_of_the_same_memory(a_t: str, b_t: str) -> None:
    m, n, k = 4, 6, 5
    sizes = {"M": m, "N": n, "K": k}
    cells = {**sizes, "a_transposed": a_t, "b_transposed": b_t, "dtype": "fp32", "time_ms": "0.01"}
    (row,) = read_deepbench([cells], V100)
    work = row.workload
    assert row.latency_us == pytest.approx(10.0)
    random = np.random.default_rng(0)
    a_memory, b_memory = random.normal(size=m * k), random.normal(size=k * n)

    def matrix(
        memory: np.ndarray, rows: int, cols: int, transposed: bool, order: Any
    ) -> np.ndarray:
        stored = memory.reshape((cols, rows) if transposed else (rows, cols), order=order)
        return stored.T if transposed else stored

    theirs = matrix(a_memory, m, k, a_t == "T", "F") @ matrix(b_memory, k, n, b_t == "T", "F")
    # In ours, the first operand is the memory of their b, row by row.
    first = matrix(b_memory, work.m, work.k, work.layout[0] == "t", "C")
    second = matrix(a_memory, work.k, work.n, work.layout[1] == "t", "C")
    assert np.allclose((first @ second).ravel(), theirs.ravel(order="F"))


def test_aiter_writes_parts_in_assembly_and_their_logarithm_elsewhere() -> None:
    ck = "a8w8_blockscale_1x128x128_256x16x64x256_16x16_16x16_1x1_16x16x1_16x16x1_1x16x1x16_4_1x1_intrawave_v1"
    assembly = "_ZN5aiter39bf16gemm_fp32bf16_tn_64x64_splitk_cleanE"
    fp8 = "flydsl_bpreshuflle_32x64x512_F8_F8_B16_2x1x0x0x4_default"
    same = {"m": 16, "n": 1536, "k": 7168, "latency_us": 18.5}
    table = [
        ("fp8_block", ck, 2),
        ("bf16", assembly, 13),
        ("fp8_block", "triton", 0),
        ("mxfp4", fp8, 0),
    ]
    rows = [
        {**same, "dtype": dtype, "kernel": kernel, "split_k": split}
        for dtype, kernel, split in table
    ]
    # The kernel of the fourth denies its format.
    first, second, third = read_aiter(rows, lookup("mi300x"))
    assert first.workload == Gemm(16, 1536, 7168, dtype="fp8_block", layout="nt")
    tiles = [row.launch.tile if row.launch else None for row in (first, second, third)]
    assert tiles == [
        Tile(16, 64, block_k=256, split_k=4, num_warps=4), Tile(64, 64, split_k=13), None
    ]  # fmt: skip
