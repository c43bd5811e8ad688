"""The triton GEMM providers: what they refuse and in which words, and that they keep to the provider's seam."""

from __future__ import annotations

import pytest
from interpreter import ACTIVE, in_interpreter
from quantbench.kernels.launching import TRITON

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import MeasurementError
from quantbench.launch import Tile
from quantbench.providers import catalog, triton_gemm
from quantbench.providers.audit import check
from quantbench.workload import Gemm, Softmax

IDS = ("triton.data_parallel", "triton.split_k", "triton.stream_k", "triton.persistent")
CPU = DeviceSpec(
    name="cpu-test", kind="cpu", sm_count=1, sm_clock_mhz=3000, l2_bytes=2**20, smem_per_sm_bytes=0,
    memory_bytes=2**33, memory_gb_per_s=20, peak_tflops={"fp32": 0.1},
)  # fmt: skip
not_interpreted = pytest.mark.skipif(ACTIVE, reason="the interpreter plays the GPU")


@pytest.mark.parametrize("provider_id", IDS)
def test_the_catalog_makes_them(provider_id: str) -> None:
    provider = catalog.make(provider_id)
    assert provider.id == provider_id


@not_interpreted
@pytest.mark.parametrize(
    ("workload", "device", "reason"),
    [
        (Gemm(64, 64, 64), lookup("h200-sxm-141gb"), None),
        (Gemm(64, 64, 64, dtype="fp8"), lookup("h200-sxm-141gb"), None),
        (Gemm(64, 64, 64, dtype="fp8"), lookup("a100-sxm4-80gb"), "sm_80 has no fp8 products"),
        (Gemm(64, 64, 64, dtype="int8"), lookup("a100-sxm4-80gb"), "triton.split_k does not take int8"),
        (
            Gemm(64, 64, 64),
            CPU,
            "triton.split_k needs a CUDA GPU, or TRITON_INTERPRET=1 set to run in triton's interpreter",
        ),
        (Softmax(2, 16, 16), lookup("h200-sxm-141gb"), "triton.split_k runs matrix products, not softmax"),
    ],
)
def test_what_is_refused(workload: Gemm | Softmax, device: DeviceSpec, reason: str | None) -> None:
    assert triton_gemm.TritonSplitK().unsupported(workload, device) == reason


@not_interpreted
@pytest.mark.skipif(TRITON < (3, 3), reason="this triton still serves V100")
def test_v100_is_told_which_versions_to_install() -> None:
    reason = triton_gemm.TritonDataParallel().unsupported(Gemm(64, 64, 64, dtype="fp16"), lookup("v100-sxm2-16gb"))
    assert reason == (
        f"triton {TRITON[0]}.{TRITON[1]} makes no tensor-core code for V100 (sm_70); "
        "it needs torch 2.6 with triton 3.2 installed"
    )


@in_interpreter
@pytest.mark.parametrize("provider_id", IDS)
@pytest.mark.parametrize("gemm", [Gemm(70, 40, 50, dtype="fp16"), Gemm(33, 40, 48, 2, "fp32", "nt")], ids=str)
def test_their_results_pass_the_check_before_timing(provider_id: str, gemm: Gemm) -> None:
    provider = catalog.make(provider_id)
    assert provider.unsupported(gemm, CPU) is None
    check(provider, gemm, CPU)
    assert provider.prepare(gemm, CPU).launch() is None  # nothing is launched in the interpreter


@in_interpreter
def test_the_check_sees_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost reduction step: k is told as half of what it is."""
    from quantbench.kernels.gemm import host as gemm

    sizes = gemm._sizes
    monkeypatch.setattr(gemm, "_sizes", lambda operands: {**sizes(operands), "k": operands.gemm.k // 2})
    with pytest.raises(MeasurementError, match="relative error"):
        check(triton_gemm.TritonDataParallel(Tile(32, 32, 16)), Gemm(40, 40, 64, dtype="fp16"), CPU)


@in_interpreter
def test_bf16_is_refused_in_the_interpreter() -> None:
    reason = triton_gemm.TritonDataParallel().unsupported(Gemm(64, 64, 64), CPU)
    assert reason == "triton's interpreter multiplies the bit patterns of bf16"


@in_interpreter
def test_a_tile_of_ones_own_is_used() -> None:
    task = triton_gemm.TritonDataParallel(Tile(16, 32)).prepare(Gemm(40, 40, 40, dtype="fp16"), CPU)
    assert task._work.launch.grid == (6, 1, 1)  # type: ignore[attr-defined]
