"""GEMM models against each other: the same rows to learn from, the same rows to be judged on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.gemm.cliffs import LIKELY
from quantbench.latency.protocol import (
    CliffScore,
    Split,
    cliff_pairs,
    compute_rows,
    coverage,
    held_out_sites,
    random_split,
    score_cliffs,
    score_forecast,
    summarize,
)
from quantbench.latency.tables import GemmTable
from quantbench.validate.cliff_levels import CliffLevels, cliff_levels
from quantbench.validate.scores import Absent, Answer, Line, Score, line

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Fewer pairs across an edge than this say nothing about how well cliffs are forecast.
_FEWEST_CLIFFS = 20


@dataclass(frozen=True)
class Contest:
    """One device's table and one way of splitting it. protocol: sites or random."""

    device: DeviceSpec
    table: GemmTable
    protocol: str

    def split(self, train_rows: int | None, seed: int) -> Split:
        """The rows to learn from (None: all that may be) and those to be judged on."""
        if self.protocol == "sites":
            return held_out_sites(self.table.n, self.table.k, train_rows, seed)
        rows = len(self.table) // 2 if train_rows is None else train_rows
        return random_split(len(self.table), rows, seed)

    def shapes(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """(m, n, k) of some rows."""
        return self.table.m[rows], self.table.n[rows], self.table.k[rows]

    @cached_property
    def most_train_rows(self) -> int:
        """Rows that a split can hand out for learning at the most."""
        return len(self.split(None, 0).train) if self.protocol == "sites" else len(self.table) - 1


@dataclass(frozen=True)
class Contestant:
    """Someone who predicts. name: as the table shows it. train_rows: None for all rows of the training half, 0 for
    what learns from none. answer: predictions for a split's test rows. weight: how long it takes, roughly, in units
    of a cheap one. missing: why it cannot take part here, in words."""

    name: str
    train_rows: int | None
    answer: Callable[[Contest, Split, int], Answer]
    weight: float = 1.0
    missing: str | None = None


@dataclass(frozen=True)
class Step:
    """What is about to be done, for a progress line: weights done before it and of all steps."""

    text: str
    done: float
    total: float


#: contests, each with those who take part
Plan = Sequence[tuple[Contest, Sequence[Contestant]]]


def run_contests(
    contests: Plan,
    seeds: Sequence[int],
    progress: Callable[[Step], None],
) -> Iterator[Line | Absent]:
    """A line for each contestant of each contest, as they are done; those that cannot take part are said to be."""
    if not seeds:
        raise InputError("validate", "no seeds", "at least one")
    total = sum(c.weight * _times(c, seeds) for _, all_of_it in contests for c in all_of_it if c.missing is None)
    done = 0.0
    for contest, contestants in contests:
        gpu = contest.device.name
        for contestant in contestants:
            if contestant.missing is not None:
                yield Absent(gpu, contestant.name, contestant.missing)
                continue
            scores = []
            for seed in seeds[: _times(contestant, seeds)]:
                progress(Step(f"{gpu}, {contest.protocol}: {contestant.name}, seed {seed}", done, total))
                scores.append(_score(contest, contestant, seed))
                done += contestant.weight
            rows = None if contestant.train_rows == 0 else contestant.train_rows
            if contestant.train_rows is None:
                rows = len(contest.split(None, 0).train)
            yield line(gpu, contest.protocol, contestant.name, rows, scores)


def _times(contestant: Contestant, seeds: Sequence[int]) -> int:
    """What learns from none, or from all, gives every seed the same answer."""
    return 1 if contestant.train_rows in (0, None) else len(seeds)


def _score(contest: Contest, contestant: Contestant, seed: int) -> Score:
    # What learns from no row is judged on the rows that the others are judged on.
    train_rows = 1 if contestant.train_rows == 0 else contestant.train_rows
    split = contest.split(train_rows, seed)
    answer = contestant.answer(contest, split, seed)
    measured = contest.table.latency_us[split.test]
    m, n, k = contest.shapes(split.test)
    answered = np.isfinite(answer.latency_us)
    if not answered.any():
        raise InputError("validate", f"{contestant.name} answered none of {len(measured)} rows", "at least one")
    covered = None
    if answer.low_us is not None and answer.high_us is not None:
        covered = coverage(measured, answer.low_us, answer.high_us)
    large = compute_rows(m, n, k) & answered
    forecasts, levels = _forecasts(answer, measured, (m, n, k))
    return Score(
        errors=summarize(answer.latency_us, measured, answered),
        compute=summarize(answer.latency_us, measured, large) if large.any() else None,
        unanswered=float(1.0 - answered.mean()),
        coverage=covered,
        cliffs=_cliffs(answer.latency_us, measured, (m, n, k)) if answered.all() else None,
        forecasts=forecasts,
        levels=levels,
        fit_s=answer.fit_s,
        shapes_per_s=len(measured) / answer.predict_s if answer.predict_s else None,
        note=answer.note,
    )


def _cliffs(
    predicted_us: FloatArray, measured_us: FloatArray, shapes: tuple[IntArray, IntArray, IntArray]
) -> CliffScore | None:
    pairs = cliff_pairs(*shapes)
    if len(pairs[0]) == 0:
        return None
    score = score_cliffs(predicted_us, measured_us, pairs)
    return score if score.cliffs >= _FEWEST_CLIFFS else None


def _forecasts(
    answer: Answer, measured_us: FloatArray, shapes: tuple[IntArray, IntArray, IntArray]
) -> tuple[CliffScore | None, CliffLevels | None]:
    """By the model's own probabilities, where it has them: from LIKELY on, and from others."""
    pairs = low, _ = cliff_pairs(*shapes)
    if answer.cliff_probability is None or len(low) == 0:
        return None, None
    m, n, k = shapes
    probability = answer.cliff_probability(m[low], n[low], k[low])
    score = score_forecast(probability >= LIKELY, measured_us, pairs)
    if score.cliffs < _FEWEST_CLIFFS:
        return None, None
    return score, cliff_levels(probability, measured_us, pairs)
