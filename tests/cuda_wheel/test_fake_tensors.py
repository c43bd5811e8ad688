"""Providers, audit, timer and collectives on fake CUDA tensors: no operation meets tensors of two
devices, and calls into torch.cuda, torch.distributed and NVML have arguments that these take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import create_autospec

import pynvml
import pytest
import torch
import torch.distributed as dist
from fake_cuda import CUDA, EVENT_MS, H100, Launches, MixedDevicesError, stand_in
from quantbench.kernels.launching import TRITON

from quantbench import device
from quantbench.device.nvml import Nvml
from quantbench.device.spec import DeviceState
from quantbench.providers import catalog, collectives
from quantbench.providers.inputs import Inputs, output_templates
from quantbench.providers.tasks import LaunchTask
from quantbench.providers.torch_gemm import TorchMm
from quantbench.sweep.worker import measure
from quantbench.timing.cuda import CudaTimer
from quantbench.timing.options import TimingOptions
from quantbench.workload import Attention, Collective, Gemm, GroupedGemm, Permute, Softmax, Workload
from quantbench.workload.dtypes import MEASURED_DTYPES
from quantbench.workload.ops import COLLECTIVE_OPS

GEMM = Gemm(256, 128, 512)
WORKLOADS: tuple[Workload, ...] = (
    *(Gemm(256, 128, 512, dtype=dtype, layout="nt") for dtype in MEASURED_DTYPES),
    *(Gemm(256, 128, 512, layout=layout) for layout in ("nn", "tn")),
    Gemm(256, 128, 512, batch=3),
    *(GroupedGemm((64, 0, 32, 8), 64, 128, layout=layout) for layout in ("nn", "nt", "tn")),
    *(Permute(64, 128, 2, direction=direction) for direction in ("permute", "unpermute")),
    *(
        Softmax(2, 64, 64, dtype="fp16", mask=mask, direction=direction)
        for mask in ("causal", "full", "none")
        for direction in ("forward", "backward")
    ),
    Softmax(2, 64, 64, dtype="fp32"),
    *(
        Attention(1, 4, 128, 128, 64, kv_heads=kv_heads, dtype=dtype, direction=direction)
        for kv_heads, dtype in ((4, "bf16"), (2, "fp16"))
        for direction in ("forward", "backward")
    ),
)
#: every provider of the catalogue with every workload of its kind
CASES = [
    (provider_id, work)
    for provider_id in catalog._CATALOG
    for work in WORKLOADS
    if catalog.runs_kind(provider_id, work.kind)
]


def timer(mode: str = "auto") -> CudaTimer:
    """Makes the real timer, for few samples, on a clock that gains 500 ms with each reading."""
    readings = iter(range(10**6))
    cache = "hot" if mode == "graph" else "cold"
    options = TimingOptions(mode=mode, cache=cache, min_samples=3, max_samples=3)
    return CudaTimer(
        options, H100, DeviceState, now=lambda: next(readings) / 2, pause=lambda seconds: None
    )


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize(("provider_id", "work"), CASES, ids=str)
def test_a_point_is_prepared_checked_and_timed_on_one_device(
    provider_id: str, work: Workload
) -> None:
    provider = catalog.make(provider_id)
    reason = provider.unsupported(work, H100)
    if reason is not None:
        pytest.skip(reason)
    task = provider.prepare(work, H100)
    task.run()
    assert {tensor.device for tensor in (*task.inputs(), *task.outputs())} == {CUDA}
    reply = measure(provider, work, H100, timer(), TimingOptions())
    assert set(reply.measurement.samples_us) == {1000 * EVENT_MS}
    assert reply.checked is not None


@pytest.mark.usefixtures("h100")
def test_every_provider_runs_one_of_the_workloads() -> None:
    running = {name for name, work in CASES if catalog.make(name).unsupported(work, H100) is None}
    too_new = {
        name
        for name in catalog._CATALOG
        if name.startswith("triton.") or name == "torch.grouped_mm"
    }
    assert set(catalog._CATALOG) - running == (too_new if TRITON == (3, 2) else set())


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("provider_id", ["torch.mm", "triton.split_k"])
def test_a_graph_is_captured_and_replayed(provider_id: str) -> None:
    provider = catalog.make(provider_id)
    reason = provider.unsupported(GEMM, H100)
    if reason is not None:
        pytest.skip(reason)
    reply = measure(provider, GEMM, H100, timer("graph"), TimingOptions())
    assert reply.measurement.mode == "graph"
    assert torch.cuda.CUDAGraph.return_value.replay.called


def test_the_timers_kernels_are_launched_with_what_they_take(h100: Launches) -> None:
    measure(catalog.make("torch.mm"), GEMM, H100, timer(), TimingOptions())
    assert {name for name, _ in h100.made} == {"hold", "stamp"}
    held = next(arguments for name, arguments in h100.made if name == "hold")
    assert held["release_ptr"].pinned
    assert held["release_ptr"].dtype == torch.int32


# ---- what a machine with a GPU runs besides


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, h100: Launches) -> collectives.TorchRanks:
    """Rank 1 of 4, each with an H100, whose collectives take CUDA tensors and do nothing."""
    places = {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in (places | {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}).items():
        monkeypatch.setenv(name, str(value))
    for name in ("init_process_group", "new_group", "destroy_process_group", "barrier"):
        stand_in(monkeypatch, dist, name)
    for name in ("all_reduce", "broadcast", "all_to_all_single", "P2POp", "batch_isend_irecv"):
        stand_in(monkeypatch, dist, name, [], check=require_cuda)
    for name in ("_all_gather", "_reduce_scatter"):
        stand_in(monkeypatch, collectives, name, check=require_cuda)
    return collectives.TorchRanks("nccl")


def require_cuda(*args: Any, **kwargs: Any) -> None:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    if any(tensor.device != CUDA for tensor in tensors):
        raise MixedDevicesError(f"a collective on {[tensor.device for tensor in tensors]}")


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("op", COLLECTIVE_OPS)
def test_collectives_have_their_buffers_and_references_on_the_gpu(
    op: str, dtype: str, rank: collectives.TorchRanks
) -> None:
    with rank:
        work = collectives.TorchWork(rank)
        assert work.allocate(Collective(op, 2**16, 4, dtype, 4)) == ""
        assert work.check() == ""
        work.sample(2, 3)
    assert torch.cuda.Event.return_value.elapsed_time.called


def test_topology_asks_torch_for_what_it_has(rank: collectives.TorchRanks) -> None:
    found = collectives.topology(rank)
    assert found["gpu"] == "NVIDIA H100 80GB HBM3"
    assert str(found["nccl"]).startswith("2.")


def test_the_device_is_known_by_torchs_properties(
    h100: Launches,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("QUANTBENCH_DEVICE", raising=False)
    stand_in(monkeypatch, torch.cuda, "is_available", True)
    stand_in(monkeypatch, torch.cuda, "device_count", 1)
    assert device.current().name == H100.name


def test_nvml_has_every_function_that_is_asked() -> None:
    library = create_autospec(pynvml)
    library.NVMLError = pynvml.NVMLError
    library.nvmlDeviceGetCurrentClocksEventReasons.return_value = 0x4
    library.nvmlDeviceGetComputeRunningProcesses.return_value = []
    nvml = Nvml.open(uuid="01234567-89ab-cdef-0123-456789abcdef", library=library)
    assert nvml.state().note == ""
    assert nvml.limits().note == ""


# ---- faults are found


class Faulty(TorchMm):
    """torch.mm with a fault, which `call` makes of a, b and c."""

    def __init__(self, call: Callable[..., Callable[[], object]]) -> None:
        super().__init__("torch.mm")
        self._call = call

    def task(self, work: Gemm, device: Any, inputs: Inputs) -> LaunchTask:
        a, b = inputs.operands(work)
        c = torch.empty_like(output_templates(work)[0], device=a.device)
        return LaunchTask(self._call(a, b, c), (a, b), (c,))


FAULTS: dict[str, Callable[..., Callable[[], object]]] = {
    "an operand on the CPU": lambda a, b, c: partial(torch.mm, a, b.cpu(), out=c),
    "a result on the CPU": lambda a, b, c: partial(torch.mm, a, b, out=c.cpu()),
    "a result without memory": lambda a, b, c: partial(
        torch.mm, a, b, out=output_templates(GEMM)[0]
    ),
    "a number on the CPU": lambda a, b, c: lambda: torch.stack((a.sum(), torch.zeros(()))),
    "an index on the GPU of a tensor on the CPU": lambda a, b, c: (
        lambda: torch.zeros(9)[c[0].long()]
    ),
    "a generator of the CPU": lambda a, b, c: lambda: a.normal_(generator=torch.Generator()),
}


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_provider_that_mixes_devices_is_found(fault: str) -> None:
    with pytest.raises(RuntimeError, match="devices"):
        measure(Faulty(FAULTS[fault]), GEMM, H100, timer(), TimingOptions())


@pytest.mark.usefixtures("h100")
def test_a_kernel_of_triton_given_a_cpu_tensor_or_an_unknown_option_is_found() -> None:
    from quantbench.timing.probes import stamp

    with pytest.raises(MixedDevicesError, match="stamp: stamps_ptr on cpu"):
        stamp[(1,)](torch.zeros(4), 2, num_warps=1)
    with pytest.raises(TypeError, match="warps: no option of this triton"):
        stamp[(1,)](torch.zeros(4, device="cuda"), 2, warps=1)
    with pytest.raises(TypeError, match="max_sms"):
        stamp[(1,)](torch.zeros(4, device="cuda"), num_warps=1)
