"""What tests of whole sweeps share: the processor as their device, and a folder of their own."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT
from sweep_doubles import QUICK

from quantbench.sweep.child import WorkerProcess


@pytest.fixture
def on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs commands in `tmp_path`, in this process; their worker is a process all the same."""
    environment = {"QUANTBENCH_DEVICE": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, on_sigterm)


@pytest.fixture(scope="module")
def cpu_and_providers() -> Iterator[None]:
    """The worker must find tests.fake_providers and stay on the CPU, wherever pytest was
    started.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTBENCH_DEVICE", "cpu")
        patch.setenv("PYTHONPATH", str(ROOT))
        yield


def begun() -> Iterator[WorkerProcess]:
    with WorkerProcess() as process:
        process.begin(QUICK)
        yield process


@pytest.fixture(scope="module")
def worker(cpu_and_providers: None) -> Iterator[WorkerProcess]:
    """One worker for everything that does not end it."""
    yield from begun()


@pytest.fixture
def doomed(cpu_and_providers: None) -> Iterator[WorkerProcess]:
    """A worker of its own for what ends it."""
    yield from begun()
