"""Trust grades from literal measurements."""

from dataclasses import replace

import pytest
from made_devices import A100

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.measurement import Discarded, Grade, Measurement
from quantbench.timing.grade import INTERPRETED, Drift, grade
from quantbench.timing.options import TimingOptions
from quantbench.timing.session import KEPT

MIB = 2**20
# H100 SXM5, constants as in the registry.
H100 = DeviceSpec(
    "h100", "cuda", 132, 1830, 50 * MIB, 228 * 2**10, 80 * 2**30, 3352, {"bf16": 989.4, "fp32": 66.9}, (9, 0),
    max_sm_clock_mhz=1980, peak_clock_mhz={"fp32": 1980},
)  # fmt: skip
CPU = DeviceSpec("cpu", "cpu", 1, 5000, 32 * MIB, 0, 2**34, 100, {"bf16": 0.64})
STATE = DeviceState(sm_clock_mhz=1410.0)
UNKNOWN = DeviceState(note="NVML is not installed")
HOT = TimingOptions(cache="hot")
STEADY = (100.0, 100.1, 99.9, 100.0)


def measured(*samples: float, mhz: float | None = 1410.0, **changes: object) -> Measurement:
    """Twenty steady samples at one clock if nothing else is said; mhz None: no clock is known."""
    samples = samples or STEADY * 5
    state = DeviceState(sm_clock_mhz=mhz) if mhz else UNKNOWN
    base = Measurement(
        samples_us=samples, clocks_mhz=(mhz,) * len(samples) if mhz else (), discarded=(), stopped_by="precision",
        mode="events", cache="cold", state_before=state, state_after=state,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def graded(measurement: Measurement, spec: DeviceSpec = A100, **changes: object) -> Grade:
    # 10 GFLOP and 10 MB in 100 µs: 100 TFLOP/s and 100 GB/s, far below any peak.
    values = {"flops": 1e10, "min_bytes": 1e7, "dtype": "bf16", **changes}
    return grade(measurement, spec=spec, **values)  # type: ignore[arg-type]


def at_tflops(tflops: float, **changes: object) -> dict[str, object]:
    """Of 100 µs."""
    return {"flops": tflops * 1e8, **changes}


@pytest.mark.parametrize(
    ("measurement", "changes", "possible"),
    [
        # 2·8192³ in 2 ms are 549.8 TFLOP/s on a card of 312.
        (measured(*[2000.0] * 20), {"flops": 2 * 8192**3, "min_bytes": 3 * 2 * 8192**2}, False),
        # 1050 TFLOP/s: above the 989.4 printed for 1830 MHz, below the 1070.5 of 1980 MHz, far above
        # the 811 of 1500 MHz; without a clock the highest counts.
        (measured(mhz=1980.0), at_tflops(1050, spec=H100), True),
        (measured(mhz=1500.0), at_tflops(1050, spec=H100), False),
        (measured(mhz=None), at_tflops(1050, spec=H100), True),
        (measured(mhz=None), at_tflops(1200, spec=H100), False),
        # A peak stated at another clock is scaled from that one.
        (measured(mhz=1980.0), at_tflops(66, spec=H100, dtype="fp32"), True),
        (measured(mhz=1980.0), at_tflops(72, spec=H100, dtype="fp32"), False),
        # Where a format's peak is not known the highest counts.
        (measured(), at_tflops(280, dtype="int8"), True),
        (measured(), at_tflops(375, dtype=None), False),
        # 440 MiB must pass, of which 40 MiB may stay behind in L2: 400 MiB in 100 µs are 4194 GB/s
        # on a card of 2039. 39 MiB in 10 µs need not have passed yet.
        (measured(), {"min_bytes": 440 * MIB}, False),
        (measured(*[10.0] * 20), {"flops": 1e8, "min_bytes": 39 * MIB}, True),
        # A hot cache spares no more than its size, and is no hundred times faster than memory.
        (measured(cache="hot"), {"min_bytes": 39 * MIB, "options": HOT}, True),
        (measured(cache="hot"), {"min_bytes": 440 * MIB, "options": HOT}, False),
        (measured(*[0.1] * 20, cache="hot"), {"flops": 1e6, "min_bytes": 39 * MIB, "options": HOT}, False),
        # A processor's momentary clock is no bound.
        (measured(mhz=400.0, mode="cpu"), at_tflops(0.5, spec=CPU), True),
        (measured(mhz=400.0, mode="cpu"), at_tflops(0.7, spec=CPU), False),
        (measured(*[1.0] * 3, cache="hot"), {"flops": 1e12}, False),
    ],
)  # fmt: skip
def test_what_is_faster_than_the_hardware_is_rejected(
    measurement: Measurement, changes: dict[str, object], possible: bool
) -> None:
    got = graded(measurement, **changes)  # type: ignore[arg-type]
    assert (got.letter != "rejected") == possible


def discarded(count: int, reason: str) -> tuple[Discarded, ...]:
    return (Discarded(140.0, reason, 1050.0),) * count


# Ranks 6 and 15 of 20: 99 and 101.
WIDE = measured(
    97.0, 98.0, 99.0, 99.0, 99.0, 99.0, 99.5, 99.6, 99.8, 100.0, 100.0, 100.2, 100.4, 100.5, 101.0, 101.0, 101.0,
    101.5, 102.0, 103.0, stopped_by="max_time",
)  # fmt: skip
CAPPED = DeviceState(sm_clock_mhz=1000.0, throttle_reasons=("sw_power_cap",))
THERMAL = replace(STATE, throttle_reasons=("hw_thermal", "sw_power_cap"))
CROWDED = replace(STATE, other_processes=1)
THROTTLED = "throttled: 1050 MHz is 74 % of the steady 1410 MHz"


@pytest.mark.parametrize(
    ("measurement", "changes", "letter", "reason"),
    [
        (measured(), {}, "A", ""),
        (measured(), {"interpreted": True}, "rejected", INTERPRETED),
        (WIDE, {}, "B", "the median is known to ±1.00 %, not to the ±0.50 % asked for (stopped by max_time)"),
        (WIDE, {"options": TimingOptions(half_width=0.01)}, "A", ""),  # exactly what was asked for
        (WIDE, {"options": TimingOptions(half_width=0.002)}, "C", "the median is known to ±1.00 %"),
        (measured(*[10.0, 10.5] * 40, stopped_by="noise_floor"), {"flops": 1e8, "min_bytes": 1e5}, "B",
         "the median is known to ±0.56 %, not to the ±0.50 % asked for (the noise stopped falling)"),
        (measured(*[100.0] * 8), {}, "B", "8 samples, 10 were asked for"),
        (measured(*[100.0] * 5), {}, "C", "5 samples, too few for an interval; 10 were asked for"),
        (measured(*[90.0, 96.0, 100.0, 100.0, 100.0, 104.0, 112.0] * 40), {}, "C", "samples spread by 22 %"),
        (measured(*[*STEADY, 100.1, 100.2, 100.0, 99.9, 100.1, 150.0] * 4), {}, "B", "10 % of the samples are far out"),
        (measured(*STEADY * 4, *STEADY[:3], 150.0), {}, "A", ""),  # one in twenty happens on a quiet machine
        (measured(*[100.0, 100.2] * 10, *[103.0, 103.2] * 10), {}, "C", "times went up by 3.0 % while sampling"),
        (measured(), {"drift": Drift(1.019)}, "A", ""),
        (measured(), {"drift": Drift(0.981)}, "A", ""),
        (measured(), {"drift": Drift(1.03)}, "B", "the reference point had become 3.0 % slower than at first"),
        (measured(), {"drift": Drift(1.12)}, "C", "the reference point had become 12 % slower than at first"),
        (measured(), {"drift": Drift(float("nan"))}, "C", "the reference point had become nan % faster"),
        (measured(cache="hot"), {}, "C", "measured with a hot cache, cold was asked for"),
        (measured(clocks_mhz=(1410.0, 1350.0) * 10), {}, "B", "the SM clock moved between 1350 and 1410 MHz"),
        (measured(clocks_mhz=(1410.0, 1200.0) * 10), {}, "C", "the SM clock moved between 1200 and 1410 MHz"),
        (measured(mhz=1000.0), {}, "B", "the SM clock was 1000 MHz, 71 % of the 1410 MHz that the peak is stated at"),
        (measured(mhz=600.0), {}, "C", "the SM clock was 600 MHz"),
        (measured(mhz=1000.0, state_before=CAPPED, state_after=CAPPED), {}, "A", "the SM clock was 1000 MHz, 71 % of"),
        (measured(mhz=1200.0, state_after=DeviceState(sm_clock_mhz=1410.0)), {}, "B",
         "the next visit may differ by 1.8 %: the SM clock is at 1200 of 1410 MHz"),
        (measured(mhz=None), {}, "B", "the SM clock is not known (NVML is not installed)"),
        (measured(mhz=None, mode="cpu"), {"spec": CPU, "flops": 1e7}, "A", ""),
        (measured(discarded=discarded(2, THROTTLED)), {}, "A", "2 of 22 samples throttled and discarded"),
        (measured(discarded=discarded(30, THROTTLED)), {}, "C", "30 of 50 samples throttled and discarded"),
        # A preempted thread is never worse than one thing off.
        (measured(mhz=None, mode="cpu", discarded=discarded(60, "preempted: the core went to others once")),
         {"spec": CPU, "flops": 1e7}, "B", "60 of 80 samples preempted and discarded"),
        (measured(discarded=discarded(1, "not a time: nan µs")), {}, "C", "1 of 21 samples not a time: nan µs"),
        (measured(state_after=CROWDED), {}, "B", "1 other process on the card"),
        (measured(state_after=THERMAL), {}, "B", "the card was protecting itself in the end (hw_thermal)"),
        # Several things off add up, and the worst comes first.
        (measured(state_after=CROWDED), {"drift": Drift(1.03)}, "C", "the reference point had become 3.0 % slower"),
        (measured(state_after=CROWDED, cache="hot"), {"drift": Drift(1.03)}, "D", "measured with a hot cache"),
        (measured(cache="hot", discarded=discarded(1, f"throttled: 900 MHz is low{KEPT}")), {}, "D",
         "every sample was throttled (900 MHz is low)"),
        (measured(discarded=discarded(1, THROTTLED + KEPT)), {"unchecked": "not checked"}, "D", "not checked"),
    ],
)  # fmt: skip
def test_what_costs_a_grade(
    measurement: Measurement, changes: dict[str, object], letter: str, reason: str
) -> None:
    got = graded(measurement, **changes)  # type: ignore[arg-type]
    assert got.letter == letter
    assert any(word.startswith(reason) for word in got.reasons) == bool(reason)
    assert letter != "D" or got.reasons[0].startswith(reason)  # the worst comes first
