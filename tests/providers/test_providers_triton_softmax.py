"""`triton.fused`: what it refuses and in which words, and that it keeps to the provider's seam."""

from __future__ import annotations

import pytest
from interpreter import ACTIVE, in_interpreter
from quantbench.kernels.launching import TRITON

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import MeasurementError
from quantbench.launch import Tile
from quantbench.providers import catalog
from quantbench.providers.audit import check
from quantbench.providers.triton_softmax import TritonFusedSoftmax
from quantbench.workload import Gemm, Softmax, Workload

CPU = DeviceSpec(
    name="cpu-test", kind="cpu", sm_count=1, sm_clock_mhz=3000, l2_bytes=2**20, smem_per_sm_bytes=0,
    memory_bytes=2**33, memory_gb_per_s=20, peak_tflops={"fp32": 0.1},
)  # fmt: skip
H200, V100 = lookup("h200-sxm-141gb"), lookup("v100-sxm2-16gb")
not_interpreted = pytest.mark.skipif(ACTIVE, reason="the interpreter plays the GPU")


def test_the_catalog_makes_it() -> None:
    provider = catalog.make("triton.fused")
    assert provider.id == "triton.fused"


@not_interpreted
@pytest.mark.parametrize(
    ("workload", "device", "reason"),
    [
        (Softmax(2, 8, 8), H200, None),
        (Softmax(2, 8, 8, direction="backward"), H200, None),
        (Softmax(2, 8, 16384, mask="full"), H200, None),
        (Softmax(2, 8, 16385, mask="full"), H200, "triton.fused takes rows of up to 16384 columns, not 16385"),
        (
            Softmax(2, 8, 8),
            CPU,
            "triton.fused needs a CUDA GPU, or TRITON_INTERPRET=1 set to run in triton's interpreter",
        ),
        (Gemm(8, 8, 8), H200, "triton.fused runs softmax, not gemm"),
    ],
)
def test_what_is_refused(workload: Workload, device: DeviceSpec, reason: str | None) -> None:
    assert TritonFusedSoftmax().unsupported(workload, device) == reason


@not_interpreted
@pytest.mark.skipif(TRITON < (3, 3), reason="this triton still serves V100")
def test_v100_is_told_which_versions_to_install() -> None:
    reason = TritonFusedSoftmax().unsupported(Softmax(2, 8, 8, dtype="fp16"), V100)
    assert reason is not None
    assert reason.endswith("it needs torch 2.6 with triton 3.2 installed")


@in_interpreter
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("rows", "cols", "mask"), [(33, 33, "causal"), (9, 65, "full"), (9, 65, "none")])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_its_results_pass_the_check_before_timing(dtype: str, rows: int, cols: int, mask: str, direction: str) -> None:
    work = Softmax(6, rows, cols, dtype=dtype, mask=mask, scale=0.125, mask_batch=2, direction=direction)
    provider = TritonFusedSoftmax()
    assert provider.unsupported(work, CPU) is None
    check(provider, work, CPU)
    assert provider.prepare(work, CPU).launch() is None  # nothing is launched in the interpreter


@in_interpreter
def test_the_check_sees_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagonal one column off: rows are told to be one longer than they are."""
    from quantbench.kernels import softmax

    shared = softmax._shared_arguments
    monkeypatch.setattr(
        softmax, "_shared_arguments", lambda x, mask, tile: {**shared(x, mask, tile), "rows_per_head": x.shape[-2] + 1}
    )
    with pytest.raises(MeasurementError, match=r"relative error|not written"):
        check(TritonFusedSoftmax(), Softmax(4, 16, 16, dtype="fp16"), CPU)


@in_interpreter
def test_bf16_is_refused_in_the_interpreter() -> None:
    assert TritonFusedSoftmax().unsupported(Softmax(2, 8, 8), CPU) == "triton's interpreter truncates to bf16"


@in_interpreter
def test_a_tile_of_ones_own_is_used() -> None:
    task = TritonFusedSoftmax(Tile(2, 64)).prepare(Softmax(4, 40, 40, dtype="fp16"), CPU)
    assert task._work.launch.grid == (80, 1, 1)  # type: ignore[attr-defined]
