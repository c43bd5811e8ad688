"""Compares latency models on measured tables, with the same train and test rows for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError
from quantbench.latency.gaussian_process import GaussianProcess
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.tables import GemmTable
from quantbench.workload.dtypes import DTYPES
from tools.accuracy.scoring import (
    Line,
    Split,
    cliff_pairs,
    compute_rows,
    coverage,
    held_out_sites,
    over_seeds,
    random_split,
    recall_and_precision,
    rises,
    summarize,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# With fewer measured cliffs, recall and precision are not reported.
_FEWEST_CLIFFS = 20
#: cost of fitting our model, relative to a cheap contestant
OUR_WEIGHT = 10.0


@dataclass(frozen=True)
class Contest:
    """Table of one device and the protocol (sites or random) that splits it into train and test
    rows.
    """

    device: DeviceSpec
    table: GemmTable
    protocol: str

    def split(self, train_rows: int | None, seed: int) -> Split:
        """Splits the table into train and test rows. train_rows: their number; None for all of the
        training half.
        """
        if self.protocol == "sites":
            return held_out_sites(self.table.n, self.table.k, train_rows, seed)
        rows = len(self.table) // 2 if train_rows is None else train_rows
        return random_split(len(self.table), rows, seed)

    def shapes(self, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        return self.table.m[rows], self.table.n[rows], self.table.k[rows]


@dataclass(frozen=True)
class Answer:
    """Predictions of one contestant for the test rows, (rows,) in µs; nan for rows without a
    prediction.

    low_us, high_us: 90 % interval, (rows,) µs; None if the contestant gives none.
    fit_s, predict_s: CPU seconds; None if not timed.
    """

    latency_us: FloatArray
    low_us: FloatArray | None = None
    high_us: FloatArray | None = None
    fit_s: float | None = None
    predict_s: float | None = None
    note: str = ""

    @property
    def shapes_per_s(self) -> float | None:
        """Predictions per CPU second; None if not timed."""
        return len(self.latency_us) / self.predict_s if self.predict_s else None

    def covers(self, measured_us: FloatArray) -> float | None:
        """Returns the share of the measurements inside the interval, None if it gives no
        interval.
        """
        if self.low_us is None or self.high_us is None:
            return None
        return coverage(measured_us, self.low_us, self.high_us)


@dataclass(frozen=True)
class Contestant:
    """Predictor in a comparison.

    train_rows: None for all of the training half, 0 for none.
    answer: function that predicts a split's test rows.
    weight: rough cost relative to a cheap contestant.
    """

    name: str
    train_rows: int | None
    answer: Callable[[Contest, Split, int], Answer]
    weight: float = 1.0

    def needed(self, seeds: Sequence[int]) -> Sequence[int]:
        """Returns the seeds to run: only the first if no row or all rows are fitted, since all give
        the same result.
        """
        return seeds[:1] if self.train_rows in (0, None) else seeds


@dataclass(frozen=True)
class Step:
    """Progress message before a step. done, total: summed weights of the finished steps and of all
    steps.
    """

    text: str
    done: float
    total: float


#: contests, each with its contestants
Plan = Sequence[tuple[Contest, Sequence[Contestant]]]


def run_contests(
    contests: Plan, seeds: Sequence[int], progress: Callable[[Step], None]
) -> Iterator[Line]:
    """Yields one line of metrics per contest and contestant, each as soon as it is done."""
    if not seeds:
        raise InputError("validate", "no seeds", "at least one")
    total = sum(c.weight * len(c.needed(seeds)) for _, contestants in contests for c in contestants)
    done = 0.0
    for contest, contestants in contests:
        for contestant in contestants:
            lines = []
            for seed in contestant.needed(seeds):
                what = f"{contest.device.name}, {contest.protocol}: {contestant.name}, seed {seed}"
                progress(Step(what, done, total))
                lines.append(_judge(contest, contestant, seed))
                done += contestant.weight
            yield over_seeds(lines)


def _judge(contest: Contest, contestant: Contestant, seed: int) -> Line:
    # A contestant without train rows gets the same test rows as the others.
    split = contest.split(1 if contestant.train_rows == 0 else contestant.train_rows, seed)
    answer = contestant.answer(contest, split, seed)
    measured = contest.table.latency_us[split.test]
    shapes = contest.shapes(split.test)
    answered = np.isfinite(answer.latency_us)
    if not answered.any():
        none = f"{contestant.name} answered none of {len(measured)} rows"
        raise InputError("validate", none, "at least one")
    large = compute_rows(*shapes) & answered
    found = Line(
        gpu=contest.device.name,
        protocol=contest.protocol,
        model=contestant.name,
        train_rows=len(split.train) if contestant.train_rows != 0 else None,
        seeds=1,
        errors=summarize(answer.latency_us, measured, answered),
        compute=summarize(answer.latency_us, measured, large) if large.any() else None,
        unanswered=float(1.0 - answered.mean()),
        coverage=answer.covers(measured),
        fit_s=answer.fit_s,
        shapes_per_s=answer.shapes_per_s,
        note=answer.note,
    )
    pairs = cliff_pairs(*shapes)
    cliffs = rises(measured, pairs)
    if cliffs.sum() >= _FEWEST_CLIFFS and answered.all():
        recall, precision = recall_and_precision(rises(answer.latency_us, pairs), cliffs)
        found = replace(found, cliff_recall=recall, cliff_precision=precision)
    return found


def fit(contest: Contest, rows: IntArray, seed: int, prior: Any) -> GemmModel:
    """Fits a GEMM model to rows of a contest. prior: of `GemmModel.fit`."""
    m, n, k = contest.shapes(rows)
    return GemmModel.fit(
        contest.device,
        m,
        n,
        k,
        contest.table.latency_us[rows],
        dtype=contest.table.dtype,
        library=contest.table.library,
        prior=prior,
        seed=seed,
    )


def answer_of(model: GemmModel, contest: Contest, rows: IntArray, *, fit_s: float) -> Answer:
    """Returns a GEMM model's predictions for rows of a contest. fit_s: CPU seconds that its fit
    took.
    """
    start = time.process_time()
    predicted = model.predict(*contest.shapes(rows))
    taken_s = time.process_time() - start
    return Answer(predicted.latency_us, predicted.low_us, predicted.high_us, fit_s, taken_s)


def fitted(name: str, train_rows: int, prior_of: Callable[[Contest], Any]) -> Contestant:
    """Returns our model as a contestant. prior_of: function from a contest to the fit's prior."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        start = time.process_time()
        model = fit(contest, split.train, seed, prior_of(contest))
        return answer_of(model, contest, split.test, fit_s=time.process_time() - start)

    return Contestant(name, train_rows, answer, weight=OUR_WEIGHT)


