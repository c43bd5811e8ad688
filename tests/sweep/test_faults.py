"""Faults put in on purpose: workers killed at every step, providers that give NaN, clocks that go
back.
"""

import os
import signal
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from sweep_doubles import QUICK, Bench, measured, plan_of

from quantbench.store.record import Failed, Measured
from quantbench.sweep.child import WorkerLostError, WorkerProcess
from quantbench.sweep.messages import Reply, Request
from quantbench.workload import Gemm

WORK = Gemm(64, 64, 64, dtype="fp32")

pytestmark = pytest.mark.usefixtures("cpu_and_providers")


def request(provider: str = "Good", work: Gemm = WORK) -> Request:
    return Request(work, f"tests.fake_providers:{provider}")


# --- the child, killed at every step ------------------------------------------------------------------------------


def killed_before_a_point(worker: WorkerProcess) -> None:
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    worker.begin(QUICK)
    worker.ask(request(), 60.0, lambda: None)


def killed_over_a_point(worker: WorkerProcess) -> None:
    odd = Gemm(64, 63, 64, dtype="fp32")
    worker.ask(request("Hangs", odd), 60.0, lambda: os.kill(worker._process.pid, signal.SIGKILL))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [killed_before_a_point, killed_over_a_point])
def test_a_killed_worker_is_told_as_that(
    doomed: WorkerProcess, fault: Callable[[WorkerProcess], None]
) -> None:
    with pytest.raises(WorkerLostError, match="killed by SIGKILL") as caught:
        fault(doomed)
    assert caught.value.kind == "crash"


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_ended_at_its_limit(doomed: WorkerProcess) -> None:
    os.kill(doomed._process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerLostError, match="no answer within 1 s") as caught:
        doomed.ask(request(), 1.0, lambda: None)
    assert caught.value.kind == "timeout"
    doomed.close()
    with pytest.raises(ProcessLookupError):
        os.kill(doomed._process.pid, 0)


@pytest.mark.parametrize("ask", range(8))
def test_a_sweep_outlives_a_worker_that_dies_at_any_question(ask: int) -> None:
    """The reference first, then points: whichever answer never comes, every other point is
    measured.
    """
    plan = plan_of(6)
    asked: list[Request] = []

    def answer(request: Request) -> Reply:
        asked.append(request)
        if len(asked) == ask + 1:
            raise WorkerLostError("crash", "killed by SIGKILL")
        return measured(100.0)

    bench = Bench(plan, answer)
    assert bench.sweep().run().how == "complete"
    points = bench.of_role("point")
    assert [r.key for r in points] == [p.key for p in plan.points]
    lost = [r for r in bench.records if isinstance(r.outcome, Failed)]
    assert len(lost) == 1


# --- answers that are none ---------------------------------------------------------------------------------------


def answered(worker: WorkerProcess, line: bytes, monkeypatch: pytest.MonkeyPatch) -> Reply:
    """The worker's reply where its process sends `line`."""
    monkeypatch.setattr(worker, "send", lambda data: None)
    monkeypatch.setattr(worker, "_pipe", Mock(poll=lambda s: True, recv_bytes=lambda: line))
    return worker.ask(request(), 60.0, lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [b"[1, 2]\n", b"{}\n", b'{"measurement": 5}\n', b'"text"\n', b"null\n", b"1e999\n"]
)
def test_an_answer_that_is_none_is_the_points_failure(
    worker: WorkerProcess, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answered(worker, line, monkeypatch).failed[0] == "error"


@pytest.mark.slow
@pytest.mark.parametrize("line", [b"not json\n", b"\xff\xfe\n", b"\n", b'{"measurement": \n'])
def test_an_answer_that_is_no_json_ends_the_worker(
    worker: WorkerProcess, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkerLostError, match="answered with"):
        answered(worker, line, monkeypatch)


def test_a_sweeps_clock_that_goes_back_loses_no_point() -> None:
    bench = Bench(plan_of(12))
    readings = iter(range(10_000))
    sweep = bench.sweep(budget_s=1e6)
    sweep.clock = lambda: 1e4 - 7.0 * next(readings)
    assert sweep.run().how == "complete"
    assert len(bench.of_role("point")) == 12
    assert all(isinstance(r.outcome, Measured) for r in bench.records)
