"""What `matmul` refuses, before anything is launched, and in which words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreter import ACTIVE
from quantbench.kernels import launching
from quantbench.kernels.gemm import matmul
from quantbench.kernels.launching import unsupported_architecture

from quantbench.errors import InputError, UnsupportedError
from quantbench.launch import Launch, Tile
from quantbench.workload.dtypes import missing_format

A = torch.ones(32, 48, dtype=torch.float16)
B = torch.ones(48, 64, dtype=torch.float16)


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (A, B[:40], "a of shape (32, 48) and b of shape (40, 64); expected b with k = 48 rows"),
        (
            A[0],
            B,
            "a of shape (48,) and b of shape (48, 64); expected [m, k] and [k, n], or [batch, m, k] and [batch",
        ),
        (
            A.expand(2, 32, 48),
            B.expand(3, 48, 64),
            "a of shape (2, 32, 48) and b of shape (3, 48, 64); expected the sa",
        ),
        (A[:0], B, "a of shape (0, 48) and b of shape (48, 64); expected sizes of at least 1"),
        (
            A,
            B.float(),
            "b of shape (48, 64) in float32 on cpu; expected (48, 64) in float16 on cpu",
        ),
        (
            A.double(),
            B.double(),
            "operands in float64; expected float16, bfloat16, float32, float8_e4m3fn",
        ),
        (
            A,
            B.to("meta"),
            "b of shape (48, 64) in float16 on meta; expected (48, 64) in float16 on cpu",
        ),
        (
            torch.ones(32, 96, dtype=torch.float16)[:, ::2],
            B,
            "a with strides (96, 2); expected row- or column-major st",
        ),
        (
            A,
            torch.ones(48, dtype=torch.float16)[:, None].expand(48, 64),
            "b with strides (1, 0); expected row- or colu",
        ),
    ],
)
def test_operands_that_do_not_fit(a: torch.Tensor, b: torch.Tensor, words: str) -> None:
    with pytest.raises(InputError) as caught:
        matmul(a, b)
    assert str(caught.value).startswith(f"matmul: {words}")


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (
            torch.empty(64, 32, dtype=torch.float16),
            "out of shape (64, 32) in float16 on cpu; expected (32, 64) in float16 on cpu",
        ),
        (
            torch.empty(32, 64),
            "out of shape (32, 64) in float32 on cpu; expected (32, 64) in float16 on cpu",
        ),
        (
            torch.empty(32, 64, dtype=torch.float16, device="meta"),
            "out of shape (32, 64) in float16 on meta; expected (32, 64) in float16 on cpu",
        ),
        (
            torch.empty(64, 32, dtype=torch.float16).t(),
            "out with strides (1, 32); expected row-major storage without overlaps",
        ),
        (
            torch.empty(64, dtype=torch.float16).expand(32, 64),
            "out with strides (0, 1); expected row-major storage without overlaps",
        ),
    ],
)
def test_results_that_do_not_fit(out: torch.Tensor, words: str) -> None:
    with pytest.raises(InputError) as caught:
        matmul(A, B, out=out)
    assert str(caught.value) == f"matmul: {words}"


def test_results_of_a_batch_must_not_overlap() -> None:
    a, b = A.expand(2, 32, 48), B.expand(2, 48, 64)
    with pytest.raises(
        InputError,
        match=r"out with strides \(64, 64, 1\); expected row-major storage without overlaps",
    ):
        matmul(
            a, b, out=torch.empty(33, 64, dtype=torch.float16).as_strided((2, 32, 64), (64, 64, 1))
        )


def test_tf32_is_for_fp32_operands() -> None:
    with pytest.raises(InputError) as caught:
        matmul(A, B, tf32=True)
    assert (
        str(caught.value)
        == "matmul: tf32 = True with operands in float16; expected operands in float32"
    )


@pytest.mark.skipif(ACTIVE, reason="the interpreter takes CPU tensors")
def test_cpu_tensors_need_the_interpreter() -> None:
    with pytest.raises(UnsupportedError) as caught:
        matmul(A, B)
    assert str(caught.value) == (
        "matmul: operands on cpu; expected CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported"
    )


@pytest.mark.parametrize(
    ("tile", "schedule", "words"),
    [
        (
            Tile(96, 128),
            "data_parallel",
            "tile 96x128x32 with block_m = 96; expected a power of two of at least 16",
        ),
        (
            Tile(128, 8),
            "data_parallel",
            "tile 128x8x32 with block_n = 8; expected a power of two of at least 16",
        ),
        (
            Tile(64, 64, 512),
            "data_parallel",
            "tile 64x64x512 with block_k = 512; expected at most 256",
        ),
        (
            Tile(64, 64, num_warps=3),
            "data_parallel",
            "tile 64x64x32 with num_warps = 3; expected a power of two up to",
        ),
        (
            Tile(64, 64, split_k=2),
            "stream_k",
            "tile 64x64x32 split-k 2 with schedule = 'stream_k'; expected schedule s",
        ),
        (
            Tile(64, 64, 64, split_k=5),
            "split_k",
            "tile 64x64x64 split-k 5 with k = 256; expected at most 4 parts",
        ),
        (
            Tile(64, 64),
            "serpentine",
            "schedule = 'serpentine'; expected one of data_parallel, split_k, stream_k, pers",
        ),
    ],
)
def test_tiles_that_no_kernel_has(tile: Tile, schedule: str, words: str) -> None:
    from made_operands import contiguous
    from quantbench.kernels.gemm.config import configure

    from quantbench.workload import Gemm

    with pytest.raises(InputError) as caught:
        configure(contiguous(Gemm(256, 256, 256)), schedule, tile, (8, 0))
    assert str(caught.value).startswith(f"matmul: {words}")


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ((7, 0), (3, 2), None),
        (
            (7, 5),
            (3, 7),
            "our kernels do not run on sm_75 with triton 3.7; it needs triton 3.2 (torch 2.6)",
        ),
        (
            (6, 1),
            (3, 2),
            "sm_61 has no tensor cores; it needs a GPU of compute capability 7.0 or newer",
        ),
        (
            (8, 0),
            (3, 5),
            "our kernels do not run on sm_80 with triton 3.5; it needs triton 3.6 or newer (torch 2.10)",
        ),
        ((10, 0), (3, 6), None),
    ],
)
def test_which_triton_an_architecture_needs(
    capability: tuple[int, int], version: tuple[int, int], reason: str | None
) -> None:
    assert unsupported_architecture(capability, version) == reason


def test_a_launch_on_volta_says_which_versions_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETER", False)
    monkeypatch.setattr(launching, "_capability", lambda *_: (7, 0))
    monkeypatch.setattr(
        launching, "unsupported_architecture", lambda c: unsupported_architecture(c, (3, 6))
    )
    with pytest.raises(UnsupportedError) as caught:
        matmul(A, B)
    assert str(caught.value) == (
        "matmul: our kernels do not run on sm_70 with triton 3.6; expected triton 3.2 (torch 2.6)"
    )


def test_formats_that_came_later() -> None:
    assert missing_format("bf16", (7, 5)) == "bf16 needs compute capability 8.0, not 7.5"
    assert missing_format("tf32", (7, 0)) == "tf32 needs compute capability 8.0, not 7.0"
    assert missing_format("fp8", (8, 6)) == "fp8 needs compute capability 8.9, not 8.6"
    assert missing_format("fp8", (8, 9)) is None
    assert missing_format("fp16", (7, 0)) is None


def test_fused_products_do_not_depend_on_tritons_default() -> None:
    """triton 3.9 warns where a launch says nothing of them, and 3.10 no longer fuses then."""
    asked: list[dict[str, object]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda **options: asked.append(options)

    launching.enqueue(Kernel(), (1, 1, 1), {"num_warps": 4}, Launch("kernel")).call()
    assert asked == [{"num_warps": 4, "enable_fp_fusion": True}]
