"""Sentences about what spoils timings, and silence where nothing does."""

import pytest

from quantbench.device.cpu import CpuInfo, cpu_spec
from quantbench.device.here import warnings_for
from quantbench.device.matching import Properties, match
from quantbench.device.nvml import HARMFUL_REASONS, Limits
from quantbench.device.registry import lookup
from quantbench.device.spec import DeviceState

A100 = lookup("a100-sxm4-80gb")
CPU = cpu_spec(CpuInfo("AMD EPYC", frozenset({"sse2"}), 2**25, 2**34))
QUIET = Limits(
    max_sm_clock_mhz=1410, application_sm_mhz=1410, default_application_sm_mhz=1410, power_limit_w=400,
    default_power_limit_w=400, slowdown_c=92,
)  # fmt: skip


def test_all_is_well() -> None:
    state = DeviceState(
        sm_clock_mhz=210, temperature_c=34, throttle_reasons=("gpu_idle",), other_processes=0
    )
    assert warnings_for(A100, state, QUIET) == ()
    assert warnings_for(A100, DeviceState(note="NVML is not installed")) == ()


@pytest.mark.parametrize(
    ("state", "limits", "sentence"),
    [
        (
            DeviceState(other_processes=1),
            None,
            "Other processes compute on this GPU (1): their work lands in the timings. End them or take another GPU.",
        ),
        (
            DeviceState(throttle_reasons=("applications_clocks_setting", "sw_power_cap")),
            QUIET,
            "The clock is held down at this moment by sw_power_cap: kernels run slower.",
        ),
        (
            DeviceState(temperature_c=88),
            QUIET,
            "The GPU is hot: 88 °C, and slows down from about 92 °C on. Let it cool, or expect the clock to fall.",
        ),
        (
            DeviceState(temperature_c=81),
            None,
            "The GPU is hot: 81 °C, and slows down from about 88 °C on. Let it cool, or expect the clock to fall.",
        ),
        (
            DeviceState(),
            Limits(application_sm_mhz=900, default_application_sm_mhz=1095, max_sm_clock_mhz=1410),
            "Its SM clock is set to 900 MHz instead of 1095 MHz: kernels will run slower than published figures."
            " An administrator resets it with nvidia-smi -rac.",
        ),
        (
            DeviceState(),
            Limits(power_limit_w=250, default_power_limit_w=400),
            "Its power is capped at 250 W instead of 400 W: long kernels will run slower than published figures.",
        ),
        (
            DeviceState(),
            Limits(exclusive=True),
            "Only one process may use this GPU (compute mode EXCLUSIVE_PROCESS): kernels are named only with"
            " QUANTBENCH_KERNEL_NAMES=here, which slows later timings, or after nvidia-smi -c DEFAULT.",
        ),
    ],
)
def test_one_thing_is_off(state: DeviceState, limits: Limits | None, sentence: str) -> None:
    assert warnings_for(A100, state, limits) == (sentence,)


@pytest.mark.parametrize(
    ("slug", "default_mhz", "highest_mhz"), [("v100", 1312, 1530), ("a100", 1095, 1410)]
)
def test_a_default_clock_below_the_highest_is_no_lowered_clock(
    slug: str, default_mhz: float, highest_mhz: float
) -> None:
    limits = Limits(
        application_sm_mhz=default_mhz,
        default_application_sm_mhz=default_mhz,
        max_sm_clock_mhz=highest_mhz,
    )
    assert warnings_for(lookup(slug), DeviceState(), limits) == ()


@pytest.mark.parametrize("reason", sorted(HARMFUL_REASONS))
def test_every_harmful_reason_is_named(reason: str) -> None:
    (sentence,) = warnings_for(A100, DeviceState(throttle_reasons=(reason,)))
    assert reason in sentence


def test_an_unregistered_card_is_said_to_be_one() -> None:
    spec = match(Properties("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 42, 40 * 2**30))
    assert warnings_for(spec, DeviceState()) == (
        "This GPU is not in the registry as it stands; its peaks are estimated: 42 of 108 SMs and 40 of 80 GiB of a100-sxm4-80gb.",
    )


def test_a_busy_processor() -> None:
    assert warnings_for(CPU, DeviceState(load_per_core=0.5)) == ()
    (sentence,) = warnings_for(CPU, DeviceState(load_per_core=0.9))
    assert sentence == (
        "This machine is busy: a load of 0.9 per core over the last minute, where at most 0.5 leaves a pinned thread"
        " alone. Timings will scatter."
    )
