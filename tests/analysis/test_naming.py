"""Names of kernels are asked for in a process of their own, which may be lost without losing a
measurement.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from commands import ROOT
from made_devices import A100, CPU, STATE
from sweep_doubles import OPTIONS, Clock, QuietWorker, recording, steady

from quantbench.cli.sweep_run import measure
from quantbench.device import Limits, lookup
from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError
from quantbench.launch import Launch
from quantbench.measurement import Measurement
from quantbench.sweep import naming
from quantbench.sweep.child import ChildProcess, WorkerLostError
from quantbench.sweep.messages import Hello, Reply, Request
from quantbench.sweep.session import SweepSession
from quantbench.sweep.worker import Worker
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm, Workload

REQUEST = Request(Gemm(64, 64, 64, dtype="fp32"), "torch.mm")
LAUNCH = Launch("nvjet")


class FakeServer:
    """Answers with what it is given; None stands for a server that dies."""

    def __init__(self, answers: list[Reply | None]) -> None:
        self.answers = answers
        self.closed = False

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        reply = self.answers.pop(0)
        if reply is None:
            raise WorkerLostError("crash", "killed by SIGSEGV")
        return reply

    def close(self) -> None:
        self.closed = True


def served(*answers: Reply | None) -> tuple[naming.KernelIdentityClient, list[FakeServer]]:
    queue, servers = list(answers), []

    def start() -> FakeServer:
        servers.append(FakeServer(queue))
        return servers[-1]

    return naming.KernelIdentityClient(start), servers


def test_the_server_is_started_before_it_is_needed_and_kept() -> None:
    names, servers = served(Reply(launch=LAUNCH), Reply(launch=LAUNCH))
    assert len(servers) == 1
    assert [names.launch_of(REQUEST), names.launch_of(REQUEST)] == [LAUNCH, LAUNCH]
    assert len(servers) == 1


def test_a_lost_server_costs_one_name_and_is_replaced() -> None:
    names, servers = served(None, Reply(launch=LAUNCH))
    assert names.launch_of(REQUEST) is None
    assert servers[0].closed
    assert names.launch_of(REQUEST) == LAUNCH
    assert len(servers) == 2


def test_a_server_without_its_context_is_replaced() -> None:
    names, servers = served(
        Reply(failed=("error", "illegal memory access"), broken=True), Reply(launch=LAUNCH)
    )
    assert [names.launch_of(REQUEST), names.launch_of(REQUEST)] == [None, LAUNCH]
    assert [server.closed for server in servers] == [True, False]


def test_after_three_losses_no_more_names_are_asked_for() -> None:
    names, servers = served(None, None, None)
    assert [names.launch_of(REQUEST) for _ in range(5)] == [None] * 5
    assert len(servers) == 3


def test_the_way_is_apart_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(naming.VARIABLE, raising=False)
    assert naming.profiler_location() == "apart"
    assert naming.profiler_location(exclusive=True) == "off"
    monkeypatch.setenv(naming.VARIABLE, "here")
    assert naming.profiler_location(exclusive=True) == "here"
    monkeypatch.setenv(naming.VARIABLE, " OFF ")
    assert naming.profiler_location() == "off"
    monkeypatch.setenv(naming.VARIABLE, "yes")
    with pytest.raises(
        InputError, match="QUANTBENCH_KERNEL_NAMES: value = 'yes'; expected one of apart, here, off"
    ):
        naming.profiler_location()


def test_a_sweep_on_a_device_for_one_process_says_what_names_its_kernels(tmp_path: Path) -> None:
    def connect() -> QuietWorker:
        hello = Hello(A100, STATE, {}, Limits(exclusive=True))
        return QuietWorker(steady, Clock(), hello)

    console = recording()
    with SweepSession.new(lambda spec: OPTIONS, tmp_path, connect) as session:
        finished = measure(console, session)
    assert finished.how == "complete"
    assert "EXCLUSIVE_PROCESS" in console.export_text(clear=False)
    assert f"{naming.VARIABLE}=here" in console.export_text()


@pytest.mark.slow
def test_the_process_answers_and_says_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    server = naming.start_server()
    assert isinstance(server, ChildProcess)
    try:
        good = server.ask(REQUEST, 60.0, lambda: None)
        assert good == Reply()  # a processor runs no kernel that the profiler names
        bad = server.ask(
            Request(REQUEST.workload, "tests.fake_providers:NoSuchClass"), 60.0, lambda: None
        )
        assert "NoSuchClass" in bad.failed[1]
        assert server.ask(REQUEST, 60.0, lambda: None) == good
    finally:
        server.close()


def test_an_error_of_the_work_is_an_answer_and_a_lost_context_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(request: Request, spec: DeviceSpec) -> Launch | None:
        raise RuntimeError(message)

    monkeypatch.setattr(naming, "launch_of", raises)
    message = "CUDA out of memory. Tried to allocate 99 GiB"
    assert naming.answer(REQUEST, CPU) == Reply(failed=("error", message))
    message = "CUDA error: an illegal memory access was encountered\nmore"
    assert naming.answer(REQUEST, CPU).broken


def test_whatever_a_provider_raises_costs_the_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "gcc")

    monkeypatch.setattr(Maker, "prepare", prepare)
    monkeypatch.setattr("quantbench.providers.catalog.make", lambda name: Maker())
    assert naming.answer(REQUEST, CPU).failed == (
        "error",
        "[Errno 2] No such file or directory: 'gcc'",
    )


class FakeTimer:
    """Runs once and calls that a measurement."""

    warmup_s = measuring_s = 0.0

    def measure(self, run: Callable[[], None], **_: object) -> Measurement:
        run()
        state = DeviceState()
        return Measurement((1.0, 1.0), (), (), "precision", "events", "hot", state, state, 1)


def test_a_processors_points_are_not_asked_about() -> None:
    def name(request: Request) -> Launch | None:
        raise AssertionError("asked")

    reply = Worker(CPU, FakeTimer(), TimingOptions(cache="hot"), name).run(REQUEST)
    assert reply.measurement is not None
    assert reply.launch is None


class Work:
    """A task of no library: nothing but what the worker asks of one."""

    made: ClassVar[list[weakref.ref[Work]]] = []

    def __init__(self, launch: Launch | None) -> None:
        self._launch = launch
        Work.made.append(weakref.ref(self))

    def run(self) -> None:
        pass

    def outputs(self) -> tuple[()]:
        return ()

    def launch(self) -> Launch | None:
        return self._launch


class Maker:
    """A provider of such tasks."""

    id = "tests.Maker"
    says: ClassVar[Launch | None] = None

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        return None

    def prepare(
        self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0
    ) -> Work:
        return Work(self.says)


@pytest.mark.parametrize("says", [None, Launch("stated")])
def test_on_a_gpu_the_work_is_let_go_and_then_its_name_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, says: Launch | None
) -> None:
    monkeypatch.setattr("quantbench.providers.catalog.make", lambda name: Maker())
    monkeypatch.setattr(Maker, "says", says)
    monkeypatch.setattr(Work, "made", [])
    asked: list[Request] = []

    def name(request: Request) -> Launch:
        assert [each() for each in Work.made] == [
            None
        ]  # its memory is free for whoever makes it again
        asked.append(request)
        return LAUNCH

    reply = Worker(lookup("h200-sxm-141gb"), FakeTimer(), TimingOptions(), name).run(REQUEST)
    assert reply.measurement is not None
    assert reply.launch == (says or LAUNCH)
    assert asked == ([] if says else [REQUEST])
    assert ("identify" in reply.phases_s) == (says is None)
