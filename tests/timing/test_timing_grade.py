"""Trust grades from literal measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.measurement import Discarded, Grade, Measurement
from quantbench.timing.grade import INTERPRETED, Drift, best_clock_mhz, grade
from quantbench.timing.options import TimingOptions
from quantbench.timing.session import KEPT

MIB = 2**20
# A100 SXM4 80 GB and H100 SXM5, constants as in the registry.
A100 = DeviceSpec(
    "a100", "cuda", 108, 1410, 40 * MIB, 164 * 2**10, 80 * 2**30, 2039, {"bf16": 312}, (8, 0)
)
H100 = DeviceSpec(
    "h100", "cuda", 132, 1830, 50 * MIB, 228 * 2**10, 80 * 2**30, 3352, {"bf16": 989.4, "fp32": 66.9}, (9, 0),
    max_sm_clock_mhz=1980, peak_clock_mhz={"fp32": 1980},
)  # fmt: skip
CPU = DeviceSpec("cpu", "cpu", 1, 5000, 32 * MIB, 0, 2**34, 100, {"bf16": 0.64})
STATE = DeviceState(sm_clock_mhz=1410.0)


def measured(*samples: float, **changes: object) -> Measurement:
    samples = samples or (100.0, 100.1, 99.9, 100.0) * 5
    base = Measurement(
        samples_us=samples, clocks_mhz=(1410.0,) * len(samples), discarded=(), stopped_by="precision", mode="events",
        cache="cold", state_before=STATE, state_after=STATE,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def graded(measurement: Measurement, spec: DeviceSpec = A100, **changes: object) -> Grade:
    # 10 GFLOP and 10 MB in 100 µs: 100 TFLOP/s and 100 GB/s, far below any peak.
    values = {"flops": 1e10, "min_bytes": 1e7, "dtype": "bf16", **changes}
    return grade(measurement, spec=spec, **values)  # type: ignore[arg-type]


def test_a_steady_cold_measurement_is_an_a_without_reasons() -> None:
    assert graded(measured()) == Grade("A")


def test_what_an_interpreter_took_is_the_time_of_no_kernel() -> None:
    assert graded(measured(), interpreted=True) == Grade("rejected", (INTERPRETED,))


def test_what_has_no_worth_says_so_first() -> None:
    kept = tuple(
        Discarded(140.0, f"throttled: {mhz} MHz is low{KEPT}", float(mhz)) for mhz in (1050, 900)
    )
    got = graded(measured(discarded=kept, cache="hot"), unchecked="not checked")
    assert got == Grade(
        "D",
        (
            "not checked",
            "every sample was throttled (1050 MHz is low)",
            "measured with a hot cache, cold was asked for",
        ),
    )


# ---- impossible


def test_more_flops_than_the_tensor_cores_have_is_rejected() -> None:
    # 2·8192³ in 2 ms are 549.8 TFLOP/s on a card of 312.
    got = graded(measured(*[2000.0] * 20), flops=2 * 8192**3, min_bytes=3 * 2 * 8192**2)
    assert got.letter == "rejected"
    assert got.reasons == (
        "faster than the hardware's peak: 549.8 TFLOP/s, where a100 reaches at most 312 TFLOP/s in bf16 "
        "at the 1410 MHz seen",
    )


def test_the_peak_is_that_of_the_best_clock_seen() -> None:
    # 1050 TFLOP/s: above the 989.4 printed for 1830 MHz, below the 1070.5 of 1980 MHz, far above
    # the 811 of 1500 MHz.
    def at(mhz: float) -> Grade:
        state = DeviceState(sm_clock_mhz=mhz)
        m = measured(*[100.0] * 20, clocks_mhz=(mhz,) * 20, state_before=state, state_after=state)
        return graded(m, H100, flops=1050e12 * 100e-6)

    assert at(1980.0).letter == "A"
    assert at(1500.0).letter == "rejected"
    assert "at most 811 TFLOP/s in bf16 at the 1500 MHz seen" in at(1500.0).reasons[0]


def test_without_a_clock_the_highest_clock_counts() -> None:
    nothing = DeviceState(note="NVML is not installed")
    m = measured(*[100.0] * 20, clocks_mhz=(), state_before=nothing, state_after=nothing)
    assert graded(m, H100, flops=1050e12 * 100e-6).letter == "B"
    beyond = graded(m, H100, flops=1200e12 * 100e-6)
    assert beyond.letter == "rejected"
    assert beyond.reasons[0].endswith("at most 1070 TFLOP/s in bf16 at its highest clock")


def test_a_peak_stated_at_another_clock_is_scaled_from_that_one() -> None:
    m = measured(*[100.0] * 20, clocks_mhz=(1980.0,) * 20)
    assert graded(m, H100, dtype="fp32", flops=66e12 * 100e-6).letter == "A"
    assert graded(m, H100, dtype="fp32", flops=72e12 * 100e-6).letter == "rejected"


@pytest.mark.parametrize("dtype", ["int8", "", None])
def test_where_the_peak_is_not_known_the_highest_counts(dtype: str | None) -> None:
    highest = max(A100.peak_tflops.values())
    assert graded(measured(), flops=0.9 * highest * 1e8, dtype=dtype).letter == "A"
    beyond = graded(measured(), flops=1.2 * highest * 1e8, dtype=dtype)
    assert beyond.letter == "rejected"
    assert "its fastest format" in beyond.reasons[0]


def test_faster_than_memory_is_rejected() -> None:
    # 440 MiB must pass, of which 40 MiB may stay behind in L2: 400 MiB in 100 µs are 4194 GB/s on a
    # card of 2039.
    got = graded(measured(), min_bytes=440 * MIB)
    assert got.letter == "rejected"
    assert got.reasons == (
        "faster than the hardware's peak: at least 4194 GB/s through memory, where a100 reaches at most 2039 GB/s",
    )


def test_what_fits_into_the_cache_may_be_written_back_later() -> None:
    # 39 MiB in 10 µs read as 4089 GB/s, but the bus may not have seen a byte of output yet: no
    # bound, no rejection.
    assert graded(measured(*[10.0] * 20), flops=1e8, min_bytes=39 * MIB).letter != "rejected"


def test_a_hot_cache_spares_no_more_than_its_size() -> None:
    options = TimingOptions(cache="hot")
    assert graded(measured(cache="hot"), min_bytes=39 * MIB, options=options).letter == "A"
    assert graded(measured(cache="hot"), min_bytes=440 * MIB, options=options).letter == "rejected"


def test_no_cache_is_a_hundred_times_faster_than_memory() -> None:
    got = graded(
        measured(*[0.1] * 20, cache="hot"), min_bytes=39 * MIB, options=TimingOptions(cache="hot")
    )
    assert got.letter == "rejected"
    assert (
        "over 100 times the 2039 GB/s of a100's memory, which no cache reaches" in got.reasons[-1]
    )


def test_a_processors_momentary_clock_is_no_bound() -> None:
    idle = DeviceState(sm_clock_mhz=400.0)
    m = measured(*[1000.0] * 20, clocks_mhz=(), mode="cpu", state_before=idle, state_after=idle)
    assert graded(m, CPU, flops=0.5e12 * 1e-3).letter == "A"
    assert graded(m, CPU, flops=0.7e12 * 1e-3).letter == "rejected"


def test_impossible_outweighs_everything_else() -> None:
    m = measured(*[1.0] * 3, cache="hot")
    assert graded(m, flops=1e12).letter == "rejected"


# ---- one thing off, several, badly


def only(got: Grade, letter: str, reason: str) -> None:
    assert got.letter == letter
    assert got.reasons == (reason,)


def test_half_width_missed() -> None:
    # Ranks 6 and 15 of 20: 99 and 101.
    low = [97.0, 98.0, 99.0, 99.0, 99.0, 99.0, 99.5, 99.6, 99.8, 100.0]
    high = [100.0, 100.2, 100.4, 100.5, 101.0, 101.0, 101.0, 101.5, 102.0, 103.0]
    m = measured(*(s for pair in zip(low, high, strict=True) for s in pair), stopped_by="max_time")
    got = graded(m)
    assert got.letter == "B"
    assert (
        got.reasons[0]
        == "the median is known to ±1.00%, not to the ±0.50% asked for (stopped by max_time)"
    )
    assert graded(m, options=TimingOptions(half_width=0.02)).letter == "A"
    assert (
        graded(m, options=TimingOptions(half_width=0.01)).letter == "A"
    )  # exactly what was asked for
    assert graded(m, options=TimingOptions(half_width=0.002)).letter == "C"  # five times too wide


def test_noise_floor_is_named() -> None:
    m = measured(*[10.0, 10.5] * 40, stopped_by="noise_floor")
    assert "(the noise stopped falling)" in graded(m, flops=1e8, min_bytes=1e5).reasons[0]


def test_too_few_samples() -> None:
    only(graded(measured(*[100.0] * 8)), "B", "8 samples, 10 were asked for")
    only(
        graded(measured(*[100.0] * 5)), "C", "5 samples, too few for an interval; 10 were asked for"
    )
    only(graded(measured(100.0)), "C", "1 sample, too few for an interval; 10 were asked for")


def test_spread_and_noise() -> None:
    wider = measured(*[90.0, 96.0, 100.0, 100.0, 100.0, 104.0, 112.0] * 40)
    got = graded(wider)
    assert [
        r for r in got.reasons if r.startswith("samples spread by 22% (10 % to 90 %; noise 5.9%)")
    ]


def test_outliers() -> None:
    m = measured(*[100.0, 100.1, 100.2, 99.9, 100.0, 100.1, 100.0, 99.9, 100.1, 150.0] * 4)
    assert "10% of the samples are far out" in graded(m).reasons
    # One in twenty happens on a quiet machine.
    assert (
        graded(measured(*[100.0, 100.1, 99.9, 100.0] * 4, 100.0, 100.1, 99.9, 150.0)).letter == "A"
    )


def test_times_that_rise_while_sampling() -> None:
    m = measured(*[100.0, 100.2] * 10, *[103.0, 103.2] * 10)
    assert "times went up by 3.0% while sampling" in graded(m).reasons
    noisy = measured(*[95.0, 105.0, 100.0, 110.0] * 5, *[97.0, 107.0, 102.0, 112.0] * 5)
    assert not [r for r in graded(noisy).reasons if "while sampling" in r]


@pytest.mark.parametrize(
    ("ratio", "letter", "reason"),
    [
        (None, "A", None),
        (1.0, "A", None),
        (1.019, "A", None),
        (0.981, "A", None),
        (1.03, "B", "the reference point had become 3.0% slower than at first"),
        (0.97, "B", "the reference point had become 3.0% faster than at first"),
        (1.12, "C", "the reference point had become 12.0% slower than at first"),
        (float("nan"), "C", "the reference point had become nan% faster than at first"),
    ],
)
def test_drift_against_the_reference_point(
    ratio: float | None, letter: str, reason: str | None
) -> None:
    got = graded(measured(), drift=None if ratio is None else Drift(ratio))
    assert (got.letter, got.reasons) == (letter, (reason,) if reason else ())


def test_hot_where_cold_was_asked() -> None:
    only(graded(measured(cache="hot")), "C", "measured with a hot cache, cold was asked for")


def test_an_unsteady_clock() -> None:
    only(
        graded(measured(clocks_mhz=(1410.0, 1410.0, 1350.0, 1350.0) * 5)),
        "B",
        "the SM clock moved between 1350 and 1410 MHz",
    )
    only(
        graded(measured(clocks_mhz=(1410.0, 1410.0, 1200.0, 1200.0) * 5)),
        "C",
        "the SM clock moved between 1200 and 1410 MHz",
    )


def test_a_low_clock() -> None:
    low = DeviceState(sm_clock_mhz=1000.0)
    m = measured(clocks_mhz=(1000.0,) * 20, state_before=low, state_after=low)
    only(
        graded(m), "B", "the SM clock was 1000 MHz, 71% of the 1410 MHz that the peak is stated at"
    )
    very = measured(clocks_mhz=(600.0,) * 20)
    assert graded(very).letter == "C"


def test_a_clock_held_down_by_the_power_limit_is_named_and_costs_nothing() -> None:
    power = DeviceState(sm_clock_mhz=1000.0, throttle_reasons=("sw_power_cap",))
    m = measured(clocks_mhz=(1000.0,) * 20, state_before=power, state_after=power)
    only(
        graded(m),
        "A",
        "the SM clock was 1000 MHz, 71% of the 1410 MHz that the peak is stated at, held down by the power limit",
    )


def test_an_unknown_clock_is_one_thing_off_on_a_gpu_and_none_on_a_processor() -> None:
    unknown = DeviceState(note="NVML is not installed")
    m = measured(clocks_mhz=(), state_before=unknown, state_after=unknown)
    only(graded(m), "B", "the SM clock is not known (NVML is not installed)")
    assert graded(replace(m, mode="cpu"), CPU, flops=1e7).letter == "A"


def throttled(count: int) -> tuple[Discarded, ...]:
    return (Discarded(140.0, "throttled: 1050 MHz is 74% of the steady 1410 MHz", 1050.0),) * count


def test_throttled_samples_by_their_share() -> None:
    only(graded(measured(discarded=throttled(2))), "A", "2 of 22 samples throttled and discarded")
    only(graded(measured(discarded=throttled(5))), "B", "5 of 25 samples throttled and discarded")
    only(graded(measured(discarded=throttled(30))), "C", "30 of 50 samples throttled and discarded")


def test_a_preempted_thread_is_never_worse_than_one_thing_off() -> None:
    lost = (Discarded(140.0, "preempted: the core went to others once"),) * 60
    m = measured(discarded=lost, mode="cpu", clocks_mhz=())
    only(graded(m, CPU, flops=1e7), "B", "60 of 80 samples preempted and discarded")


def test_samples_that_were_no_times() -> None:
    m = measured(discarded=(Discarded(0.0, "not a time: nan µs"),))
    only(graded(m), "C", "1 of 21 samples not a time: nan µs")


def test_other_processes_on_the_card() -> None:
    only(
        graded(measured(state_after=replace(STATE, other_processes=1))),
        "B",
        "1 other process on the card",
    )
    only(
        graded(measured(state_before=replace(STATE, other_processes=2))),
        "B",
        "2 other processes on the card",
    )


def test_a_card_that_ends_hot() -> None:
    state = replace(STATE, throttle_reasons=("hw_thermal", "sw_power_cap"))
    only(
        graded(measured(state_after=state)),
        "B",
        "the card was protecting itself in the end (hw_thermal)",
    )


def test_several_things_off_add_up_and_the_worst_comes_first() -> None:
    two = measured(state_after=replace(STATE, other_processes=1))
    assert graded(two, drift=Drift(1.03)).letter == "C"
    got = graded(replace(two, cache="hot"), drift=Drift(1.03))
    assert got.letter == "D"
    assert got.reasons[0] == "measured with a hot cache, cold was asked for"


def test_the_best_clock_is_the_highest_seen_anywhere() -> None:
    m = measured(state_before=DeviceState(sm_clock_mhz=1980.0))
    assert best_clock_mhz(m) == 1980.0
    nothing = measured(clocks_mhz=(), state_before=DeviceState(), state_after=DeviceState())
    assert best_clock_mhz(nothing) is None
