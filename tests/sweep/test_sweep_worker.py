"""The worker process itself, with providers that misbehave in every way: real processes, on the
CPU.
"""

import pytest
import torch
from made_devices import CPU
from sweep_doubles import QUICK

from quantbench.errors import MeasurementError
from quantbench.measurement import Measurement
from quantbench.sweep.child import WorkerLostError, WorkerProcess
from quantbench.sweep.messages import Reply, Request
from quantbench.sweep.worker import Worker
from quantbench.workload import Gemm

pytestmark = pytest.mark.usefixtures("cpu_and_providers")


def ask(worker: WorkerProcess, provider: str, n: int) -> Reply:
    request = Request(Gemm(64, n, 64, dtype="fp32"), f"tests.fake_providers:{provider}")
    return worker.ask(request, 60.0, lambda: None)


@pytest.mark.slow
def test_it_says_on_what_it_runs(worker: WorkerProcess) -> None:
    assert worker.hello.device.kind == "cpu"
    assert worker.hello.device.name.startswith("cpu-")
    assert {"torch", "python", "quantbench"} <= worker.hello.software.keys()


def test_a_point_is_checked_and_timed(worker: WorkerProcess) -> None:
    reply = ask(worker, "Good", 64)
    assert len(reply.measurement.samples_us) >= 3
    assert {"check", "inputs", "warm-up", "measuring"} <= reply.phases_s.keys()


@pytest.mark.parametrize("provider", ["Picky", "PickyLate"])
def test_what_a_provider_does_not_do_is_skipped_with_its_reason(
    worker: WorkerProcess, provider: str
) -> None:
    reply = ask(worker, provider, 63)
    assert reply.skipped is not None
    assert "even n" in reply.skipped or "odd n" in reply.skipped
    assert ask(worker, provider, 64).measurement is not None


def test_what_cannot_fit_into_the_memory_is_not_tried(worker: WorkerProcess) -> None:
    huge = Gemm(2**20, 2**20, 2**10, dtype="fp32")
    reply = worker.ask(Request(huge, "torch.mm"), 60.0, lambda: None)
    assert reply.skipped.startswith("needs at least 4.0 TiB, and cpu-")


@pytest.mark.parametrize(("provider", "said"), [("Wrong", "Wrong"), ("GivesNan", "not a number")])
def test_a_wrong_result_is_not_timed(worker: WorkerProcess, provider: str, said: str) -> None:
    reply = ask(worker, provider, 64)
    assert reply.measurement is None
    assert reply.failed[0] == "wrong_result"
    assert said in reply.failed[1]


@pytest.mark.parametrize(
    ("provider", "kind", "message"),
    [
        ("Raises", "error", "KeyError: 'a bug in the provider'"),
        ("NoPython", "error", "sh ended with exit status 1: error: Python.h: No such file or directory"),
        ("NoCompiler", "error", "[Errno 2] No such file or directory: '/nowhere/gcc'"),
        ("TritonErrors", "error", "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"),
        ("OutOfMemory", "out_of_memory", "CUDA out of memory. Tried to allocate 99 GiB"),
        ("SaysNo", "error", "SaysNo: False from unsupported(); expected the reason as a text, or None"),
        ("NoTask", "error", "Good: a NoneType without run, outputs, launch from prepare(); expected a task"),
        ("Launches", "error", "Good: (64, 64) from launch(); expected a quantbench.launch.Launch, or None"),
        ("Unlaunched", "error", "0 active drivers (a Triton kernel needs a GPU, or TRITON_INTERPRET=1 to"),
    ],
)  # fmt: skip
def test_whatever_a_provider_raises_fails_its_point_alone(
    worker: WorkerProcess, provider: str, kind: str, message: str
) -> None:
    failed = ask(worker, provider, 63).failed
    assert failed[0] == kind
    assert message in failed[1]
    assert ask(worker, provider, 64).measurement is not None


def test_a_worker_without_a_context_refuses_with_cudas_reason() -> None:
    with pytest.raises(MeasurementError) as caught:
        WorkerProcess(["tests.fake_providers:NoContext"])
    assert (
        str(caught.value)
        == "worker: CUDA error: out of memory; expected a device that can be measured"
    )


@pytest.mark.slow
def test_a_lost_context_says_that_the_worker_is_of_no_more_use(doomed: WorkerProcess) -> None:
    reply = ask(doomed, "IllegalAccess", 63)
    assert reply.broken
    assert reply.failed == (
        "illegal_access",
        "CUDA error: an illegal memory access was encountered",
    )
    with pytest.raises(WorkerLostError):
        ask(doomed, "Good", 64)


@pytest.mark.parametrize(
    ("message", "synchronises", "lost"),
    [
        ("CUDA error: an illegal instruction was encountered", True, True),
        ("CUDA error: invalid program counter", True, True),
        ("CUDA error: uncorrectable ECC error encountered", True, True),
        ("CUDA error: the launch timed out and was terminated", True, True),
        ("CUDA error: operation not supported on global/shared address space", True, True),
        ("Triton Error [CUDA]: a text of a later version", False, True),
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul", True, False),
    ],
)
def test_any_error_after_which_the_device_cannot_synchronise_replaces_the_worker(
    message: str, synchronises: bool, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        """A timer whose device fails."""

        warmup_s = measuring_s = 0.0

        def measure(self, *_: object, **__: object) -> Measurement:
            raise RuntimeError(message)

    def synchronize() -> None:
        if not synchronises:
            raise RuntimeError("CUDA error: whatever it was")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    worker = Worker(CPU, Failing(), QUICK, lambda request: None)  # type: ignore[arg-type]
    reply = worker.run(Request(Gemm(64, 64, 64, dtype="fp32"), "torch.mm"))
    assert reply.broken == lost
    assert reply.failed == ("illegal_access" if lost else "error", message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "message"),
    [
        ("Exits", "ended with exit code 7: something went badly wrong"),
        (
            "Exiting",
            "ended with exit code 1: torch.AcceleratorError: CUDA error: no kernel image is available",
        ),
    ],
)
def test_a_crash_is_told_by_its_last_words(
    doomed: WorkerProcess, provider: str, message: str
) -> None:
    with pytest.raises(WorkerLostError) as caught:
        ask(doomed, provider, 63)
    assert caught.value.kind == "crash"
    assert caught.value.message.startswith(message)


def test_a_provider_that_does_not_exist_is_named(worker: WorkerProcess) -> None:
    reply = ask(worker, "NoSuchClass", 64)
    assert "tests.fake_providers:NoSuchClass" in reply.failed[1]
    assert "expected a class that can be imported" in reply.failed[1]


@pytest.mark.slow
def test_a_device_that_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTBENCH_DEVICE", "abacus")
    with pytest.raises(MeasurementError) as caught:
        WorkerProcess()
    assert (
        str(caught.value)
        == "worker: QUANTBENCH_DEVICE: 'abacus'; expected cpu, cuda or cuda:<number>"
    )
