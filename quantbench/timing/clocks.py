"""The SM clock from counters read on the device: Δcycles / Δnanoseconds between two stamps. Pure arithmetic."""

import numpy as np
import numpy.typing as npt

# %globaltimer ticks at 32 ns on some GPUs and at 1 µs on others; over half a millisecond that is 0.2 % at worst.
_WINDOW_NS = 500_000

# An SM's cycle counter may stand still while the SM is asleep, and no counter runs faster than the clock: so the upper
# quartile over the SMs is taken, which a few sleepers do not move and one misread stamp neither.
_UPPER = 0.75


def clocks_from_stamps(stamps: npt.NDArray[np.int64]) -> tuple[float, ...]:
    """SM clock in MHz between neighbouring stamps, one value per gap; empty where no SM was stamped often enough.

    stamps[i, sm] is (globaltimer in ns, clock64 in cycles) of stamp i on SM sm, both 0 where no block ran there.
    Gaps shorter than half a millisecond borrow from their neighbours: the timer's tick would show otherwise, and
    the clock does not change faster than that.

    >>> one_sm = np.array([[[1_000, 500]], [[1_001_000, 1_980_500]]], dtype=np.int64)
    >>> clocks_from_stamps(one_sm)
    (1980.0,)
    """
    count = len(stamps) - 1
    stamped = (stamps[:, :, 0] > 0).sum(axis=1) > 0
    if count < 1 or not stamped.all():
        return ()
    at_ns = np.array([np.median(row[row > 0]) for row in stamps[:, :, 0]])
    clocks = []
    for gap in range(count):
        low, high = gap, gap + 1
        while at_ns[high] - at_ns[low] < _WINDOW_NS and (low > 0 or high < count):
            low, high = max(low - 1, 0), min(high + 1, count)
        mhz = _mhz(stamps[low], stamps[high])
        if mhz is None:
            return ()
        clocks.append(mhz)
    return tuple(clocks)


def _mhz(before: npt.NDArray[np.int64], after: npt.NDArray[np.int64]) -> float | None:
    both = (before[:, 0] > 0) & (after[:, 0] > before[:, 0]) & (after[:, 1] > before[:, 1])
    if not both.any():
        return None
    delta = (after - before)[both]
    return float(np.quantile(delta[:, 1] / delta[:, 0] * 1e3, _UPPER))
