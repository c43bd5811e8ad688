"""`triton.flash`: what it refuses and in which words, and that it keeps to the provider's seam."""

from __future__ import annotations

import pytest
from interpreter import ACTIVE, in_interpreter

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import MeasurementError
from quantbench.launch import Tile
from quantbench.providers import catalog
from quantbench.providers.audit import check
from quantbench.providers.triton_attention import TritonFlash
from quantbench.workload import Attention, Gemm, Workload

CPU = DeviceSpec(
    name="cpu-test", kind="cpu", sm_count=1, sm_clock_mhz=3000, l2_bytes=2**20, smem_per_sm_bytes=0,
    memory_bytes=2**33, memory_gb_per_s=20, peak_tflops={"fp32": 0.1},
)  # fmt: skip
H200, V100 = lookup("h200-sxm-141gb"), lookup("v100-sxm2-16gb")
not_interpreted = pytest.mark.skipif(ACTIVE, reason="the interpreter plays the GPU")


def test_the_catalog_makes_it() -> None:
    provider = catalog.make("triton.flash")
    assert provider.id == "triton.flash"


@not_interpreted
@pytest.mark.parametrize(
    ("workload", "device", "reason"),
    [
        (Attention(1, 2, 8, 8, 64), H200, None),
        (Attention(1, 2, 8, 8, 75, direction="backward"), H200, None),
        (Attention(1, 2, 8, 8, 64, dtype="fp32"), lookup("a100-sxm4-80gb"), None),
        (Attention(1, 2, 8, 8, 512), H200, "triton.flash takes head_dim from 8 to 256, not 512"),
        (Attention(1, 2, 8, 8, 64, dtype="fp16"), V100, "triton compiles no attention for sm_70"),
        (
            Attention(1, 2, 8, 8, 64),
            CPU,
            "triton.flash needs a CUDA GPU, or TRITON_INTERPRET=1 set to run in triton's interpreter",
        ),
        (Gemm(8, 8, 8), H200, "triton.flash runs attention, not gemm"),
    ],
)
def test_what_is_refused(workload: Workload, device: DeviceSpec, reason: str | None) -> None:
    assert TritonFlash().unsupported(workload, device) == reason


@in_interpreter
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("seq_q", "seq_k", "causal"), [(65, 65, True), (33, 50, False)])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_its_results_pass_the_check_before_timing(
    dtype: str, seq_q: int, seq_k: int, causal: bool, direction: str
) -> None:
    work = Attention(1, 4, seq_q, seq_k, 40, kv_heads=2, dtype=dtype, causal=causal, direction=direction)
    provider = TritonFlash()
    assert provider.unsupported(work, CPU) is None
    check(provider, work, CPU)
    assert provider.prepare(work, CPU).launch() is None  # nothing is launched in the interpreter


@in_interpreter
def test_the_check_sees_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that end one row early."""
    from quantbench.kernels.attention import host as attention

    arguments = attention.arguments

    def shorter(*given: object) -> dict[str, object]:
        made = arguments(*given)  # type: ignore[arg-type]
        return {**made, "seq_k": made["seq_k"] - 1}

    monkeypatch.setattr(attention, "arguments", shorter)
    with pytest.raises(MeasurementError, match="relative error"):
        check(TritonFlash(), Attention(1, 2, 20, 33, 32, dtype="fp16", causal=False), CPU)


@in_interpreter
def test_bf16_is_refused_in_the_interpreter() -> None:
    reason = TritonFlash().unsupported(Attention(1, 2, 8, 8, 64), CPU)
    assert reason == "triton's interpreter multiplies the bit patterns of bf16"


@in_interpreter
def test_a_tile_of_ones_own_is_used() -> None:
    provider = TritonFlash(Tile(32, 32), schedule="plain")
    task = provider.prepare(Attention(1, 2, 40, 40, 32, dtype="fp16"), CPU)
    assert task._work.launch.grid == (4, 1, 1)  # type: ignore[attr-defined]
