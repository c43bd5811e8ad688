"""Defines the GEMM comparisons of docs/accuracy.md: predictors on aiconfigurator's tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantbench.device import lookup
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.libraries import DEFAULT_TABLES, system_of
from tools.accuracy.aiconfigurator_engine import engine as ask_engine
from tools.accuracy.aiconfigurator_engine import engine_missing
from tools.accuracy.contests import (
    OUR_WEIGHT,
    Answer,
    Contest,
    Contestant,
    Plan,
    answer_of,
    baselines,
    gaussian_process,
    log_interpolation,
    ours,
)
from tools.accuracy.heuristics import heuristics as ask_heuristics
from tools.accuracy.heuristics import heuristics_missing
from tools.accuracy.scoring import Split
from tools.accuracy.tables import SHIPPED_GPUS, read_packaged

#: train rows of the larger fit
MANY_ROWS = 1000
#: train rows of few-shot transfer
FEW_ROWS = 50


@dataclass(frozen=True)
class Absent:
    """Contestant that cannot run, and the reason."""

    gpu: str
    model: str
    reason: str


def packaged_contests(gpus: Sequence[str], rows: int) -> tuple[Plan, list[Absent]]:
    """Plans both protocols on each device's packaged bf16 table; returns also the contestants that
    cannot run.
    """
    plan: list[tuple[Contest, list[Contestant]]] = []
    absent: list[Absent] = []
    for gpu in gpus:
        sites = Contest(lookup(gpu), read_packaged(gpu), "sites")
        random = replace(sites, protocol="random")
        contestants = baselines(rows)
        for one in (heuristics(sites), engine(sites, rows), engine(sites, None)):
            if isinstance(one, Absent):
                absent.append(one)
            else:
                contestants.append(one)
        contestants += [ours(rows), ours(MANY_ROWS), ours(FEW_ROWS), few_shot(FEW_ROWS)]
        plan.append((sites, contestants))
        plan.append((random, [ours(rows), gaussian_process(rows), log_interpolation(rows)]))
    return plan, absent


def heuristics(contest: Contest) -> Contestant | Absent:
    """Returns nvidia-matmul-heuristics as a contestant, without fitting."""
    name = "nvidia-matmul-heuristics"
    missing = heuristics_missing(contest.device.name, contest.table.dtype)
    if missing is not None:
        return Absent(contest.device.name, name, missing)

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        shapes = contest.shapes(split.test)
        found = ask_heuristics(contest.device.name, contest.table.dtype, *shapes)
        note = f"{name} {found.version}"
        return Answer(found.latency_us, predict_s=found.predict_s, note=note)

    return Contestant(name, 0, answer, weight=3.0)


def engine(contest: Contest, train_rows: int | None) -> Contestant | Absent:
    """Returns aiconfigurator's engine as a contestant. train_rows: None for all of the training
    half.
    """
    name = "aiconfigurator's engine"
    system = system_of(contest.table.gpu)
    missing = engine_missing()
    if missing is not None:
        return Absent(contest.device.name, name, missing)

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        backend, version = DEFAULT_TABLES[system]
        place = {"system": system, "backend": backend, "version": version}
        measured_us = contest.table.latency_us[split.train]
        asked = contest.shapes(split.test)
        found = ask_engine(place, *contest.shapes(split.train), measured_us, asked)
        note = f"aiconfigurator-core {found.version}"
        return Answer(found.latency_us, fit_s=found.load_s, predict_s=found.predict_s, note=note)

    return Contestant(name, train_rows, answer, weight=4.0)


def few_shot(train_rows: int) -> Contestant:
    """Returns our model with the shipped models of all other GPUs as prior, including the same
    architecture's.
    """

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        start = time.process_time()
        others = [GemmModel.best(slug) for slug in SHIPPED_GPUS if slug != contest.device.name]
        m, n, k = contest.shapes(split.train)
        model = GemmModel.fit(
            contest.device,
            m,
            n,
            k,
            contest.table.latency_us[split.train],
            dtype=contest.table.dtype,
            prior=others,
            seed=seed,
        )
        return answer_of(model, contest, split.test, fit_s=time.process_time() - start)

    return Contestant("ours, from the other GPUs' models", train_rows, answer, weight=OUR_WEIGHT)
