"""What stands beside each device of a cluster, with a worker made of literals: text in, text out, workers replaced."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable

import pytest
from sweep_doubles import A100, STATE, FakeWorker, measured
from sweep_doubles import Clock as FakeClock

from quantbench.cluster import ray_pool as module
from quantbench.cluster.ray_pool import DeviceAgent, introduction_from_text, reply_from_text
from quantbench.errors import MeasurementError
from quantbench.store.typed import encode
from quantbench.sweep.child import WorkerLostError
from quantbench.sweep.messages import Hello, Reply, Request
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm

TIMING = json.dumps(encode(TimingOptions(seed=7)))
ASK = json.dumps(encode(Request(Gemm(64, 64, 64), "torch.mm")))


class Worker(FakeWorker):
    begun: TimingOptions | None = None

    def begin(self, timing: TimingOptions) -> None:
        assert self.begun is None
        self.begun = timing


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """The workers that the agent started; what each answers is set by `answers`."""
    workers: list[Worker] = []

    def start() -> Worker:
        workers.append(Worker(lambda request: answers.pop(0)(), FakeClock(), Hello(A100, STATE, {"torch": "2.11.0"})))
        return workers[-1]

    monkeypatch.setattr(module, "WorkerProcess", start)
    answers.clear()
    return workers


answers: list[Callable[[], Reply]] = []


def lost() -> Reply:
    raise WorkerLostError("crash", "killed by SIGSEGV")


def test_it_introduces_its_device(started: list[Worker]) -> None:
    label, hello = introduction_from_text(DeviceAgent().introduce())
    assert label == f"CPU 0 on {socket.gethostname()}"
    assert hello.device == A100
    assert len(started) == 1


def test_the_worker_learns_how_to_time_once_and_answers(started: list[Worker]) -> None:
    agent = DeviceAgent()
    agent.introduce()
    answers.extend([lambda: measured(100.0)] * 2)
    for _ in range(2):
        assert reply_from_text(agent.ask(TIMING, ASK, 60.0)).measurement is not None
    assert len(started) == 1
    assert started[0].begun == TimingOptions(seed=7)


def test_a_worker_that_died_is_replaced_at_the_next_question(started: list[Worker]) -> None:
    agent = DeviceAgent()
    answers.extend([lost, lambda: measured(100.0)])
    with pytest.raises(WorkerLostError, match="killed by SIGSEGV"):
        reply_from_text(agent.ask(TIMING, ASK, 60.0))
    assert reply_from_text(agent.ask(TIMING, ASK, 60.0)).measurement is not None
    assert [worker.closed for worker in started] == [True, False]
    assert started[1].begun == TimingOptions(seed=7)


def test_a_worker_whose_context_is_lost_is_replaced(started: list[Worker]) -> None:
    agent = DeviceAgent()
    answers.extend([lambda: Reply(failed=("illegal_access", "x"), broken=True), lambda: measured(100.0)])
    assert reply_from_text(agent.ask(TIMING, ASK, 60.0)).broken
    assert reply_from_text(agent.ask(TIMING, ASK, 60.0)).measurement is not None
    assert len(started) == 2


def test_a_device_that_refuses_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Worker:
        raise MeasurementError("worker", "no driver", "a device that can be measured")

    monkeypatch.setattr(module, "WorkerProcess", refuse)
    with pytest.raises(MeasurementError, match="no driver"):
        introduction_from_text(DeviceAgent().introduce())
    with pytest.raises(MeasurementError, match="no driver"):
        reply_from_text(DeviceAgent().ask(TIMING, ASK, 60.0))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_processors_of_one_machine_are_held_to_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: held.append(cores))
    for core in range(4):
        DeviceAgent(core)
    DeviceAgent()
    assert held == [{2}, {1}, {0}, {2}]
