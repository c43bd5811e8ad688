"""Choosing the device at hand, with a torch that has as many GPUs as told."""

import sys
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quantbench import device
from quantbench.device import here
from quantbench.device.diagnosis import look
from quantbench.device.nvml import Absent, Nvml
from quantbench.device.spec import DeviceState
from quantbench.errors import InputError, UnsupportedError

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=150109880320, multi_processor_count=132,
    L2_cache_size=62914560, shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448,
    uuid="91a535d7-4157-249a-65e5-73883afa626e",
)  # fmt: skip
T4 = SimpleNamespace(
    name="Tesla T4", major=7, minor=5, total_memory=15642329088, multi_processor_count=40, uuid="2"
)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Put a torch in place that sees these GPUs, and no NVML; `gpus.chosen` tells which it was told
    to use.

    device_file: whether the machine shows a card whatever torch sees.
    """
    chosen: list[int] = []

    def init() -> None:
        warnings.warn("CUDA initialization: the driver is too old", stacklevel=1)
        raise RuntimeError("No CUDA GPUs are available")

    def put(
        *cards: SimpleNamespace, hip: str | None = None, device_file: bool = False, **environ: str
    ) -> list[dict[str, Any]]:
        (tmp_path / "dev").mkdir(exist_ok=True)
        if device_file:
            (tmp_path / "dev/nvidia0").touch()
        shown = partial(
            look, root=tmp_path, ask_driver=lambda: ("580.65.06", None), environ=environ
        )
        monkeypatch.setattr(here, "look", shown)
        torch = ModuleType("torch")
        chosen.clear()
        torch.__version__ = "2.13.0"  # type: ignore[attr-defined]
        torch.version = SimpleNamespace(hip=hip, cuda=None if hip else "13.0")  # type: ignore[attr-defined]
        torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            is_available=lambda: bool(cards),
            device_count=lambda: len(cards),
            current_device=lambda: 0,
            get_device_properties=lambda index: cards[index],
            get_device_name=lambda index: cards[index].name,
            set_device=chosen.append,
            get_arch_list=lambda: ["sm_75", "sm_90"],
            init=init,
        )
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.delenv(here.VARIABLE, raising=False)
        asked: list[str] = []

        def absent(uuid: str) -> Absent:
            asked.append(uuid)
            return Absent("NVML does not start: no driver")

        monkeypatch.setattr(here.Nvml, "open", absent)
        return asked

    put.chosen = chosen  # type: ignore[attr-defined]
    return put


def test_the_first_gpu_is_taken(gpus: Any) -> None:
    asked = gpus(H200, T4)
    assert device.current() == device.lookup("h200-sxm-141gb")
    assert asked == ["91a535d7-4157-249a-65e5-73883afa626e"]


def test_the_processor_is_taken_where_there_is_no_gpu(gpus: Any) -> None:
    gpus()
    assert device.current().kind == "cpu"
    assert device.open_nvml() == Absent("no GPU is used")


def test_the_variable_chooses(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(H200, T4)
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cuda:1")
    assert device.current().name == "t4-16gb"
    assert gpus.chosen == [1]  # work that says nothing of a device runs there too
    monkeypatch.setenv("QUANTBENCH_DEVICE", "CUDA")
    assert device.current().name == "h200-sxm-141gb"
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    assert device.current().kind == "cpu"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("gpu", "QUANTBENCH_DEVICE: 'gpu'; expected cpu, cuda or cuda:<number>"),
        ("cuda:2", "QUANTBENCH_DEVICE: 'cuda:2'; expected one of the 1 GPUs that torch sees"),
    ],
)
def test_a_variable_that_names_no_device(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, wish: str, message: str
) -> None:
    gpus(H200)
    monkeypatch.setenv("QUANTBENCH_DEVICE", wish)
    with pytest.raises(InputError) as caught:
        device.current()
    assert str(caught.value) == message


def test_a_gpu_that_is_demanded_and_not_there(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus()
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cuda")
    with pytest.raises(InputError, match="'cuda'; expected cpu: torch sees no GPU"):
        device.current()


def test_a_card_that_torch_does_not_see_is_not_replaced_by_the_cpu(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(device_file=True)
    why = r"an NVIDIA card .*No CUDA GPUs are available.*QUANTBENCH_DEVICE=cpu"
    for wish in ("", "cuda", "cuda:1"):
        monkeypatch.setenv("QUANTBENCH_DEVICE", wish)
        with pytest.raises(UnsupportedError, match=why):
            device.current()
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    assert device.current().kind == "cpu"


def test_a_card_without_code_is_refused_before_it_is_used(gpus: Any) -> None:
    gpus(SimpleNamespace(**{**vars(T4), "name": "Tesla V100-SXM2-16GB", "minor": 0}))
    with pytest.raises(UnsupportedError, match=r"Tesla V100-SXM2-16GB .*no code for sm_70"):
        device.current()
    assert gpus.chosen == []


def test_launches_that_wait_are_refused(gpus: Any) -> None:
    gpus(H200, CUDA_LAUNCH_BLOCKING="1")
    with pytest.raises(
        UnsupportedError, match=r"CUDA_LAUNCH_BLOCKING='1'.*; expected CUDA_LAUNCH_BLOCKING unset"
    ):
        device.current()


@pytest.mark.parametrize("wish", ["", "cuda"])
def test_a_torch_for_amd_gpus_is_refused(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    gpus(
        SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942", major=9, minor=4),
        hip="6.4",
    )
    monkeypatch.setenv("QUANTBENCH_DEVICE", wish)
    with pytest.raises(UnsupportedError) as caught:
        device.current()
    assert str(caught.value) == (
        "device: torch 2.13.0 for ROCm: measuring on AMD GPUs is not supported; expected predictions and imported"
        " tables, which are supported, or QUANTBENCH_DEVICE=cpu to measure the CPU"
    )
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    assert device.current().kind == "cpu"


def test_nvml_fills_in_what_torch_does_not_tell() -> None:
    class Answers(Nvml):
        def __init__(self) -> None:
            pass

        def limits(self) -> device.Limits:
            return device.Limits(
                max_sm_clock_mhz=1980, max_memory_clock_mhz=3201, memory_bus_bits=6144
            )

    properties = here.read_properties(H200, Answers())  # type: ignore[arg-type]
    assert properties.max_sm_clock_mhz == 1980
    assert properties.memory_bus_bits == 6144


def test_torch_fills_in_what_nvml_does_not_tell() -> None:
    newer = SimpleNamespace(
        **vars(T4), clock_rate=1590000, memory_clock_rate=5001000, memory_bus_width=256
    )
    properties = here.read_properties(newer, Absent("no driver"))  # type: ignore[arg-type]
    assert properties.max_sm_clock_mhz == 1590
    assert properties.max_memory_clock_mhz == 5001
    assert properties.memory_bus_bits == 256
    assert properties.l2_bytes is None


def test_monitor_without_nvml_says_so(gpus: Any) -> None:
    gpus(H200)
    state = device.monitor(device.current())
    assert state() == DeviceState(note="NVML does not start: no driver")


@pytest.mark.gpu
@pytest.mark.gpu_timing
def test_the_gpu_here_is_itself() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    spec = device.current()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    assert spec.kind == "cuda"
    assert spec.sm_count == properties.multi_processor_count
    assert spec.compute_capability == (properties.major, properties.minor)
    assert spec.l2_bytes == properties.L2_cache_size
    state = device.monitor(spec)()
    assert state.sm_clock_mhz is not None, state.note
    assert state.other_processes in (0, None), state
