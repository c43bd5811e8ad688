"""SM clocks from stamps of literal counters."""

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


@pytest.mark.parametrize(
    ("made", "clocks"),
    [
        (stamps([5_000, 1_005_000, 2_005_000], [1980.0, 1500.0]), [1980.0, 1500.0]),
        # The whole batch is short: all gaps together.
        (stamps([1_000, 101_000, 201_000], [1000.0, 2000.0]), [1500.0, 1500.0]),
        # Sleeping SMs do not pull the clock down.
        (stamps([1_000, 1_001_000], [1980.0], sms=8, sm_mhz={0: 300.0, 5: 900.0}), [1980.0]),
        (np.zeros((3, 4, 2), dtype=np.int64), []),  # nothing ran
        (stamps([1_000], []), []),  # one stamp has no gap
        (stamps([1_000, 1_000], [1410.0]), []),  # no time went by
    ],
)
def test_clocks_between_stamps(made: np.ndarray, clocks: list[float]) -> None:
    assert clocks_from_stamps(made) == pytest.approx(tuple(clocks))


def test_short_gaps_borrow_from_their_neighbours() -> None:
    # Five gaps of 150 µs: each looks half a millisecond around itself, so that a tick of 1 µs is
    # 0.2 % and not 0.7 %.
    times = [1_000_000 + 150_000 * i for i in range(6)]
    got = clocks_from_stamps(stamps(times, [1000.0, 1000.0, 1000.0, 2000.0, 2000.0]))
    assert got[0] == pytest.approx((1000 * 3 + 2000) / 4)  # gaps 0 to 3
    assert got[2] == pytest.approx((1000 * 3 + 2000 * 2) / 5)  # all five


def test_counters_that_were_not_stamped_or_went_back_are_left_out() -> None:
    made = stamps([1_000, 1_001_000], [1410.0], sms=4)
    made[1, 0] = 0
    made[0, 3] = 0
    made[1, 1, 1] = 5
    assert clocks_from_stamps(made) == pytest.approx((1410.0,))
