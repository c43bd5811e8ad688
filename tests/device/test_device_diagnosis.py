"""Cards that torch cannot use: what is said, and what mends it, on a machine and a torch that are
made up.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantbench.device import wheels
from quantbench.device.diagnosis import Machine, findings, has_code, look, refusal

CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
NO_CARDS = "No CUDA GPUs are available"
A100 = ("580.65.06", (8, 0))
CARD = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0)


class Torch(SimpleNamespace):
    """A torch that sees `cards`; without any, its `cuda.init` raises `error`."""

    def __init__(
        self, error: Exception | None = None, *cards: SimpleNamespace, cuda: str | None = "13.0",
        architectures: tuple[str, ...] = CUDA_13,
    ) -> None:  # fmt: skip
        def init() -> None:
            if error is not None:
                raise error

        calls = SimpleNamespace(
            init=init,
            get_device_properties=lambda index: cards[index],
            get_arch_list=lambda: list(architectures),
        )
        version = "2.13.0+cpu" if cuda is None else f"2.13.0+cu{cuda.replace('.', '')}"
        super().__init__(__version__=version, version=SimpleNamespace(cuda=cuda), cuda=calls)


@pytest.fixture
def machine(tmp_path: Path) -> Any:
    """Makes a machine with one A100, which all see but torch, unless told otherwise."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    information = tmp_path / "proc/driver/nvidia/gpus/0000:07:00.0/information"

    def make(
        torch: Torch, index: int | None = None, *, device_file: bool = True, proc: bool = True, closed: bool = False,
        driver: tuple[str | None, tuple[int, int] | None] = A100, **environ: str,
    ) -> Machine:  # fmt: skip
        if device_file:
            (tmp_path / "dev/nvidia0").touch()
        if proc:
            information.parent.mkdir(parents=True)
            information.write_text("Model: \t\t NVIDIA A100-SXM4-80GB\nIRQ:   \t\t 60\n")
        return look(
            torch,
            index,
            root=tmp_path,
            ask_driver=lambda: driver,
            environ=environ,
            may_open=lambda path: not closed,
        )

    return make


def text(machine: Machine) -> str:
    error = refusal(machine)
    assert "\n" not in str(error)
    assert "QUANTBENCH_DEVICE=cpu measures the CPU" in error.expected
    return str(error)


def test_a_driver_too_old_for_the_wheel(machine: Any) -> None:
    reason = "The NVIDIA driver on your system is too old (found version 12020)"
    error = RuntimeError(
        f"{reason}. Please update your GPU driver by downloading and installing a new version."
    )
    driver = ("535.183.01", (8, 0))
    said = text(machine(Torch(error), driver=driver))
    assert said == (
        "device: NVIDIA A100-SXM4-80GB (sm_80, driver 535.183.01) with torch 2.13.0+cu130 built for"
        f" CUDA 13.0 {' '.join(CUDA_13)}: {reason}; expected {wheels.install_line(*driver)};"
        " QUANTBENCH_DEVICE=cpu measures the CPU"
    )


def test_a_card_that_the_wheel_has_no_code_for(machine: Any) -> None:
    card = SimpleNamespace(name="Tesla V100-SXM2-16GB", major=7, minor=0)
    said = text(machine(Torch(None, card), 0))
    assert "Tesla V100-SXM2-16GB (sm_70, driver 580.65.06)" in said
    assert "this torch has no code for sm_70" in said
    assert f"expected {wheels.install_line('580.65.06', (7, 0))}" in said


def test_a_torch_for_cpus_on_a_machine_with_a_card(machine: Any) -> None:
    said = text(
        machine(
            Torch(
                AssertionError("Torch not compiled with CUDA enabled"), cuda=None, architectures=()
            )
        )
    )
    assert "torch 2.13.0+cpu built without CUDA" in said
    assert "(torch: Torch not compiled with CUDA enabled)" in said
    assert f"expected {wheels.install_line(*A100)}" in said


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "7"])
def test_visible_devices_that_name_none(machine: Any, value: str) -> None:
    said = text(machine(Torch(RuntimeError(NO_CARDS)), CUDA_VISIBLE_DEVICES=value))
    assert f"CUDA_VISIBLE_DEVICES={value!r} hides every card" in said
    assert "expected CUDA_VISIBLE_DEVICES unset" in said
    assert f"(torch: {NO_CARDS})" in said


def test_visible_devices_are_not_blamed_for_an_old_driver(machine: Any) -> None:
    said = text(
        machine(
            Torch(RuntimeError("The NVIDIA driver on your system is too old")),
            CUDA_VISIBLE_DEVICES="0",
        )
    )
    assert "hides" not in said
    assert "pip install" in said


def test_a_device_file_that_may_not_be_opened(machine: Any, tmp_path: Path) -> None:
    shown = machine(Torch(RuntimeError(NO_CARDS)), closed=True)
    assert shown.closed_files == (f"{tmp_path}/dev/nvidia0",)
    assert f"{tmp_path}/dev/nvidia0 cannot be opened" in text(shown)


def test_a_container_without_nvml(machine: Any, tmp_path: Path) -> None:
    """Only the device file is there: neither NVML nor the driver's files under /proc."""
    error = RuntimeError(
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
    )
    said = text(machine(Torch(error), driver=(None, None), proc=False))
    assert said.startswith("device: an NVIDIA card (driver unknown)")
    assert "(torch: Found no NVIDIA driver on your system)" in said
    assert "docker run --gpus all" in said
    assert "pip install" not in said


def test_a_card_that_only_nvml_shows(machine: Any) -> None:
    shown = machine(Torch(RuntimeError("CUDA unknown error")), device_file=False, proc=False)
    said = text(shown)
    assert "an NVIDIA card (sm_80, driver 580.65.06)" in said
    assert "CUDA unknown error" in said


def test_a_machine_without_a_card_is_not_refused(machine: Any, tmp_path: Path) -> None:
    """Not even where the driver is there: a container may see its version and no card."""
    for driver in ((None, None), ("580.65.06", None)):
        shown = machine(Torch(RuntimeError(NO_CARDS)), driver=driver, device_file=False, proc=False)
        assert shown.card == ""
        assert refusal(shown) is None


def test_a_card_in_order(machine: Any) -> None:
    shown = machine(
        Torch(None, CARD),
        0,
        CUDA_VISIBLE_DEVICES="0",
        CUDA_LAUNCH_BLOCKING="0",
        driver=(None, None),
    )
    assert refusal(shown) is None
    assert [finding.what for finding in findings(shown)] == [
        "card", "device file", "driver", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "torch", "architectures",
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["1", "01", " 2 ", "-1", "0x1"])
def test_launches_that_wait_are_not_timed(machine: Any, value: str) -> None:
    shown = machine(Torch(None, CARD), 0, CUDA_LAUNCH_BLOCKING=value)
    assert f"CUDA_LAUNCH_BLOCKING={value!r} makes every launch wait" in text(shown)


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_86", (8, 9), True), ("sm_86", (8, 6), True), ("sm_86", (8, 0), False), ("sm_80", (9, 0), False),
        ("sm_100", (10, 3), True), ("sm_120", (12, 1), True), ("sm_90a", (9, 0), True), ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True), ("compute_90", (10, 0), True), ("compute_90", (8, 9), False),
        ("compute_90a", (10, 0), False), ("gfx942", (9, 4), False),
    ],
)  # fmt: skip
def test_which_code_runs_where(architecture: str, capability: tuple[int, int], runs: bool) -> None:
    assert has_code((architecture,), capability) is runs
