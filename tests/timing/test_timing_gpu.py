"""The CUDA mechanism on a real GPU. Nothing here asserts how long something takes, only what must
hold anywhere.
"""

import time
from collections.abc import Callable

import pytest
import torch

from quantbench import device
from quantbench.device.spec import DeviceSpec
from quantbench.timing.cuda import CudaTimer
from quantbench.timing.cuda_device import HostFlagHold, SleepHold, TorchCuda
from quantbench.timing.cuda_samplers import EventSampler
from quantbench.timing.grade import grade
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import cold_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu_timing,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none"),
]


@pytest.fixture(scope="module")
def spec() -> DeviceSpec:
    return device.current()


@pytest.fixture(scope="module")
def cuda(spec: DeviceSpec) -> TorchCuda:
    return TorchCuda(spec, device.monitor(spec))


def product(n: int) -> Callable[[], None]:
    a = torch.randn(n, n, device="cuda", dtype=torch.float16)
    b = torch.randn(n, n, device="cuda", dtype=torch.float16)
    out = torch.empty(n, n, device="cuda", dtype=torch.float16)
    return lambda: torch.mm(a, b, out=out)


def test_nothing_runs_while_the_stream_is_held(cuda: TorchCuda) -> None:
    done = torch.cuda.Event()
    cuda.hold()
    done.record()
    time.sleep(0.05)
    assert not done.query()
    cuda.release()
    cuda.synchronize()
    assert done.query()
    assert cuda.was_held()


def test_a_forgotten_hold_ends_by_itself_and_is_reported(cuda: TorchCuda) -> None:
    cuda.hold()
    cuda.synchronize()  # would wait for ever without the timeout
    assert not cuda.was_held()
    cuda.release()


def test_the_sleep_that_stands_in_for_the_flag_tells_when_it_was_too_short() -> None:
    hold = SleepHold()
    hold.hold()
    hold.release()
    torch.cuda.synchronize()
    assert hold.was_held()
    hold.hold()
    torch.cuda.synchronize()
    hold.release()
    assert not hold.was_held()


def test_the_probes_were_built(cuda: TorchCuda) -> None:
    # Without Triton or a C compiler this is the sleep, and timing goes on; here it says why.
    assert isinstance(cuda._hold, HostFlagHold), cuda._note


def test_counters_tell_a_clock_that_the_card_can_have(cuda: TorchCuda, spec: DeviceSpec) -> None:
    run = product(4096)
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    batch = EventSampler(cuda, run, flush=True).sample(16)
    assert len(batch.clocks_mhz) == 16
    assert all(100 < mhz < 1.1 * spec.max_sm_clock_mhz for mhz in batch.clocks_mhz)


@pytest.mark.parametrize("cache", ["cold", "hot"])
@pytest.mark.parametrize("n", [128, 4096])
def test_a_product_is_timed_and_not_impossible(spec: DeviceSpec, n: int, cache: str) -> None:
    options = TimingOptions(cache=cache, max_time_s=0.5)
    timer = CudaTimer(options, spec, device.monitor(spec))
    got = timer.measure(product(n))
    assert (got.mode, got.cache) == ("events", cache)
    assert got.floor_us
    verdict = grade(
        got, flops=2 * n**3, min_bytes=3 * 2 * n**2, spec=spec, dtype="fp16", options=options
    )
    assert verdict.letter != "rejected", verdict.reasons


def test_copies_in_turn_are_captured(spec: DeviceSpec) -> None:
    n = 256
    min_bytes = 3 * 2 * n**2
    count = cold_copies(spec.l2_bytes, min_bytes)
    timer = CudaTimer(TimingOptions(mode="graph", max_time_s=0.5), spec, device.monitor(spec))
    got = timer.measure(product(n), copy=lambda _: product(n), min_bytes=min_bytes)
    assert (got.mode, got.cache) == ("graph", "cold")
    assert got.kernels_per_sample >= count


def test_a_failing_run_leaves_the_device_usable(cuda: TorchCuda) -> None:
    def broken() -> None:
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        EventSampler(cuda, broken, flush=True).sample(4)
    cuda.synchronize()
    assert EventSampler(cuda, product(512), flush=True).sample(4).samples_us
