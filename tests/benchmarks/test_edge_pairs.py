"""`pytest --benchmark-only`: products on both sides of predicted edges, by the timer that sweeps use.

pytest-benchmark keeps its own clock; here that clock is advanced by the device time of each sample, so that its table,
its JSON and its comparisons speak of the device and not of Python.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from quantbench import device
from quantbench.device.spec import DeviceSpec
from quantbench.providers import catalog
from quantbench.sweep.axes import parse_axis
from quantbench.sweep.edges import predicted_edges
from quantbench.sweep.shapes import Held, with_defaults
from quantbench.timing.grade import grade
from quantbench.timing.options import TimingOptions
from quantbench.timing.timer import Timer, make_timer
from quantbench.workload import Gemm

PAIRS = 3
RANGE = {"cuda": "n=1024:8192", "cpu": "n=256:1024"}
# A neighbour of 8 columns keeps bf16 rows aligned to 16 bytes: what it shows is the edge, not a misalignment.
PAST_THE_EDGE = 8


@dataclass
class DeviceClock:
    """A clock that only moves when a device has worked."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = DeviceClock()


@pytest.fixture(scope="module")
def spec() -> DeviceSpec:
    return device.current()


@pytest.fixture(scope="module")
def timer(spec: DeviceSpec) -> Timer:
    return make_timer(spec, TimingOptions(max_time_s=1.0 if spec.kind == "cuda" else 0.3))


@pytest.fixture(scope="module")
def edges(spec: DeviceSpec) -> list[int]:
    held = with_defaults(Held(), spec.kind, device.default_dtype(spec))
    return predicted_edges((parse_axis(RANGE[spec.kind]),), 0, held, spec)[:PAIRS]


@pytest.mark.benchmark(timer=CLOCK, group="edge pairs")
@pytest.mark.parametrize("side", ["below", "past"])
@pytest.mark.parametrize("pair", range(PAIRS))
def test_edge_pair(
    benchmark: BenchmarkFixture, spec: DeviceSpec, timer: Timer, edges: list[int], pair: int, side: str
) -> None:
    held = with_defaults(Held(), spec.kind, device.default_dtype(spec))
    n = edges[pair] + (PAST_THE_EDGE if side == "past" else 0)
    gemm = Gemm(held.m, n, held.k, dtype=held.dtype)
    task = catalog.make("torch.mm").prepare(gemm, spec)
    measurement = timer.measure(task.run)
    samples = iter(measurement.samples_us)

    def one_sample() -> None:
        CLOCK.now_s += next(samples) * 1e-6

    benchmark.pedantic(one_sample, rounds=len(measurement.samples_us), iterations=1)
    trust = grade(measurement, flops=gemm.flops, min_bytes=gemm.min_bytes, spec=spec, dtype=gemm.dtype)
    benchmark.extra_info.update(device=spec.name, workload=str(gemm), grade=trust.letter, reasons=list(trust.reasons))
    assert trust.letter != "rejected", trust.reasons
