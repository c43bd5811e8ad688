"""When a device counts as settled."""

from __future__ import annotations

from quantbench.timing.stopping import Steadiness


def fed(batches: list[tuple[float, list[float], list[float]]], window_s: float = 0.1) -> Steadiness:
    steadiness = Steadiness(window_s)
    for at_s, times, clocks in batches:
        steadiness.add(at_s, times, clocks)
    return steadiness


def test_nothing_seen_is_not_steady() -> None:
    assert not Steadiness(0.1).steady


def test_equal_times_are_steady_once_two_windows_are_full() -> None:
    batches = [(at / 100, [50.0, 50.1, 50.0], []) for at in range(1, 21)]
    assert not fed(batches[:19]).steady  # 0.19 s
    assert fed(batches).steady


def test_a_falling_time_is_not_steady() -> None:
    # A clock that climbs from idle: 2 % faster with every batch.
    batches = [(at / 100, [100.0 * 0.98**at] * 3, []) for at in range(1, 31)]
    assert not fed(batches).steady


def test_a_rising_clock_is_not_steady_though_the_time_is() -> None:
    # Memory-bound work does not show the clock in its time.
    climbing = [(at / 100, [50.0] * 3, [600.0 + 40 * at] * 3) for at in range(1, 31)]
    assert not fed(climbing).steady
    settled = climbing + [(at / 100, [50.0] * 3, [1800.0] * 3) for at in range(31, 60)]
    assert fed(settled).steady


def test_noise_is_not_taken_for_a_trend() -> None:
    # 5 % up and down; the medians of the windows differ by 2 %.
    old = [(0.02 * i, [95.0, 100.0, 105.0, 99.0], []) for i in range(1, 6)]
    new = [(0.1 + 0.02 * i, [97.0, 102.0, 107.0, 101.0], []) for i in range(1, 6)]
    assert fed(old + new).steady


def test_two_percent_without_noise_is_a_trend() -> None:
    old = [(0.02 * i, [100.0] * 4, []) for i in range(1, 6)]
    new = [(0.1 + 0.02 * i, [102.0] * 4, []) for i in range(1, 6)]
    assert not fed(old + new).steady


def test_work_slower_than_the_window_needs_three_samples_in_each() -> None:
    slow = [(0.5 * i, [5e5], [1400.0]) for i in range(1, 7)]
    assert not fed(slow[:5]).steady
    assert fed(slow).steady


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


def test_a_faster_clock_is_as_unsteady_as_a_slower_one() -> None:
    for factor, steady in ((1.0, True), (1.008, True), (0.992, True), (1.02, False), (0.98, False)):
        old = [(0.02 * i, [100.0] * 4, [1400.0] * 4) for i in range(1, 6)]
        new = [(0.1 + 0.02 * i, [100.0] * 4, [1400.0 * factor] * 4) for i in range(1, 6)]
        assert fed(old + new).steady == steady


def test_more_samples_make_the_noise_between_windows_smaller() -> None:
    # Times of 5 % noise that rise by 4 %: within what six samples scatter, beyond what sixty do.
    def rising(repeats: int) -> Steadiness:
        times = [95.0, 97.0, 99.0, 101.0, 103.0, 105.0] * repeats
        return fed([(0.1, times, []), (0.2, [1.04 * us for us in times], [])])

    assert rising(1).steady
    assert not rising(10).steady


def test_typical_time_and_clock_are_those_of_the_last_window() -> None:
    steadiness = fed(
        [
            (0.05, [90.0] * 3, [1000.0] * 3),
            (0.15, [59.0, 61.0, 62.0], [1500.0] * 3),
            (0.2, [58.0, 60.0], [1515.0] * 2),
        ]
    )
    assert steadiness.typical_us == 60.0
    assert steadiness.clock_mhz == 1500.0
    assert steadiness.rounds == 3
    steadiness.add(0.24, [70.0] * 5, [])
    assert steadiness.typical_us == 66.0  # all ten samples since 0.14 s


def test_without_clocks_there_is_no_clock() -> None:
    assert fed([(0.05, [90.0], [])]).clock_mhz is None
