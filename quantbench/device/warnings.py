"""What will spoil timings, in plain sentences, from what a device is and what it is doing. Pure.

A sentence says what is the matter, what it does to timings and, where there is one, what to do about it.
"""

from quantbench.device.nvml import HARMFUL_REASONS, Limits
from quantbench.device.spec import DeviceSpec, DeviceState

# Load of other work per core above which a pinned thread is disturbed often enough to see.
_BUSY_LOAD_PER_CORE = 0.5
# Below the slowdown temperature by less than this, a sweep of minutes gets there.
_HOT_MARGIN_C = 8.0
# Without a known slowdown temperature. Data-centre cards slow down between 85 and 95 °C.
_HOT_C = 80.0
# A set clock or power limit this close to the highest makes no difference that can be seen.
_NEARLY = 0.99

_WHAT_HOLDS = {
    "sw_power_cap": "its power limit",
    "hw_slowdown": "the hardware slowdown signal (heat, power or supply)",
    "sw_thermal": "its temperature",
    "hw_thermal": "its temperature, in hardware",
    "hw_power_brake": "the power brake of the server",
}


def warnings_for(spec: DeviceSpec, state: DeviceState, limits: Limits | None = None) -> tuple[str, ...]:
    """Sentences for everything about the device that timings suffer from; none if all is well.

    >>> warnings_for(DeviceSpec("x", "cuda", 1, 1000, 2**20, 0, 2**30, 100, {}, (8, 0)), DeviceState(other_processes=2))
    ('2 other processes compute on this GPU: their work lands in the timings. End them or take another GPU.',)
    """
    if spec.kind == "cpu":
        return _cpu_warnings(state)
    return (*_gpu_state_warnings(state, limits), *_gpu_setting_warnings(spec, limits))


def _cpu_warnings(state: DeviceState) -> tuple[str, ...]:
    load = state.load_per_core
    if load is None or load <= _BUSY_LOAD_PER_CORE:
        return ()
    return (
        f"This machine is busy: a load of {load:.1f} per core over the last minute, where at most"
        f" {_BUSY_LOAD_PER_CORE:g} leaves a pinned thread alone. Timings will scatter.",
    )


def _gpu_state_warnings(state: DeviceState, limits: Limits | None) -> list[str]:
    found = []
    others = state.other_processes
    if others:
        verb, whose, them = ("processes compute", "their", "them") if others > 1 else ("process computes", "its", "it")
        found.append(
            f"{others} other {verb} on this GPU: {whose} work lands in the timings. End {them} or take another GPU."
        )
    held = [reason for reason in state.throttle_reasons if reason in HARMFUL_REASONS]
    if held:
        what = " and ".join(_WHAT_HOLDS[reason] for reason in held)
        found.append(f"The clock is held down at this moment by {what} ({', '.join(held)}): kernels run slower.")
    slowdown_c = limits.slowdown_c if limits else None
    hot_c = slowdown_c - _HOT_MARGIN_C if slowdown_c else _HOT_C
    if state.temperature_c is not None and state.temperature_c >= hot_c:
        known = f", {slowdown_c - state.temperature_c:.0f} °C below where it slows down" if slowdown_c else ""
        found.append(f"The GPU is hot: {state.temperature_c:.0f} °C{known}. Let it cool, or expect the clock to fall.")
    return found


def _gpu_setting_warnings(spec: DeviceSpec, limits: Limits | None) -> list[str]:
    found = []
    if limits is not None:
        set_mhz, highest_mhz = limits.application_sm_mhz, limits.max_sm_clock_mhz
        if set_mhz and highest_mhz and set_mhz < _NEARLY * min(spec.sm_clock_mhz, highest_mhz):
            found.append(
                f"Its SM clock is set to {set_mhz:.0f} MHz, below the {spec.sm_clock_mhz:.0f} MHz that its peaks are"
                " stated at: shares of the peak will look low."
            )
        now_w, default_w = limits.power_limit_w, limits.default_power_limit_w
        if now_w and default_w and now_w < _NEARLY * default_w:
            found.append(
                f"Its power is capped at {now_w:.0f} W instead of {default_w:.0f} W: long kernels will run slower than"
                " published figures."
            )
        if limits.persistence is False:
            found.append(
                "Persistence mode is off: the driver unloads between programs, so starts are slow and clocks cold."
                " An administrator turns it on with nvidia-smi -pm 1."
            )
    if not spec.registered:
        found.append(f"This GPU is not in the registry as it stands; its peaks are {spec.source['peak_tflops']}.")
    return found
