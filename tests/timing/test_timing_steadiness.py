"""When a device counts as settled."""

import pytest

from quantbench.timing.stopping import Steadiness

Batches = list[tuple[float, list[float], list[float]]]


def fed(batches: Batches) -> Steadiness:
    steadiness = Steadiness(0.1)
    for at_s, times, clocks in batches:
        steadiness.add(at_s, times, clocks)
    return steadiness


def windows(old: list[float], new: list[float], factor: float = 1.0) -> Batches:
    """Five batches of the same times in each of two windows, the clock of the second by a factor
    faster."""
    first = [(0.02 * i, old, [1400.0] * 4) for i in range(1, 6)]
    return first + [(0.1 + 0.02 * i, new, [1400.0 * factor] * 4) for i in range(1, 6)]


EQUAL = [(at / 100, [50.0, 50.1, 50.0], []) for at in range(1, 21)]
# Memory-bound work does not show the clock in its time.
CLIMBING = [(at / 100, [50.0] * 3, [600.0 + 40 * at] * 3) for at in range(1, 31)]
SLOW = [(0.5 * i, [5e5], [1400.0]) for i in range(1, 7)]  # slower than the window


@pytest.mark.parametrize(
    ("batches", "steady"),
    [
        ([], False),
        (EQUAL[:19], False),  # two windows are not full
        (EQUAL, True),
        ([(at / 100, [100.0 * 0.98**at] * 3, []) for at in range(1, 31)], False),
        (CLIMBING, False),
        (CLIMBING + [(at / 100, [50.0] * 3, [1800.0] * 3) for at in range(31, 60)], True),
        # 5 % up and down: that the medians differ by 2 % is noise.
        (windows([95.0, 100.0, 105.0, 99.0], [97.0, 102.0, 107.0, 101.0]), True),
        (windows([100.0] * 4, [102.0] * 4), False),
        (SLOW[:5], False),
        (SLOW, True),
        (windows([100.0] * 4, [100.0] * 4, 1.008), True),
        (windows([100.0] * 4, [100.0] * 4, 0.992), True),
        (windows([100.0] * 4, [100.0] * 4, 1.02), False),
        (windows([100.0] * 4, [100.0] * 4, 0.98), False),
    ],
)
def test_when_a_device_is_settled(batches: Batches, steady: bool) -> None:
    assert fed(batches).steady == steady


def test_what_came_before_the_last_two_windows_is_forgotten() -> None:
    # Two fast batches, then three and three at the same clock, each longer than the window.
    clocks = [1800.0, 1800.0, 1400.0, 1400.0, 1430.0, 1400.0, 1400.0, 1400.0]
    slow = [(0.5 * i, [5e5], [mhz]) for i, mhz in enumerate(clocks, 1)]
    assert fed(slow).steady
    quick = [
        (0.04 * i, [50.0] * 3, [mhz] * 3)
        for i, mhz in enumerate((1800.0, 1800.0, *[1400.0] * 5), 1)
    ]
    assert not fed(quick[:-2]).steady
    assert fed(quick).steady


def test_more_samples_make_the_noise_between_windows_smaller() -> None:
    # Times of 5 % noise that rise by 4 %: within what six samples scatter, beyond what sixty do.
    def rising(repeats: int) -> Steadiness:
        times = [95.0, 97.0, 99.0, 101.0, 103.0, 105.0] * repeats
        return fed([(0.1, times, []), (0.2, [1.04 * us for us in times], [])])

    assert rising(1).steady
    assert not rising(10).steady


def test_typical_time_and_clock_are_those_of_the_last_window() -> None:
    assert fed(EQUAL).clock_mhz is None
    steadiness = fed([
        (0.05, [90.0] * 3, [1000.0] * 3), (0.15, [59.0, 61.0, 62.0], [1500.0] * 3), (0.2, [58.0, 60.0], [1515.0] * 2)
    ])  # fmt: skip
    assert (steadiness.typical_us, steadiness.clock_mhz, steadiness.rounds) == (60.0, 1500.0, 3)
    steadiness.add(0.24, [70.0] * 5, [])
    assert steadiness.typical_us == 66.0  # all ten samples since 0.14 s
