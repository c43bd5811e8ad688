"""Estimates the mean SM clock around a point; times are corrected to this clock.

An SM clock wanders by a percent within tens of milliseconds, so the samples of one short point do
not show its mean. `MeanClocks` pools the clocks of recent points below the power limit, which share
one mean clock, and extrapolates them along their trend. A point at the power limit gets the mean of
its own clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from quantbench.measurement import MeanClock
from quantbench.stats import CONFIDENCE, normal_quantile

# Duration of a block of clocks, in s. An SM clock wanders within tens of milliseconds, so the means
# of such longer blocks are independent.
_BLOCK_S = 0.25
# Maximum number of blocks that are kept. If a clock wanders by 1 %, 24 blocks give its mean to
# within 0.4 %, even with extrapolation while the card heats up. With fewer than _FEWEST_BLOCKS
# blocks, a point's mean clock comes from its own clocks.
_MOST_BLOCKS = 24
_FEWEST_BLOCKS = 4
# A point runs at another clock than the blocks if their means differ by more than _FAR standard
# deviations of single clocks, and by more than the fraction _FAR_SHARE.
_FAR = 3.0
_FAR_SHARE = 0.01
# Number of sections into which a point's clocks are divided. The scatter between the sections'
# means gives the error of the point's mean.
_PARTS = 3


@dataclass
class _Block:
    """SM clocks of a quarter of a second.

    begun_s: time when the first batch ended, in s.
    count: number of clocks.
    total_mhz: sum of the clocks.
    total_mhz2: sum of the squared clocks, in MHz².
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
    """SM clocks of the last seconds, from work that the power limit did not slow.

    `of` returns the mean clock of a point, and `scatter` the scatter of single clocks.
    """

    def __init__(self) -> None:
        self._blocks: deque[_Block] = deque(maxlen=_MOST_BLOCKS)
        self._scatter = 0.0  # last known scatter, used until there are enough blocks
        self._points_at_another_clock = 0  # number of successive points that ran at another clock

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
        """Adds a point that the power limit did not slow.

        A single point at another clock is ignored. After two such points in a row, the old blocks
        are dropped, because the device has changed its clock.

        own_mhz: clocks of the point's samples.
        batches: time when each batch of the point ended, in s, and the batch's clocks.
        """
        self._points_at_another_clock = (
            0 if self._near(own_mhz) else self._points_at_another_clock + 1
        )
        if self._points_at_another_clock == 1:
            return
        if self._points_at_another_clock:
            self._scatter = self.scatter
            self._blocks.clear()
            self._points_at_another_clock = 0
        for at_s, clocks_mhz in batches:
            self.add(at_s, clocks_mhz)

    @property
    def scatter(self) -> float:
        """Standard deviation of single clocks, relative to their mean."""
        if len(self._blocks) < _FEWEST_BLOCKS:
            return self._scatter
        count = sum(block.count for block in self._blocks)
        mean_mhz = sum(block.total_mhz for block in self._blocks) / count
        variance = sum(block.total_mhz2 for block in self._blocks) / count - mean_mhz**2
        return sqrt(max(0.0, variance)) / mean_mhz

    def of(self, at_s: float, own_mhz: Sequence[float], *, limited: bool) -> MeanClock:
        """Returns the mean clock of a point.

        at_s: time of the point, in s.
        own_mhz: clocks of the point's samples, in time order.
        limited: whether the power limit lowered the point's clock.
        """
        if limited or len(self._blocks) < _FEWEST_BLOCKS or not self._near(own_mhz):
            return self._of_point(own_mhz)
        return self._of_device(at_s)

    def _near(self, own_mhz: Sequence[float]) -> bool:
        """Returns whether a point's mean clock agrees with the blocks' mean (see _FAR).

        The result is True while there are too few blocks.
        """
        if len(self._blocks) < _FEWEST_BLOCKS:
            return True
        mean_mhz = float(np.mean([block.mean_mhz for block in self._blocks]))
        return abs(float(np.mean(own_mhz)) / mean_mhz - 1) <= max(_FAR * self.scatter, _FAR_SHARE)

    def _of_point(self, own_mhz: Sequence[float]) -> MeanClock:
        """Returns the mean of one point's own clocks.

        The half-width covers at least the scatter of single clocks. During a short point, all
        clocks may wander together, so their own scatter would be too small.
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
        """Returns the blocks' mean clock, extrapolated to a time along a straight line.

        The extrapolated change is multiplied by change² / (change² + its variance). A change that
        is mostly noise is thus mostly ignored.
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
    """Returns the two-sided quantile of Student's t distribution at the confidence CONFIDENCE.

    freedom: degrees of freedom.
    """
    from scipy import special

    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))
