"""SM clocks from stamps of literal counters."""

from __future__ import annotations

import numpy as np
import pytest

from quantbench.timing.cuda_device import clocks_from_stamps


def stamps(
    times_ns: list[int], mhz: list[float], sms: int = 4, sm_mhz: dict[int, float] | None = None
) -> np.ndarray:
    """Counters of SMs that run at mhz[i] between stamps i and i + 1, each SM with an offset of its
    own.
    """
    made = np.zeros((len(times_ns), sms, 2), dtype=np.int64)
    for sm in range(sms):
        cycles = 10_000_000 * (sm + 1)
        for index, at_ns in enumerate(times_ns):
            if index:
                clock = (sm_mhz or {}).get(sm, mhz[index - 1])
                cycles += round((at_ns - times_ns[index - 1]) * clock / 1e3)
            made[index, sm] = (at_ns, cycles)
    return made


def test_one_clock_per_gap() -> None:
    got = clocks_from_stamps(stamps([5_000, 1_005_000, 2_005_000], [1980.0, 1500.0]))
    assert got == pytest.approx((1980.0, 1500.0))


def test_short_gaps_borrow_from_their_neighbours() -> None:
    # Five gaps of 150 µs: each looks half a millisecond around itself, so that a tick of 1 µs is
    # 0.2 % and not 0.7 %.
    times = [1_000_000 + 150_000 * i for i in range(6)]
    got = clocks_from_stamps(stamps(times, [1000.0, 1000.0, 1000.0, 2000.0, 2000.0]))
    assert got[0] == pytest.approx((1000 * 3 + 2000) / 4)  # gaps 0 to 3
    assert got[2] == pytest.approx((1000 * 3 + 2000 * 2) / 5)  # all five


def test_all_gaps_together_when_the_whole_batch_is_short() -> None:
    got = clocks_from_stamps(stamps([1_000, 101_000, 201_000], [1000.0, 2000.0]))
    assert got == pytest.approx((1500.0, 1500.0))


def test_sleeping_sms_do_not_pull_the_clock_down() -> None:
    got = clocks_from_stamps(
        stamps([1_000, 1_001_000], [1980.0], sms=8, sm_mhz={0: 300.0, 5: 900.0})
    )
    assert got == pytest.approx((1980.0,))


def test_sms_that_were_not_stamped_are_left_out() -> None:
    made = stamps([1_000, 1_001_000], [1410.0], sms=4)
    made[1, 0] = 0
    made[0, 3] = 0
    assert clocks_from_stamps(made) == pytest.approx((1410.0,))


def test_a_counter_that_went_back_is_left_out() -> None:
    made = stamps([1_000, 1_001_000], [1410.0], sms=2)
    made[1, 0, 1] = 5
    assert clocks_from_stamps(made) == pytest.approx((1410.0,))


@pytest.mark.parametrize(
    "made",
    [
        np.zeros((3, 4, 2), dtype=np.int64),  # nothing ran
        stamps([1_000], []),  # one stamp has no gap
        stamps([1_000, 1_000], [1410.0]),  # no time went by
    ],
)
def test_no_clock_where_none_can_be_told(made: np.ndarray) -> None:
    assert clocks_from_stamps(made) == ()
