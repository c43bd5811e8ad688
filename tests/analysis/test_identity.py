"""From literal traces to launches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_devices import CPU

from quantbench.device import lookup
from quantbench.launch import Launch, Tile
from quantbench.providers.identity import (
    KernelEvent,
    identify,
    kernel_events,
    launch_of,
    read_trace,
    split_k_of,
)
from quantbench.providers.kernel_names import parse
from quantbench.workload import Attention, Gemm, Softmax, Workload

H100 = lookup("h100-sxm5-80gb")

NVJET = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT"
REDUCE = "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false>"
SWIZZLED = (
    "cutlass_80_simt_sgemm_256x128_8x4_nn_align1",
    (256, 2, 5),
    Gemm(4096, 2057, 8192, dtype="fp32"),
)
BATCH = Gemm(77, 77, 64, batch=192, dtype="fp32")
CAST = ("void at::native::vectorized_elementwise_kernel<4>", 9.0)
SKINNY = Gemm(m=8, n=2560, k=4096, layout="nt")


def kernel(name: str, dur: float, grid: list[int], block: list[int], **args: Any) -> dict[str, Any]:
    """A kernel as kineto writes it into a Chrome trace."""
    usual = {"stream": 7, "warps per SM": 7.3}
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 5140.2, "dur": dur,
        "args": {**usual, "grid": grid, "block": block, **args},
    }  # fmt: skip


def trace() -> list[dict[str, Any]]:
    """One split product as torch 2.11 traces it: operators, a memset, the product, its
    reduction.
    """
    return [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10.0, "dur": 30.0, "args": {}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "ts": 20.0, "dur": 5.0, "args": {}},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 5138.0, "dur": 900.0, "args": {"bytes": 8}},
        kernel(
            NVJET, 8.9, [80, 1, 1], [384, 1, 1],
            **{"registers per thread": 168, "shared memory": 213_016, "blocks per SM": 0.606,
               "est. achieved occupancy %": 0, "occupancy": {"activeBlocksPerMultiprocessor": 0}},
        ),
        kernel(
            REDUCE, 12.0, [80, 1, 1], [32, 16, 1],
            **{"registers per thread": 40, "shared memory": 0, "blocks per SM": 0.606,
               "est. achieved occupancy %": 15, "occupancy": {"activeBlocksPerMultiprocessor": 3}},
        ),
        {"ph": "s", "id": 3, "pid": 1, "tid": 1, "ts": 20.0, "cat": "ac2g", "name": "ac2g"},
        {"name": "process_name", "ph": "M", "ts": 0.0, "pid": 0, "args": {"name": "python"}},
    ]  # fmt: skip


def test_kernels_of_a_trace() -> None:
    product, reduction = kernel_events(trace())
    assert product == KernelEvent(Launch(NVJET, (80, 1, 1), (384, 1, 1), 168, 213_016), 8.9)
    assert reduction == KernelEvent(
        Launch(REDUCE, (80, 1, 1), (32, 16, 1), 40, 0, blocks_per_sm=3), 12.0
    )


def test_old_traces_capitalise_the_category_and_know_less() -> None:
    old = [{"ph": "X", "cat": "Kernel", "name": "volta_sgemm_128x64_nn", "dur": 3}]
    assert kernel_events(old) == (KernelEvent(Launch("volta_sgemm_128x64_nn"), 3.0),)
    assert launch_of(kernel_events(old), Gemm(64, 64, 64, dtype="fp32"), H100) == Launch(
        "volta_sgemm_128x64_nn", tile=Tile(64, 128)
    )


def test_a_split_product_is_named_by_its_product() -> None:
    # The reduction takes longer here and is still not the kernel. Kineto's 0 blocks for more than
    # 48 KiB of shared memory is no residency, nor is `blocks per SM`, its grid size over SM count.
    assert launch_of(kernel_events(trace()), SKINNY, H100) == Launch(
        kernel=NVJET,
        grid=(80, 1, 1),
        block=(384, 1, 1),
        registers=168,
        shared_memory_bytes=213_016,
        blocks_per_sm=1,
        tile=Tile(8, 64, block_k=64, split_k=2, stages=16, num_warps=12),
    )


@pytest.mark.parametrize(
    ("registers", "told", "blocks_per_sm"),
    [(32, {"occupancy": {"activeBlocksPerMultiprocessor": 5}}, 5), (128, {}, 4)],
)
def test_residency_is_the_profilers_or_computed(
    registers: int, told: dict[str, Any], blocks_per_sm: int
) -> None:
    known = {"registers per thread": registers, "shared memory": 16_384, **told}
    events = [kernel("volta_sgemm_128x64_nn", 3.0, [8, 8, 1], [128, 1, 1], **known)]
    launch = launch_of(kernel_events(events), Gemm(64, 64, 64), H100)
    assert launch.blocks_per_sm == blocks_per_sm


@pytest.mark.parametrize(
    ("workload", "names", "chosen"),
    [
        # The longest of those that compute what was asked, however long a cast beside them takes.
        (Gemm(64, 64, 64), [CAST, ("ampere_sgemm_32x128_tn", 2.0),
                            ("ampere_sgemm_128x64_tn", 3.0)], "ampere_sgemm_128x64_tn"),
        (Attention(1, 1, 64, 64, 64), [CAST,
                                       ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", 4.0)],
         "fmha_cutlassF_bf16_aligned_64x128_rf_sm80"),
        (Softmax(1, 64, 64), [CAST,
                              ("void softmax_warp_forward<float, float, float, 6>", 4.0)],
         "void softmax_warp_forward<float, float, float, 6>"),
        # No name says what it does: the longest of all.
        (Gemm(64, 64, 64), [("someone_elses", 1.0), ("kernel_of_theirs", 2.0)], "kernel_of_theirs"),
        # The math backend of attention runs products and a softmax.
        (Attention(1, 1, 64, 64, 64), [("ampere_sgemm_32x128_tn", 2.0), ("void softmax_warp_forward<float>", 4.0),
                                       (REDUCE, 9.0)], "void softmax_warp_forward<float>"),
    ],
)  # fmt: skip
def test_which_of_several(workload: Workload, names: list[tuple[str, float]], chosen: str) -> None:
    launch = launch_of(
        [KernelEvent(Launch(name), duration_us) for name, duration_us in names], workload, H100
    )
    assert launch.kernel == chosen


@pytest.mark.parametrize(
    ("name", "grid", "gemm", "splitting", "split_k"),
    [
        # nvjet on an H100 (torch.profiler): 2560/64 = 40 tiles, in 80 and 120 blocks.
        (NVJET, (80, 1, 1), SKINNY, True, 2),
        (NVJET, (120, 1, 1), Gemm(8, 2560, 9216, layout="nt"), True, 3),
        # Capped at what is resident: 132 blocks are no whole number of 40 tiles.
        (NVJET, (132, 1, 1), SKINNY, True, None),
        # A persistent kernel that does not split has fewer blocks than tiles.
        (
            "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
            (132, 1, 1),
            Gemm(8192, 8192, 8192),
            False,
            1,
        ),
        # CUTLASS, swizzled 8 deep: 32·8 by ⌈9/8⌉, and five parts in z.
        (*SWIZZLED, False, 5),
        (*SWIZZLED, True, 5),
        # A batch is in z as well.
        ("ampere_sgemm_128x128_nt", (1, 1, 192), BATCH, False, 1),
        ("ampere_sgemm_128x128_nt", (1, 1, 384), BATCH, True, 2),
        # A reduction ran, and nothing in the grid shows the parts.
        ("ampere_sgemm_128x128_nt", (4, 4, 1), Gemm(512, 512, 4096, dtype="fp32"), True, None),
        ("void gemv2T_kernel_val<int, int, float>", (64, 1, 1), Gemm(1, 4096, 4096), False, None),
    ],
)
def test_split_k_from_the_grid(
    name: str, grid: tuple[int, int, int], gemm: Gemm, splitting: bool, split_k: int | None
) -> None:
    assert split_k_of(grid, parse(name), gemm, splitting=splitting) == split_k


def test_a_tile_whose_split_is_not_known_is_not_told() -> None:
    events = [
        KernelEvent(Launch(NVJET, (132, 1, 1), (384, 1, 1)), 8.9),
        KernelEvent(Launch(REDUCE), 1.0),
    ]
    launch = launch_of(events, SKINNY, H100)
    assert (launch.kernel, launch.tile) == (NVJET, None)
    assert launch_of([], SKINNY, H100) is None


def test_identify_runs_once_under_the_given_profiler() -> None:
    runs: list[str] = []

    def profiled(run: Callable[[], None]) -> list[dict[str, Any]]:
        run()
        return trace()

    launch = identify(lambda: runs.append("run"), SKINNY, H100, trace=profiled)
    assert (launch.kernel, runs) == (NVJET, ["run"])


def test_a_cpu_has_no_kernels_and_is_not_profiled() -> None:
    def fail() -> None:
        raise AssertionError("run")

    assert identify(fail, SKINNY, CPU) is None


def test_a_trace_file_with_odd_bytes_in_a_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = json.dumps({"schemaVersion": 1, "traceEvents": trace()})
    path.write_bytes(text.replace("Memset (Device)", "Memset\t(\\u0000").encode() + b"\n")
    assert len(kernel_events(read_trace(path))) == 2
    path.write_bytes(text.encode().replace(b"nvjet_sm90", b"\xffvjet_sm90"))
    assert kernel_events(read_trace(path))[0].launch.kernel.endswith(
        "vjet" + NVJET.removeprefix("nvjet")
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(64, 4160), (96, 4160), (4160, 64)])
def test_a_real_product_is_identified(m: int, n: int) -> None:
    """Ragged and lopsided, so that a tile read the wrong way round does not fit the grid."""
    import torch

    from quantbench import device

    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    spec = device.current()
    a = torch.randn(m, 1024, dtype=torch.float16, device="cuda")
    b = torch.randn(n, 1024, dtype=torch.float16, device="cuda").t()
    c = torch.empty(m, n, dtype=torch.float16, device="cuda")
    launch = identify(
        lambda: torch.mm(a, b, out=c), Gemm(m, n, 1024, dtype="fp16", layout="nt"), spec
    )
    assert parse(launch.kernel).role == "gemm"
    assert launch.grid is not None
    assert launch.registers
    assert launch.blocks_per_sm is not None
    name = parse(launch.kernel)
    if name.tile is None or name.split_k_unknown or launch.tile is None or name.family == "cutlass":
        pytest.skip(f"{launch.kernel} does not tell its tile, or pads its grid")
    cluster_m, cluster_n = name.cluster or (1, 1)
    tiles_m = -(-m // name.tile.block_m // cluster_m) * cluster_m
    tiles_n = -(-n // name.tile.block_n // cluster_n) * cluster_n
    if name.persistent and launch.num_blocks > 0.8 * spec.sm_count:
        pytest.skip("the grid may be cut to what is resident")
    assert launch.num_blocks % (tiles_m * tiles_n) == 0


def test_kernels_come_in_the_order_that_they_began_not_that_of_the_file() -> None:
    late, early = (kernel(name, 1.0, [1, 1, 1], [32, 1, 1]) for name in ("late", "early"))
    events = [{**late, "ts": 20.5}, {**early, "ts": 3.25}]
    assert [event.launch.kernel for event in kernel_events(events)] == ["early", "late"]