def ours(train_rows: int) -> Contestant:
    """Returns our model with the prior `family-out`: the shipped parameters have seen the table."""
    return fitted("ours", train_rows, lambda contest: "family-out")


def ideal_us(device: DeviceSpec, dtype: str, m: IntArray, n: IntArray, k: IntArray) -> FloatArray:
    """Returns the roofline time, (rows,) µs: the larger of FLOP over peak and bytes over bandwidth
    (spec sheet).
    """
    peak = device.peak(dtype)
    if peak is None:
        known = f"one of {', '.join(device.peak_tflops)}"
        raise UnsupportedError("roofline", f"{dtype} on {device.name}", known)
    kind = DTYPES[dtype]
    output_bytes = DTYPES[kind.output].element_bytes
    m, n, k = np.stack([m, n, k]).astype(float)
    compute_us = 2.0 * m * n * k / (peak * 1e6)
    moved_bytes = kind.a_bytes * m * k + kind.b_bytes * k * n + output_bytes * m * n
    return np.asarray(np.maximum(compute_us, moved_bytes / (device.memory_gb_per_s * 1e3)))


#: function of log m, n, k, (rows, 3), log efficiency, (rows,), and a seed to a predictor of log
#: efficiency
Learner = Callable[[FloatArray, FloatArray, int], Callable[[FloatArray], FloatArray]]


def baseline(name: str, train_rows: int, learn: Learner, weight: float = 1.0) -> Contestant:
    """Returns a contestant that learns log efficiency (roofline over measured time) and knows no
    tiles.
    """

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        dtype = contest.table.dtype
        start = time.process_time()
        known = contest.shapes(split.train)
        ideal = ideal_us(contest.device, dtype, *known)
        efficiency = ideal / contest.table.latency_us[split.train]
        predict = learn(np.log(np.column_stack(known).astype(float)), np.log(efficiency), seed)
        fitted = time.process_time()
        asked = contest.shapes(split.test)
        log_efficiency = predict(np.log(np.column_stack(asked).astype(float)))
        latency_us = ideal_us(contest.device, dtype, *asked) / np.exp(log_efficiency)
        return Answer(latency_us, fit_s=fitted - start, predict_s=time.process_time() - fitted)

    return Contestant(name, train_rows, answer, weight)


def _full_efficiency(
    at: FloatArray, log_efficiency: FloatArray, seed: int
) -> Callable[[FloatArray], FloatArray]:
    return lambda asked: np.zeros(len(asked))


def _interpolated(
    at: FloatArray, log_efficiency: FloatArray, seed: int
) -> Callable[[FloatArray], FloatArray]:
    """Interpolates linearly; outside the convex hull, takes the nearest row."""
    from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator

    inside = LinearNDInterpolator(at, log_efficiency)
    outside = NearestNDInterpolator(at, log_efficiency)

    def predict(asked: FloatArray) -> FloatArray:
        found = inside(asked)
        return np.asarray(np.where(np.isnan(found), outside(asked), found))

    return predict


def _gaussian_process(
    at: FloatArray, log_efficiency: FloatArray, seed: int
) -> Callable[[FloatArray], FloatArray]:
    learner = GaussianProcess.fit(at, log_efficiency, seed=seed)
    return lambda asked: learner.predict(asked)[0]


def roofline() -> Contestant:
    return baseline("spec-sheet roofline", 0, _full_efficiency)


def log_interpolation(train_rows: int) -> Contestant:
    return baseline("interpolation of log efficiency", train_rows, _interpolated)


def gaussian_process(train_rows: int) -> Contestant:
    return baseline("Gaussian process on log efficiency", train_rows, _gaussian_process, weight=3.0)


def baselines(rows: int) -> list[Contestant]:
    """Returns the three baselines."""
    return [roofline(), log_interpolation(rows), gaussian_process(rows)]
