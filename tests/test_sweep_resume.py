"""A run interrupted again and again ends as one that never was: the same points, none twice, none lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_sweep_runner import Bench, FakeWorker, measured

from quantbench.errors import StoreError
from quantbench.store.folder import read_run
from quantbench.sweep.child import WorkerLostError
from quantbench.sweep.messages import Reply, Request
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.session import SweepSession
from quantbench.sweep.shapes import Held

OPTIONS = SweepOptions(dims=("n=1024:8192:64",), held=Held(m=1024, k=1024), providers=("torch.mm",))


class QuietWorker(FakeWorker):
    """A worker whose timing options are of no interest here."""

    def begin(self, timing: object) -> None:
        pass


def answer_or_stop(chance: random.Random, share: float) -> object:
    """Answers; now and then the user presses Ctrl-C, or the worker dies, instead."""

    def answer(request: Request) -> Reply:
        if chance.random() < share:
            raise chance.choice([KeyboardInterrupt(), WorkerLostError("crash", "killed by SIGSEGV")])
        return measured(100.0)

    return answer


def connect_with(bench: Bench) -> object:
    def connect() -> QuietWorker:
        worker = QuietWorker(bench.answer, bench.clock)
        bench.workers.append(worker)
        return worker

    return connect


def test_fifty_interruptions_change_nothing(tmp_path: Path) -> None:
    whole = Bench(None, lambda request: measured(100.0))  # type: ignore[arg-type]
    with SweepSession.new(lambda spec: OPTIONS, tmp_path / "whole", connect_with(whole)) as session:  # type: ignore[arg-type]
        session.run(lambda progress: None, clock=whole.clock)
    expected = {r.key for r in read_run(session.folder).records if r.role == "point"}

    chance = random.Random(7)
    broken = Bench(None, answer_or_stop(chance, 0.3))  # type: ignore[arg-type]
    connect = connect_with(broken)
    session = SweepSession.new(lambda spec: OPTIONS, tmp_path / "broken", connect)  # type: ignore[arg-type]
    stops = 0
    while True:
        with session:
            try:
                finished = session.run(lambda progress: None, clock=broken.clock)
            except KeyboardInterrupt:
                stops += 1
                info = read_run(session.folder).info
                assert info.how_ended == "interrupted"
            else:
                break
        # Every other stop is a power cut as well: half a line at the end of the file.
        if stops % 2:
            with (session.folder / "records.jsonl").open("ab") as file:
                file.write(b'{"version": 1, "run_id": "')
        session = SweepSession.resume(session.folder, connect)  # type: ignore[arg-type]
    assert finished.how == "complete"
    assert stops >= 10
    keys = [r.key for r in read_run(session.folder).records if r.role == "point"]
    assert len(keys) == len(set(keys))
    assert set(keys) == expected
    assert all(worker.closed for worker in broken.workers)


def test_resuming_on_another_device_is_refused(tmp_path: Path) -> None:
    bench = Bench(None, lambda request: measured(100.0))  # type: ignore[arg-type]
    with SweepSession.new(lambda spec: OPTIONS, tmp_path, connect_with(bench)) as session:  # type: ignore[arg-type]
        pass

    def connect() -> QuietWorker:
        from dataclasses import replace

        worker = QuietWorker(bench.answer, bench.clock)
        worker.hello = replace(worker.hello, device=replace(worker.hello.device, name="b200-test"))
        bench.workers.append(worker)
        return worker

    with pytest.raises(StoreError, match=r"^resume: this device is b200-test; expected a100-test, as in "):
        SweepSession.resume(session.folder, connect)
    assert all(worker.closed for worker in bench.workers)
