"""What tests of whole sweeps share: the processor as their device, and a folder of their own."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
