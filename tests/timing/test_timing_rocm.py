"""Timing through ROCm: what is left out, and that records say so. No AMD GPU is needed, and none was ever used."""

from __future__ import annotations

import pytest
import torch
from made_runs import measurement

from quantbench.device.here import UNTESTED
from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.providers.identity import identify, versions
from quantbench.timing.cuda_device import TorchCuda
from quantbench.timing.grade import grade
from quantbench.workload import Gemm

AMD = DeviceSpec("mi-test", "rocm", 304, 2100, 2**28, 2**16, 2**37, 5300, {})


def test_torch_for_rocm_gets_no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    note = TorchCuda._load_probes(object.__new__(TorchCuda))
    assert note.startswith("no counters of the SM clock")
    assert "NVIDIA" in note


def test_versions_name_rocm_and_that_it_is_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rocm" not in versions()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert versions()["rocm"] == "6.4 (untested)"


def test_kernels_are_not_identified() -> None:
    def must_not_run() -> None:
        raise AssertionError("profiled")

    assert identify(must_not_run, Gemm(64, 64, 64), AMD) is None


def test_the_grade_gives_the_reason() -> None:
    state = DeviceState(note=f"{UNTESTED}; no clock")
    unclocked = measurement([100.0, 100.1] * 20, clocks_mhz=(), state_before=state, state_after=state)
    found = grade(unclocked, flops=1e12, min_bytes=2**20, spec=AMD, dtype="bf16")
    assert found.letter == "B"
    assert UNTESTED in found.reasons[0]
