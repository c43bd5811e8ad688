"""What `quantbench devices` prints, on a processor and on cards that are made up."""

import json
from dataclasses import replace
from typing import Any

import pytest
import typer
from quantbench.kernels.launching import TRITON

from quantbench import device
from quantbench.cli.devices import device_line, devices, peaks_line, state_line
from quantbench.device.diagnosis import Machine
from quantbench.device.nvml import Absent, Limits
from quantbench.device.spec import DeviceState
from quantbench.device.wheels import install_line

H200 = device.lookup("h200-sxm-141gb")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    monkeypatch.setenv("COLUMNS", "80")


def put_h200(monkeypatch: pytest.MonkeyPatch, nvml: Any, state: DeviceState) -> None:
    answers = {"inspect_machine": None, "current": H200, "open_nvml": nvml}
    for name, answer in answers.items():
        monkeypatch.setattr(device, name, lambda answer=answer: answer)
    monkeypatch.setattr(device, "monitor", lambda spec: lambda: state)


@pytest.mark.usefixtures("on_cpu")
def test_on_a_processor(capsys: pytest.CaptureFixture[str]) -> None:
    devices()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cpu-")
    assert lines[1].startswith("state: ")
    assert (
        "This is a CPU: its own steps can be measured here. GPU cliffs need a GPU, `quantbench import` or "
        "`quantbench predict`."
    ) in lines
    table = [line for line in lines if line.startswith(("v100", "h200", "rtx"))]
    assert all(len(line) <= 80 and "…" not in line for line in table)
    assert any(
        line.split()[:5] == ["h200-sxm-141gb", "90", "132", "1830", "4800"] for line in table
    )


@pytest.mark.usefixtures("on_cpu")
def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    devices(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["kind"] == "cpu"
    assert found["limits"] is None
    assert found["default_dtype"] in ("bf16", "fp32")
    assert {known["name"] for known in found["known"]} >= {"a100-sxm4-80gb", "h200-sxm-141gb"}
    assert all(
        "20" in source or "CUDA" in source or "NVML" in source
        for source in found["known"][0]["source"].values()
    )


def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    state = DeviceState(345, 3201, 34, 77, ("gpu_idle",), 2)

    class Card:
        def limits(self) -> Limits:
            return Limits(
                driver_version="580.159.03", max_sm_clock_mhz=1980, max_memory_clock_mhz=3201, power_limit_w=700,
                default_power_limit_w=700, slowdown_c=95,
            )  # fmt: skip

    put_h200(monkeypatch, Card(), state)
    devices()
    out = capsys.readouterr().out
    assert out.splitlines()[:4] == [
        "h200-sxm-141gb: 132 SMs (sm_90), 141 GiB at 4800 GB/s, 60 MiB of L2",
        "dense peak: fp16 989, bf16 989, tf32 495, fp32 66.9, fp8 1979, int8 1979 TFLOP/s at 1830 MHz (fp32 at 1980)",
        "state: clock 345 of 1980 MHz, memory clock 3201 MHz, 34 °C, 77 of 700 W, clock set by gpu_idle,"
        " 2 other processes, driver 580.159.03",
        "warning: Other processes compute on this GPU (2): their work lands in the timings. End them or take another"
        " GPU.",
    ]
    assert out.splitlines()[4] == "bf16 is measured by default"
    assert "This is a CPU" not in out


def machine(**changes: Any) -> Machine:
    """An A100 that torch can use, but for `changes`."""
    made = Machine(
        index=0, reason="", card="NVIDIA A100-SXM4-80GB", capability=(8, 0), driver="580.65.06",
        device_files=("/dev/nvidia0",), closed_files=(), visible=None, blocking=None, torch="2.13.0+cu130",
        cuda="13.0", architectures=("sm_80", "sm_90"),
    )  # fmt: skip
    return replace(made, **changes)


@pytest.mark.skipif(TRITON < (3, 6), reason="triton 3.2 does not serve an A100")
def test_the_diagnosis_of_a_gpu_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_h200(monkeypatch, Absent("no driver"), DeviceState())
    monkeypatch.setattr(device, "inspect_machine", machine)
    devices()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line for line in lines if line}
    for what in ("card", "driver", "torch", "architectures", "triton"):
        assert rows[what][-1] == "ok", rows[what]
    assert ["device", "file", "/dev/nvidia0", "ok"] in lines
    assert ["verdict", "this", "card", "can", "be", "measured", "ok"] in lines


def test_a_gpu_that_torch_cannot_use_is_diagnosed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = machine(
        index=None, reason="The NVIDIA driver on your system is too old", driver="535.183.01"
    )
    monkeypatch.setattr(device, "inspect_machine", lambda: broken)
    with pytest.raises(typer.Exit) as ended:
        devices()
    assert ended.value.exit_code == 1
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert "2.13.0+cu130 for CUDA 13.0 The NVIDIA driver on your system is too old" in words
    assert f"this card cannot be measured needed: {install_line('535.183.01', (8, 0))}" in words
    assert "This is a CPU" not in out
    assert "h200-sxm-141gb" in out
    with pytest.raises(typer.Exit):
        devices(as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["device"] is None
    assert found["diagnosis"][-1]["what"] == "verdict"


def test_a_gpu_without_nvml(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent: Any = Absent("NVML does not start: Driver Not Loaded")
    put_h200(monkeypatch, absent, DeviceState(note=absent.note))
    devices()
    assert "state: NVML does not start: Driver Not Loaded\n" in capsys.readouterr().out


def test_lines_of_an_estimated_card() -> None:
    spec = device.match(device.Properties("NVIDIA H200", (9, 0), 66, 143156 * 2**20))
    assert (
        device_line(spec)
        == "h200-sxm-141gb-66sm-140gb: 66 SMs (sm_90), 140 GiB at 4800 GB/s, 60 MiB of L2"
    )
    assert peaks_line(spec).endswith("TFLOP/s at 1830 MHz (fp32 at 1980) (estimated)")
    assert state_line(DeviceState(), None) == "nothing is known"
