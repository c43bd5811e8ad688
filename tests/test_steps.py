"""Steps between neighbours, their size and the cause in words."""

from __future__ import annotations

import pytest

from quantbench.analysis.steps import find_steps
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Launch, Tile
from quantbench.measurement import Grade
from quantbench.workload import Gemm

A100 = DeviceSpec("a100-test", "cuda", 108, 1410, 40 * 2**20, 164 * 2**10, 80 * 2**30, 2039, {"bf16": 312}, (8, 0))
KNOWN = Launch("ampere_gemm", tile=Tile(256, 128), blocks_per_sm=1)


def point(n: int, us: float, launch: Launch | None = KNOWN, *, m: int = 2304, k: int = 4096) -> Point:
    return Point(
        key=str(n), axes={"n": n}, op="gemm", count=1, provider="torch.mm", workload=Gemm(m, n, k), launch=launch,
        latency_us=us, low_us=us * 0.998, high_us=us * 1.002, tflops=1.0, gb_per_s=1.0, peak_share=0.5,
        grade=Grade("A"), num_samples=20, noise=0.005, clock_mhz=1410.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        # 13 column tiles of 128 are 117 blocks: 9 in a second wave of 108.
        (point(1544, 190.0), "wave 2 of 2 is 8.3 % full: 46 % idle"),
        (point(1544, 120.0, Launch("other", tile=Tile(128, 128))), "the library changed from 256x128 to 128x128"),
        (point(1544, 120.0, Launch("other")), "the library changed kernel (ampere_gemm to other)"),
        (point(1537, 190.0), "rows are aligned to 2 bytes, not 16"),
    ],
)
def test_causes(after: Point, cause: str) -> None:
    (step,) = find_steps([point(1536, 100.0), after], "n", A100)
    assert step.cause == cause
    assert step.low < step.drop < step.high


def test_what_arithmetic_does_not_account_for_is_unexplained() -> None:
    # Both fill 108 blocks of one wave; nothing in tiles and waves makes the second slower.
    (step,) = find_steps([point(1528, 100.0), point(1536, 120.0)], "n", A100)
    assert step.cause == "unexplained"
    assert step.drop == pytest.approx(1 - 1536 / 1528 * 100 / 120)


def test_noise_is_no_step() -> None:
    assert find_steps([point(1528, 100.0), point(1536, 102.0)], "n", A100) == ()


def test_each_curve_by_itself() -> None:
    # Other axes and providers are other curves: between them there is no step.
    one, two = point(1528, 100.0), point(1536, 200.0)
    other = Point(**{**two.__dict__, "provider": "triton.stream_k"})
    assert find_steps([one, other], "n", A100) == ()
