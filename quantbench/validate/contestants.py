"""The baselines and foreign predictors of the GEMM contests, as contestants."""

from __future__ import annotations

import time
from collections.abc import Callable

from quantbench.latency.protocol import Split
from quantbench.latency.tables import DEFAULT_TABLES
from quantbench.validate import baselines, foreign
from quantbench.validate.gemm_runner import Contest, Contestant
from quantbench.validate.scores import Answer


def roofline() -> Contestant:
    """Spec-sheet roofline."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        predict = baselines.roofline(contest.device, contest.table.dtype)
        return _timed(contest, split, lambda: predict)

    return Contestant("spec-sheet roofline", 0, answer)


def log_interpolation(train_rows: int) -> Contestant:
    """Linear interpolation of log efficiency."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        rows = (*contest.shapes(split.train), contest.table.latency_us[split.train])
        return _timed(contest, split, lambda: baselines.log_interpolation(contest.device, contest.table.dtype, *rows))

    return Contestant("interpolation of log efficiency", train_rows, answer)


def gaussian_process(train_rows: int) -> Contestant:
    """Gaussian process on log efficiency."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        rows = (*contest.shapes(split.train), contest.table.latency_us[split.train])
        return _timed(
            contest, split, lambda: baselines.gaussian_process(contest.device, contest.table.dtype, *rows, seed=seed)
        )

    return Contestant("Gaussian process on log efficiency", train_rows, answer, weight=3.0)


def heuristics(contest: Contest) -> Contestant:
    """nvidia-matmul-heuristics, fitted to nothing."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        found = foreign.heuristics(contest.device.name, contest.table.dtype, *contest.shapes(split.test))
        return Answer(found.latency_us, predict_s=found.predict_s, note=f"nvidia-matmul-heuristics {found.version}")

    missing = foreign.heuristics_missing(contest.device.name, contest.table.dtype)
    return Contestant("nvidia-matmul-heuristics", 0, answer, weight=3.0, missing=missing)


def engine(contest: Contest, train_rows: int | None) -> Contestant:
    """aiconfigurator's own engine; train_rows None gives it every row that may be learned from."""
    system = contest.table.provenance.system

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        backend, version = DEFAULT_TABLES[system]
        m, n, k = contest.shapes(split.train)
        rows = {
            "m": m.tolist(), "n": n.tolist(), "k": k.tolist(),
            "latency_ms": (contest.table.latency_us[split.train] / 1e3).tolist(),
        }  # fmt: skip
        place = {"system": system, "backend": backend, "version": version}
        found = foreign.engine(place, rows, *contest.shapes(split.test))
        note = f"aiconfigurator-core {found.version}"
        return Answer(found.latency_us, fit_s=found.load_s, predict_s=found.predict_s, note=note)

    missing = foreign.engine_missing()
    if missing is None and system not in DEFAULT_TABLES:
        missing = f"aiconfigurator's engine knows no system {system}"
    if missing is None and contest.table.dtype != "bf16":
        missing = "aiconfigurator's engine was asked about bf16 only"
    return Contestant("aiconfigurator's engine", train_rows, answer, weight=4.0, missing=missing)


def _timed(contest: Contest, split: Split, fit: Callable[[], baselines.Predictor]) -> Answer:
    start = time.process_time()
    predict = fit()
    fitted = time.process_time()
    latency_us = predict(*contest.shapes(split.test))
    return Answer(latency_us, fit_s=fitted - start, predict_s=time.process_time() - fitted)
