"""Choosing the device at hand, with a torch that has as many GPUs as told."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quantbench import device
from quantbench.device import here
from quantbench.device.nvml import Absent, Nvml
from quantbench.device.spec import DeviceState
from quantbench.errors import InputError

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=150109880320, multi_processor_count=132,
    L2_cache_size=62914560, shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448,
    uuid="91a535d7-4157-249a-65e5-73883afa626e", pci_bus_id=0, pci_device_id=4, pci_domain_id=0,
)  # fmt: skip
T4 = SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=15642329088, multi_processor_count=40)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a torch in place that sees these GPUs, and no NVML; `gpus.chosen` tells which it was told to use."""
    chosen: list[int] = []

    def put(*cards: SimpleNamespace, hip: str | None = None) -> list[dict[str, Any]]:
        torch = ModuleType("torch")
        chosen.clear()
        torch.version = SimpleNamespace(hip=hip)  # type: ignore[attr-defined]
        torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            is_available=lambda: bool(cards),
            device_count=lambda: len(cards),
            current_device=lambda: 0,
            get_device_properties=lambda index: cards[index],
            get_device_name=lambda index: cards[index].name,
            set_device=chosen.append,
        )
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.delenv(here.VARIABLE, raising=False)
        asked: list[dict[str, Any]] = []

        def absent(**names: Any) -> Absent:
            asked.append(names)
            return Absent("NVML does not start: no driver")

        monkeypatch.setattr(here.Nvml, "open", absent)
        return asked

    put.chosen = chosen  # type: ignore[attr-defined]
    return put


def test_the_first_gpu_is_taken(gpus: Any) -> None:
    asked = gpus(H200, T4)
    assert device.current() == device.lookup("h200-sxm-141gb")
    assert asked == [{"uuid": "91a535d7-4157-249a-65e5-73883afa626e", "pci_bus_id": "00000000:00:04.0"}]


def test_a_torch_that_tells_neither_uuid_nor_bus(gpus: Any) -> None:
    asked = gpus(T4)
    assert device.current().name == "t4-16gb"
    assert asked == [{"uuid": None, "pci_bus_id": None}]


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
def test_a_variable_that_names_no_device(gpus: Any, monkeypatch: pytest.MonkeyPatch, wish: str, message: str) -> None:
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


AMD = SimpleNamespace(
    name="AMD Instinct MI000", gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4, total_memory=206141652992,
    multi_processor_count=304, L2_cache_size=4194304, shared_memory_per_multiprocessor=65536, clock_rate=2100000,
    memory_clock_rate=1300000, memory_bus_width=8192,
)  # fmt: skip


def test_a_gpu_of_amd_gets_no_peak_and_nothing_of_nvidia(gpus: Any) -> None:
    """gfx942 reports 9.4, which is no compute capability, and a memory clock that gives half of the bandwidth."""
    asked = gpus(AMD, hip="6.2")
    spec = device.current()
    assert (spec.kind, spec.torch_kind, spec.architecture) == ("rocm", "cuda", "rocm")
    assert spec.compute_capability is None
    assert spec.peak_tflops == {}
    assert not spec.registered
    assert (spec.sm_count, spec.sm_clock_mhz) == (304, 2100)
    assert spec.l2_bytes > AMD.L2_cache_size
    assert spec.memory_gb_per_s > 5300
    assert "upper bound" in spec.source["memory_gb_per_s"]
    assert asked == []
    assert isinstance(device.open_nvml(), Absent)


def test_a_registered_gpu_of_amd_is_found_by_name_size_and_units(gpus: Any) -> None:
    """torch through ROCm gives no compute capability; a partition of the card keeps its Infinity Cache."""
    card = {**vars(AMD), "name": "AMD Instinct MI300X"}
    gpus(SimpleNamespace(**card), hip="6.2")
    spec = device.current()
    assert (spec.name, spec.registered, spec.architecture) == ("mi300x-192gb", True, "gfx942")
    gpus(SimpleNamespace(**{**card, "multi_processor_count": 38}), hip="6.2")
    part = device.current()
    assert (part.name, part.registered, part.sm_count) == ("mi300x-192gb-38sm", False, 38)
    assert part.l2_bytes == spec.l2_bytes > AMD.L2_cache_size


def test_a_run_through_rocm_says_that_it_is_untested(gpus: Any) -> None:
    gpus(AMD, hip="6.2")
    spec = device.current()
    state = device.monitor(spec)()
    assert state.note.startswith(here.UNTESTED)
    (line,) = device.warnings_for(spec, state)
    assert "untested" in line
    assert "peaks are unknown" in line


def test_nvml_fills_in_what_torch_does_not_tell() -> None:
    class Answers(Nvml):
        def __init__(self) -> None:
            pass

        def limits(self) -> device.Limits:
            return device.Limits(max_sm_clock_mhz=1980, max_memory_clock_mhz=3201, memory_bus_bits=6144)

    properties = here.read_properties(H200, Answers())  # type: ignore[arg-type]
    assert properties.max_sm_clock_mhz == 1980
    assert properties.memory_bus_bits == 6144
    assert properties.smem_per_block_bytes == 232448


def test_torch_fills_in_what_nvml_does_not_tell() -> None:
    newer = SimpleNamespace(**vars(T4), clock_rate=1590000, memory_clock_rate=5001000, memory_bus_width=256)
    properties = here.read_properties(newer, Absent("no driver"))  # type: ignore[arg-type]
    assert properties.max_sm_clock_mhz == 1590
    assert properties.max_memory_clock_mhz == 5001
    assert properties.memory_bus_bits == 256
    assert properties.l2_bytes is None


def test_monitor_without_nvml_says_so(gpus: Any) -> None:
    gpus(H200)
    state = device.monitor(device.current())
    assert state() == DeviceState(note="NVML does not start: no driver")


def test_monitor_of_a_processor(gpus: Any) -> None:
    gpus()
    assert device.monitor(device.current())().load_per_core is not None


@pytest.mark.parametrize(
    ("slug", "dtype"), [("v100-sxm2-32gb", "fp16"), ("t4-16gb", "fp16"), ("h200-sxm-141gb", "bf16")]
)
def test_default_dtype_of_gpus(slug: str, dtype: str) -> None:
    assert device.default_dtype(device.lookup(slug)) == dtype


def test_the_package_imports_without_torch() -> None:
    code = (
        "import sys, quantbench.device, quantbench.workload.presets,"
        " quantbench.workload.huggingface, quantbench.cli.devices\n"
        "from quantbench.device import lookup; lookup('h200-sxm-141gb')\n"
        "print([m for m in ('torch', 'triton', 'numpy', 'pynvml', 'psutil') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
