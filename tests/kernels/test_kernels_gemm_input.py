"""What `matmul` refuses, before anything is launched, and in which words."""

from collections.abc import Callable

import pytest
import torch
from interpreter import ACTIVE
from made_operands import contiguous
from quantbench.kernels import launching
from quantbench.kernels.gemm import matmul
from quantbench.kernels.gemm.config import configure
from quantbench.kernels.launching import unsupported_architecture

from quantbench.errors import InputError, UnsupportedError
from quantbench.launch import Launch, Tile
from quantbench.workload import Gemm
from quantbench.workload.dtypes import missing_format

A = torch.ones(32, 48, dtype=torch.float16)
B = torch.ones(48, 64, dtype=torch.float16)


@pytest.mark.parametrize(
    ("a", "b", "value"),
    [
        (A, B[:40], "a of shape (32, 48) and b of shape (40, 64)"),
        (A[0], B, "a of shape (48,) and b of shape (48, 64)"),
        (A.expand(2, 32, 48), B.expand(3, 48, 64), "a of shape (2, 32, 48) and b of shape (3, 48, 64)"),
        (A[:0], B, "a of shape (0, 48) and b of shape (48, 64)"),
        (A, B.float(), "b of shape (48, 64) in float32 on cpu"),
        (A.double(), B.double(), "operands in float64"),
        (A, B.to("meta"), "b of shape (48, 64) in float16 on meta"),
        (A[:, ::2], B[:24], "a with strides (48, 2)"),
        (A, B[:, :1].expand(48, 64), "b with strides (64, 0)"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(a: torch.Tensor, b: torch.Tensor, value: str) -> None:
    with pytest.raises(InputError) as caught:
        matmul(a, b)
    assert (caught.value.operation, caught.value.value) == ("matmul", value)


@pytest.mark.parametrize(
    ("out", "value"),
    [
        (A.new_empty(64, 32), "out of shape (64, 32) in float16 on cpu"),
        (torch.empty(32, 64), "out of shape (32, 64) in float32 on cpu"),
        (A.new_empty(32, 64, device="meta"), "out of shape (32, 64) in float16 on meta"),
        (A.new_empty(64, 32).t(), "out with strides (1, 32)"),
        (A.new_empty(64).expand(32, 64), "out with strides (0, 1)"),
        (A.new_empty(33, 64).as_strided((2, 32, 64), (64, 64, 1)), "out with strides (64, 64, 1)"),
    ],
)  # fmt: skip
def test_results_that_do_not_fit(out: torch.Tensor, value: str) -> None:
    batch = out.shape[:-2]
    with pytest.raises(InputError) as caught:
        matmul(A.expand(*batch, 32, 48), B.expand(*batch, 48, 64), out=out)
    assert caught.value.value == value


def test_tf32_is_for_fp32_operands() -> None:
    with pytest.raises(InputError, match="tf32 = True with operands in float16"):
        matmul(A, B, tf32=True)


@pytest.mark.skipif(ACTIVE, reason="the interpreter takes CPU tensors")
def test_cpu_tensors_need_the_interpreter() -> None:
    with pytest.raises(UnsupportedError) as caught:
        matmul(A, B)
    assert caught.value.value == "operands on cpu"
    with pytest.raises(InputError, match=r"mine: tensors on cpu; .* TRITON_INTERPRET=1"):
        launching.describe("mine", None, {}, A.device)


@pytest.mark.parametrize(
    ("tile", "schedule", "value"),
    [
        (Tile(96, 128), "data_parallel", "tile 96x128x32 with block_m = 96"),
        (Tile(128, 8), "data_parallel", "tile 128x8x32 with block_n = 8"),
        (Tile(64, 64, 512), "data_parallel", "tile 64x64x512 with block_k = 512"),
        (Tile(64, 64, num_warps=3), "data_parallel", "tile 64x64x32 with num_warps = 3"),
        (Tile(64, 64, split_k=2), "stream_k", "tile 64x64x32 split-k 2 with schedule = 'stream_k'"),
        (Tile(64, 64, 64, split_k=5), "split_k", "tile 64x64x64 split-k 5 with k = 256"),
        (Tile(64, 64), "serpentine", "schedule = 'serpentine'"),
    ],
)
def test_tiles_that_no_kernel_has(tile: Tile, schedule: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        configure(contiguous(Gemm(256, 256, 256)), schedule, tile, (8, 0))
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ((7, 0), (3, 2), None),
        ((7, 5), (3, 7), "our kernels do not run on sm_75 with triton 3.7; it needs triton 3.2 (torch 2.6)"),
        ((6, 1), (3, 2), "sm_61 has no tensor cores; it needs a GPU of compute capability 7.0 or newer"),
        ((8, 0), (3, 5), "our kernels do not run on sm_80 with triton 3.5; it needs triton 3.6 or newer (torch 2.10)"),
        ((10, 0), (3, 6), None),
    ],
)  # fmt: skip
def test_which_triton_an_architecture_needs(
    capability: tuple[int, int], version: tuple[int, int], reason: str | None
) -> None:
    assert unsupported_architecture(capability, version) == reason


def test_a_launch_on_volta_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETER", False)
    monkeypatch.setattr(launching, "_capability", lambda *_: (7, 0))
    monkeypatch.setattr(
        launching, "unsupported_architecture", lambda c: unsupported_architecture(c, (3, 6))
    )
    with pytest.raises(UnsupportedError, match=r"sm_70 with triton 3\.6; expected triton 3\.2"):
        matmul(A, B)


@pytest.mark.parametrize(
    ("dtype", "first"), [("bf16", (8, 0)), ("tf32", (8, 0)), ("fp8", (8, 9)), ("fp16", (0, 0))]
)
def test_formats_that_came_later(dtype: str, first: tuple[int, int]) -> None:
    for capability in ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9)):
        assert (missing_format(dtype, capability) is None) == (capability >= first)


def test_fused_products_do_not_depend_on_tritons_default() -> None:
    """triton 3.9 warns where a launch says nothing of them, and 3.10 no longer fuses then."""
    asked: list[dict[str, object]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda **options: asked.append(options)

    launching.enqueue(Kernel(), (1, 1, 1), {"num_warps": 4}, Launch("kernel")).call()
    assert asked == [{"num_warps": 4, "enable_fp_fusion": True}]
