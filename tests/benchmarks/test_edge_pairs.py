"""`pytest --benchmark-only`: kernels on both sides of predicted edges, by the timer that sweeps
use.
"""

import pytest

from quantbench.device.spec import DeviceSpec
from quantbench.pytest_plugin import DeviceBenchmark
from quantbench.sweep.axes import Held, parse_axis, with_defaults
from quantbench.sweep.edges import predicted_edges
from quantbench.sweep.sizes import past_edge
from quantbench.timing.options import TimingOptions
from quantbench.timing.session import Timer
from quantbench.workload import Attention, Gemm, Softmax

PAIRS = 3
RANGE = {"cuda": "n=1024:8192", "cpu": "n=256:1024"}
# The neighbours that `@edges` measures: they show the edge, no misalignment, no other variant.
N_SIDES = pytest.mark.parametrize("past", [0, past_edge("n", "bf16")], ids=["below", "past"])
SIDES = pytest.mark.parametrize("past", [0, past_edge("head-dim", "bf16")], ids=["below", "past"])


@pytest.fixture(scope="module")
def spec(_device_timer: tuple[DeviceSpec, Timer, TimingOptions]) -> DeviceSpec:
    return _device_timer[0]


@pytest.fixture(scope="module")
def held(spec: DeviceSpec) -> Held:
    return with_defaults(Held(), spec)


@pytest.fixture(scope="module")
def edges(spec: DeviceSpec, held: Held) -> list[int]:
    return predicted_edges((parse_axis(RANGE[spec.kind]),), 0, held, spec)[:PAIRS]


@pytest.mark.benchmark(group="gemm: n past a predicted edge")
@N_SIDES
@pytest.mark.parametrize("pair", range(PAIRS))
def test_gemm(
    device_benchmark: DeviceBenchmark, held: Held, edges: list[int], pair: int, past: int
) -> None:
    device_benchmark.workload(
        Gemm(held.m, edges[pair] + past, held.k, dtype=held.dtype), "torch.mm"
    )


@pytest.mark.benchmark(group="softmax: sk past a power of two")
@SIDES
def test_softmax(
    device_benchmark: DeviceBenchmark, spec: DeviceSpec, held: Held, past: int
) -> None:
    size = (2048 if spec.kind == "cuda" else 256) + past
    provider = "triton.fused" if spec.kind == "cuda" else "torch.eager"
    device_benchmark.workload(Softmax(8, size, size, dtype=held.dtype), provider)


@pytest.mark.benchmark(group="attention: head_dim past 64")
@SIDES
def test_attention(
    device_benchmark: DeviceBenchmark, spec: DeviceSpec, held: Held, past: int
) -> None:
    seq = 2048 if spec.kind == "cuda" else 256
    device_benchmark.workload(Attention(1, 8, seq, seq, 64 + past, dtype=held.dtype), "torch.flash")
