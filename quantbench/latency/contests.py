"""Latency models compared on one table: the same rows to learn from, the same rows to be judged on.

A `Contest` is a device's table and a way of splitting it, a `Contestant` someone who predicts: ours, the spec sheet's
roofline, and two interpolations that know nothing of tiles. Efficiency is the roofline over the measured time; both
interpolations work on its logarithm over log (m, n, k). Entry points: `table_contests`, `run_contests`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError
from quantbench.latency.gaussian_process import GaussianProcess
from quantbench.latency.gemm.cliffs import LIKELY, cliff_probability
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.scoring import (
    Absent,
    Answer,
    CliffLevels,
    CliffScore,
    Line,
    Score,
    Split,
    cliff_levels,
    cliff_pairs,
    compute_rows,
    coverage,
    held_out_sites,
    line,
    random_split,
    score_cliffs,
    score_forecast,
    summarize,
)
from quantbench.latency.tables import GemmTable, read_table
from quantbench.workload.dtypes import DTYPES

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
#: (m, n, k), each (rows,), to microseconds
Predictor = Callable[[IntArray, IntArray, IntArray], FloatArray]


def roofline_predictor(device: DeviceSpec, dtype: str) -> Predictor:
    """The larger of FLOPs over the peak and bytes over the bandwidth, both as the spec sheet states them."""
    peak = device.peak(dtype)
    if peak is None:
        raise UnsupportedError("roofline", f"{dtype} on {device.name}", "one of " + ", ".join(device.peak_tflops))
    width, output = DTYPES[dtype].element_bytes, DTYPES[DTYPES[dtype].output].element_bytes

    def predict(m: IntArray, n: IntArray, k: IntArray) -> FloatArray:
        a, b, c = m.astype(float), n.astype(float), k.astype(float)
        compute_us = 2.0 * a * b * c / (peak * 1e6)
        memory_us = (width * (a * c + c * b) + output * a * b) / (device.memory_gb_per_s * 1e3)
        return np.asarray(np.maximum(compute_us, memory_us))

    return predict


def log_interpolation_predictor(
    device: DeviceSpec, dtype: str, m: IntArray, n: IntArray, k: IntArray, latency_us: FloatArray
) -> Predictor:
    """Linear interpolation of the logarithm of efficiency between the rows; outside of them the nearest row's."""
    from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator

    ideal = roofline_predictor(device, dtype)
    points, values = _logs(m, n, k), np.log(ideal(m, n, k) / latency_us)
    inside, outside = LinearNDInterpolator(points, values), NearestNDInterpolator(points, values)

    def predict(m: IntArray, n: IntArray, k: IntArray) -> FloatArray:
        where = _logs(m, n, k)
        found = inside(where)
        return np.asarray(ideal(m, n, k) / np.exp(np.where(np.isnan(found), outside(where), found)))

    return predict


def gaussian_process_predictor(
    device: DeviceSpec, dtype: str, m: IntArray, n: IntArray, k: IntArray, latency_us: FloatArray, *, seed: int = 0
) -> Predictor:
    """A Gaussian process on the logarithm of efficiency."""
    ideal = roofline_predictor(device, dtype)
    learner = GaussianProcess.fit(_logs(m, n, k), np.log(ideal(m, n, k) / latency_us), seed=seed)

    def predict(m: IntArray, n: IntArray, k: IntArray) -> FloatArray:
        return np.asarray(ideal(m, n, k) / np.exp(learner.predict(_logs(m, n, k))[0]))

    return predict


def _logs(m: IntArray, n: IntArray, k: IntArray) -> FloatArray:
    return np.asarray(np.log(np.column_stack([m, n, k]).astype(float)))


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


#: how long a fit takes, in units of a cheap contestant
OUR_WEIGHT = 10.0


def fit(contest: Contest, rows: IntArray, seed: int, *, sibling: GemmTable | None = None) -> GemmModel:
    """A model from some rows of a contest's table; `family-out`, for everything else would be a leak."""
    m, n, k = contest.shapes(rows)
    return GemmModel.fit(
        contest.device, m, n, k, contest.table.latency_us[rows], dtype=contest.table.dtype, prior="family-out",
        seed=seed, sibling=sibling,
    )  # fmt: skip


def answer_of(model: GemmModel, contest: Contest, rows: IntArray, *, fit_s: float) -> Answer:
    """What a model says of some rows' shapes."""
    start = time.process_time()
    predicted = model.predict(*contest.shapes(rows))
    taken_s = time.process_time() - start
    return Answer(
        predicted.latency_us, predicted.low_us, predicted.high_us, fit_s, taken_s,
        cliff_probability=partial(cliff_probability, model),
    )  # fmt: skip


def ours(train_rows: int, *, name: str = "ours", sibling: GemmTable | None = None) -> Contestant:
    """Ours, from `train_rows` rows. sibling: the whole table of a relative, given beside the rows."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        start = time.process_time()
        model = fit(contest, split.train, seed, sibling=sibling)
        return answer_of(model, contest, split.test, fit_s=time.process_time() - start)

    return Contestant(name, train_rows, answer, weight=OUR_WEIGHT)


def roofline() -> Contestant:
    """Spec-sheet roofline."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        predict = roofline_predictor(contest.device, contest.table.dtype)
        return _timed(contest, split, lambda: predict)

    return Contestant("spec-sheet roofline", 0, answer)


def log_interpolation(train_rows: int) -> Contestant:
    """Linear interpolation of log efficiency."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        rows = (*contest.shapes(split.train), contest.table.latency_us[split.train])
        return _timed(contest, split, lambda: log_interpolation_predictor(contest.device, contest.table.dtype, *rows))

    return Contestant("interpolation of log efficiency", train_rows, answer)


def gaussian_process(train_rows: int) -> Contestant:
    """Gaussian process on log efficiency."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        rows = (*contest.shapes(split.train), contest.table.latency_us[split.train])
        return _timed(
            contest, split, lambda: gaussian_process_predictor(contest.device, contest.table.dtype, *rows, seed=seed)
        )

    return Contestant("Gaussian process on log efficiency", train_rows, answer, weight=3.0)


def _timed(contest: Contest, split: Split, fit: Callable[[], Predictor]) -> Answer:
    start = time.process_time()
    predict = fit()
    fitted = time.process_time()
    latency_us = predict(*contest.shapes(split.test))
    return Answer(latency_us, fit_s=fitted - start, predict_s=time.process_time() - fitted)


def table_contests(path: Path, gpu: str, rows: int, dtype: str) -> Plan:
    """Both protocols on a table of the user's, measured on `gpu`."""
    device = lookup(gpu)
    table = read_table(gpu, path=path, dtype=dtype)
    plan: list[tuple[Contest, list[Contestant]]] = []
    for protocol in ("sites", "random"):
        contest = Contest(device, table, protocol)
        if rows > contest.most_train_rows:
            raise InputError(
                "validate", f"--rows {rows} of {path.name}", f"at most {contest.most_train_rows} for {protocol}"
            )
        plan.append((contest, usual(rows)))
    return plan


def usual(rows: int) -> list[Contestant]:
    """The baselines, and ours last."""
    return [roofline(), log_interpolation(rows), gaussian_process(rows), ours(rows)]
