"""Our own GEMM model as a contestant: knowing nothing of the target's architecture but the rows it is given."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import numpy.typing as npt

from quantbench.latency.gemm.cliffs import cliff_probability
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.protocol import Split
from quantbench.latency.tables import SHIPPED_GPUS, GemmTable
from quantbench.validate.gemm_runner import Contest, Contestant
from quantbench.validate.scores import Answer

IntArray = npt.NDArray[np.int64]

_WEIGHT = 10.0


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


def ours(train_rows: int, *, name: str = "ours") -> Contestant:
    """Ours, from `train_rows` rows."""
    return _contestant(name, train_rows)


def distilled(train_rows: int) -> Contestant:
    """Ours from `train_rows` rows, distilled for planners."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        start = time.process_time()
        fast = fit(contest, split.train, seed).compiled()
        fit_s = time.process_time() - start
        m, n, k = contest.shapes(split.test)
        start = time.process_time()
        latency_us = fast.predict_us(m, n, k)
        return Answer(latency_us, fit_s=fit_s, predict_s=time.process_time() - start)

    return Contestant("ours, distilled", train_rows, answer, weight=2 * _WEIGHT)


def with_sibling(train_rows: int, sibling: str, table: GemmTable) -> Contestant:
    """Ours, given the whole table of a relative beside the rows."""
    return _contestant(f"ours, with the table of {sibling}", train_rows, table)


def few_shot(train_rows: int) -> Contestant:
    """Ours, started from the shipped models of all other GPUs, relatives of the same architecture included."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        start = time.process_time()
        others = [GemmModel.best(slug) for slug in SHIPPED_GPUS if slug != contest.device.name]
        m, n, k = contest.shapes(split.train)
        model = GemmModel.fit(
            contest.device, m, n, k, contest.table.latency_us[split.train], dtype=contest.table.dtype, prior=others,
            seed=seed,
        )  # fmt: skip
        return answer_of(model, contest, split.test, fit_s=time.process_time() - start)

    return Contestant("ours, from the other GPUs' models", train_rows, answer, weight=_WEIGHT)


def _contestant(name: str, train_rows: int, sibling: GemmTable | None = None) -> Contestant:
    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        start = time.process_time()
        model = fit(contest, split.train, seed, sibling=sibling)
        return answer_of(model, contest, split.test, fit_s=time.process_time() - start)

    return Contestant(name, train_rows, answer, weight=_WEIGHT)
