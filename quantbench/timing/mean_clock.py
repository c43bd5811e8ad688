"""Estimates the mean SM clock of the last seconds, to which times are corrected.

An SM clock wanders by a percent within tens of milliseconds, so the short time of one point does
not show its mean. Work below the power limit shares one mean clock, which is pooled over recent
points and extrapolated along its trend. A point at the power limit gets the mean of its own clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from quantbench.measurement import MeanClock
from quantbench.stats import CONFIDENCE, normal_quantile

# Duration of a block. An SM clock wanders within tens of milliseconds, so the means of much longer
# blocks are independent.
_BLOCK_S = 0.25
# Maximum number of blocks that are kept. 24 blocks determine the mean of a clock that wanders by
# 1 % to within 0.4 %, even if it is extrapolated along its trend while the card gets hot. With
# fewer than _FEWEST_BLOCKS, the mean clock of a point is computed from its own clocks.
_MOST_BLOCKS = 24
_FEWEST_BLOCKS = 4
# A point runs at another clock if its mean differs from the mean of the blocks by more than
# _FAR_SHARE and by more than _FAR standard deviations of single clocks.
_FAR = 3.0
_FAR_SHARE = 0.01
# Number of parts of a point. The scatter of their means gives the error of the point's mean.
_PARTS = 3


@dataclass
class _Block:
    """Clocks of a quarter of a second.

    begun_s: time of the first batch of the block.
    count, total_mhz, total_mhz2: number of the clocks, their sum and the sum of their squares.
    """

    begun_s: float
    count: int = 0
    total_mhz: float = 0.0
    total_mhz2: float = 0.0

    def add(self, clocks_mhz: Sequence[float]) -> None:
        self.count += len(clocks_mhz)
        self.total_mhz += sum(clocks_mhz)
        self.total_mhz2 += sum(mhz * mhz for mhz in clocks_mhz)

    @property
    def mean_mhz(self) -> float:
        return self.total_mhz / self.count


class MeanClocks:
    """Mean SM clock of the last seconds of work that no limit slowed.

    Also gives the scatter of single clocks around the mean.
    """

    def __init__(self) -> None:
        self._blocks: deque[_Block] = deque(maxlen=_MOST_BLOCKS)
        self._scatter = 0.0  # scatter of the clocks before the blocks
        self._strangers = 0  # number of points in a row that ran at another clock

    def add(self, at_s: float, clocks_mhz: Sequence[float]) -> None:
        """Adds the clocks of one batch of steady work.

        at_s: time when the batch ended, in s.
        """
        if not self._blocks or at_s - self._blocks[-1].begun_s >= _BLOCK_S:
            self._blocks.append(_Block(at_s))
        self._blocks[-1].add(clocks_mhz)

    def learn(
        self, own_mhz: Sequence[float], batches: Sequence[tuple[float, Sequence[float]]]
    ) -> None:
        """Adds a point that no limit slowed.

        A first point at another clock is ignored. After two points in a row at another clock, the
        device is taken to run at that clock.

        own_mhz: clocks of the point's samples.
        batches: clocks of its batches, each with the time when the batch ended.
        """
        self._strangers = 0 if self._near(own_mhz) else self._strangers + 1
        if self._strangers == 1:
            return
        if self._strangers:
            self._scatter = self.scatter
            self._blocks.clear()
            self._strangers = 0
        for at_s, clocks_mhz in batches:
            self.add(at_s, clocks_mhz)

    @property
    def scatter(self) -> float:
        """Relative standard deviation of single clocks."""
        if len(self._blocks) < _FEWEST_BLOCKS:
            return self._scatter
        count = sum(block.count for block in self._blocks)
        mean_mhz = sum(block.total_mhz for block in self._blocks) / count
        variance = sum(block.total_mhz2 for block in self._blocks) / count - mean_mhz**2
        return sqrt(max(0.0, variance)) / mean_mhz

    def of(self, at_s: float, own_mhz: Sequence[float], *, limited: bool) -> MeanClock:
        """Returns the mean clock of a point.

        at_s: time of the point, in s.
        own_mhz: clocks of its samples, in the order of time.
        limited: whether the power limit held its clock down.
        """
        if limited or len(self._blocks) < _FEWEST_BLOCKS or not self._near(own_mhz):
            return self._of_point(own_mhz)
        return self._of_device(at_s)

    def _near(self, own_mhz: Sequence[float]) -> bool:
        """Returns whether a point's mean clock agrees with the mean of the blocks.

        The two means agree if they differ by no more than SM clocks wander. Returns True while
        there are too few blocks for a mean.
        """
        if len(self._blocks) < _FEWEST_BLOCKS:
            return True
        mean_mhz = float(np.mean([block.mean_mhz for block in self._blocks]))
        return abs(float(np.mean(own_mhz)) / mean_mhz - 1) <= max(_FAR * self.scatter, _FAR_SHARE)

    def _of_point(self, own_mhz: Sequence[float]) -> MeanClock:
        """Returns the mean of the clocks of one point.

        The error is at least the scatter of single clocks, because a point may be so short that its
        clocks all wander together.
        """
        parts = np.array_split(np.asarray(own_mhz), min(_PARTS, len(own_mhz)))
        means_mhz = np.array([part.mean() for part in parts])
        mean_mhz = float(means_mhz.mean())
        half_mhz = normal_quantile() * self.scatter * mean_mhz
        if len(parts) > 1:
            error_mhz = float(means_mhz.std(ddof=1)) / len(parts) ** 0.5
            half_mhz = max(half_mhz, _student_quantile(len(parts) - 1) * error_mhz)
        return MeanClock(mean_mhz, half_mhz)

    def _of_device(self, at_s: float) -> MeanClock:
        """Returns the mean clock of the blocks, extrapolated along their trend to a time.

        The change along the trend is multiplied by the fraction of it that is not noise.
        """
        means_mhz = np.array([block.mean_mhz for block in self._blocks])
        times_s = np.array([block.begun_s for block in self._blocks])
        count = len(times_s)
        middle_s = times_s.mean()
        squares = float(((times_s - middle_s) ** 2).sum())
        slope = float((times_s - middle_s) @ means_mhz) / squares
        rest_mhz = means_mhz - means_mhz.mean() - slope * (times_s - middle_s)
        variance = float(rest_mhz @ rest_mhz) / (count - 2)
        move_mhz = slope * float(at_s - middle_s)
        move_variance = variance * float(at_s - middle_s) ** 2 / squares
        sure = move_mhz**2 / (move_mhz**2 + move_variance) if move_mhz else 0.0
        error_mhz = (variance / count + sure**2 * move_variance) ** 0.5
        return MeanClock(
            float(means_mhz.mean()) + sure * move_mhz, _student_quantile(count - 2) * error_mhz
        )


def _student_quantile(freedom: int) -> float:
    """Returns the two-sided quantile of Student's distribution at the usual confidence."""
    from scipy import special

    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))
