"""Compares predictors of latency (contestants) on the same train and test rows of measured tables.

`run_contests` runs the comparisons. The module also defines the contestants: the latency models and
simple baselines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from quantbench.errors import InputError
from quantbench.latency.estimate import Estimates
from quantbench.latency.gaussian_process import GaussianProcess
from tools.accuracy.scoring import (
    FloatArray,
    IntArray,
    Line,
    Split,
    cliff_pairs,
    compute_rows,
    coverage,
    held_out,
    over_seeds,
    random_split,
    recall_and_precision,
    rises,
    summarize,
)
from tools.accuracy.tables import GemmTable

# With fewer measured cliffs, recall and precision are not reported.
_FEWEST_CLIFFS = 20


class Table(Protocol):
    """Measured rows of one GPU, in groups (such as those of one n and k) that can be held out."""

    @property
    def gpu(self) -> str: ...
    @property
    def latency_us(self) -> FloatArray: ...
    @property
    def groups(self) -> IntArray: ...
    @property
    def provenance(self) -> Mapping[str, Any]: ...
    def __len__(self) -> int: ...
    def take(self, rows: IntArray) -> Self: ...
    def fit(self, prior: Any, seed: int) -> Any: ...
    def prior(self) -> Any: ...
    def ask(self, model: Any) -> Estimates: ...


#: function that splits a table, from the table, the number of train rows (None: all of the training
#: half) and a seed
Splitter = Callable[[Any, int | None, int], Split]


def of_groups(table: Table, train_rows: int | None, seed: int) -> Split:
    """Splits a table so that half of the groups are the test."""
    return held_out(table.groups, train_rows, seed)


def at_random(table: Table, train_rows: int | None, seed: int) -> Split:
    """Splits a table into random train rows, and all other rows as the test.

    train_rows: number of train rows; None for half of the table.
    """
    rows = len(table) // 2 if train_rows is None else train_rows
    return random_split(len(table), rows, seed)


@dataclass(frozen=True)
class Contest:
    """Table on which predictors are compared, and how it is split into train and test rows.

    protocol: name of the split.
    """

    table: Table
    protocol: str = "sites"
    split: Splitter = of_groups


@dataclass(frozen=True)
class Answer:
    """Predictions of one contestant for the test rows.

    latency_us: (rows,) predicted times; nan for a row without a prediction.
    interval_us: (rows,) low and high ends of the 90 % intervals; None if the contestant gives none.
    fit_s, predict_s: CPU seconds of the fit and of the predictions; None if not timed.
    """

    latency_us: FloatArray
    interval_us: tuple[FloatArray, FloatArray] | None = None
    fit_s: float | None = None
    predict_s: float | None = None

    @property
    def shapes_per_s(self) -> float | None:
        """Predictions per CPU second; None if not timed."""
        return len(self.latency_us) / self.predict_s if self.predict_s else None


@dataclass(frozen=True)
class Contestant:
    """Predictor in a comparison.

    train_rows: number of rows that it is fitted to; None for all of the training half, 0 for none.
    answer: function from a table of train rows, a table of test rows and a seed to predictions for
        the test rows.
    """

    name: str
    train_rows: int | None
    answer: Callable[[Any, Any, int], Answer]


#: contests, each with its contestants
Plan = Sequence[tuple[Contest, Sequence[Contestant]]]


def run_contests(
    contests: Plan, seeds: Sequence[int], progress: Callable[[str], None]
) -> Iterator[Line]:
    """Runs contests; yields the scores of each contestant, averaged over the seeds.

    progress: function that is called with a text before each fit.
    Raises InputError without a seed, and for a contestant that predicts no row.
    """
    if not seeds:
        raise InputError("validate", "no seeds", "at least one")
    for contest, contestants in contests:
        for contestant in contestants:
            lines = []
            # Without drawn train rows, all seeds give the same result.
            for seed in seeds if contestant.train_rows else seeds[:1]:
                what = f"{contest.table.gpu}, {contest.protocol}: {contestant.name}"
                progress(f"{what}, {contestant.train_rows} rows, seed {seed}")
                lines.append(_judge(contest, contestant, seed))
            yield over_seeds(lines)


def _judge(contest: Contest, contestant: Contestant, seed: int) -> Line:
    # A contestant that needs no train rows gets one, so that its test rows are the same as those of
    # the others.
    unfitted = contestant.train_rows == 0
    split = contest.split(contest.table, 1 if unfitted else contestant.train_rows, seed)
    test = contest.table.take(split.test)
    answer = contestant.answer(contest.table.take(split.train), test, seed)
    answered = np.isfinite(answer.latency_us)
    if not answered.any():
        none = f"{contestant.name} answered none of {len(test)} rows"
        raise InputError("validate", none, "at least one")
    found = Line(
        gpu=test.gpu,
        protocol=contest.protocol,
        model=contestant.name,
        train_rows=None if unfitted else len(split.train),
        seeds=1,
        errors=summarize(answer.latency_us, test.latency_us, answered),
        unanswered=float(1.0 - answered.mean()),
        coverage=answer.interval_us and coverage(test.latency_us, *answer.interval_us),
        fit_s=answer.fit_s,
        shapes_per_s=answer.shapes_per_s,
    )
    return _with_shapes(found, test, answer) if isinstance(test, GemmTable) else found


def _with_shapes(found: Line, test: GemmTable, answer: Answer) -> Line:
    """Adds the errors on large GEMMs, and the recall and precision of cliffs, to scores."""
    answered = np.isfinite(answer.latency_us)
    large = compute_rows(*test.shapes) & answered
    if large.any():
        found = replace(found, compute=summarize(answer.latency_us, test.latency_us, large))
    pairs = cliff_pairs(*test.shapes)
    cliffs = rises(test.latency_us, pairs)
    if cliffs.sum() >= _FEWEST_CLIFFS and answered.all():
        recall, precision = recall_and_precision(rises(answer.latency_us, pairs), cliffs)
        found = replace(found, cliff_recall=recall, cliff_precision=precision)
    return found


def answer_of(model: Any, test: Table, fit_s: float | None = None) -> Answer:
    """Returns a model's predictions for the test rows.

    fit_s: CPU seconds that the fit took; None if nothing is timed.
    """
    start = time.process_time()
    found = test.ask(model)
    predict_s = None if fit_s is None else time.process_time() - start
    return Answer(found.latency_us, (found.low_us, found.high_us), fit_s, predict_s)


def fitted(name: str, train_rows: int | None, prior_of: Callable[[Any], Any]) -> Contestant:
    """Returns our model as a contestant.

    prior_of: function from the table of train rows to the prior of the fit.
    """

    def answer(train: Table, test: Table, seed: int) -> Answer:
        start = time.process_time()
        model = train.fit(prior_of(train), seed)
        return answer_of(model, test, time.process_time() - start)

    return Contestant(name, train_rows, answer)


def ours(train_rows: int | None) -> Contestant:
    """Returns our model as a contestant, with a prior from other GPU families only.

    The shipped parameters would be no fair prior, because they were fitted to the same table.
    """
    return fitted("ours", train_rows, lambda train: "family-out")


def unfitted() -> Contestant:
    """Returns our model before any fit, which knows other GPU generations only, as a contestant."""
    return Contestant("unfitted", 0, lambda train, test, seed: answer_of(test.prior(), test))


#: function from log sizes, (rows, sizes), to log efficiencies, (rows,)
Efficiency = Callable[[FloatArray], FloatArray]
#: function that learns efficiency from log sizes, log efficiencies and a seed
Learner = Callable[[FloatArray, FloatArray, int], Efficiency]


def baseline(name: str, train_rows: int, learn: Learner) -> Contestant:
    """Returns a contestant that learns the logarithm of efficiency, and knows nothing of tiles.

    Efficiency is the roofline time over the measured time.
    """

    def answer(train: Any, test: Any, seed: int) -> Answer:
        start = time.process_time()
        efficiency = train.ideal_us() / train.latency_us
        predict = learn(train.logs(), np.log(efficiency), seed)
        fitted = time.process_time()
        latency_us = test.ideal_us() / np.exp(predict(test.logs()))
        return Answer(latency_us, fit_s=fitted - start, predict_s=time.process_time() - fitted)

    return Contestant(name, train_rows, answer)


def _interpolated(at: FloatArray, log_efficiency: FloatArray, seed: int) -> Efficiency:
    """Learns by linear interpolation; outside the convex hull of the rows, by the nearest row."""
    from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator

    inside = LinearNDInterpolator(at, log_efficiency)
    outside = NearestNDInterpolator(at, log_efficiency)

    def predict(asked: FloatArray) -> FloatArray:
        found = inside(asked)
        return np.asarray(np.where(np.isnan(found), outside(asked), found))

    return predict


def _gaussian_process(at: FloatArray, log_efficiency: FloatArray, seed: int) -> Efficiency:
    learner = GaussianProcess.fit(at, log_efficiency, seed=seed)
    return lambda asked: learner.predict(asked)[0]


def roofline() -> Contestant:
    return baseline(
        "spec-sheet roofline", 0, lambda at, efficiency, seed: lambda asked: np.zeros(len(asked))
    )


def log_interpolation(train_rows: int) -> Contestant:
    return baseline("interpolation of log efficiency", train_rows, _interpolated)


def gaussian_process(train_rows: int) -> Contestant:
    return baseline("Gaussian process on log efficiency", train_rows, _gaussian_process)
