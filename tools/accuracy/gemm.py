"""Defines the GEMM comparisons of docs/accuracy.md.

Entry points: `packaged_contests` (predictors on aiconfigurator's tables), `adaptive_contests` (train rows selected by
the model against random ones). Used by `tools.accuracy.page`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.contests import (
    OUR_WEIGHT,
    Answer,
    Contest,
    Contestant,
    Plan,
    answer_of,
    fit,
    gaussian_process,
    log_interpolation,
    ours,
    usual,
)
from quantbench.latency.gemm.cliffs import next_points
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.libraries import DEFAULT_TABLES, SYSTEMS, system_of
from quantbench.latency.scoring import Split
from tools.accuracy.aiconfigurator_engine import engine as ask_engine
from tools.accuracy.aiconfigurator_engine import engine_missing
from tools.accuracy.heuristics import heuristics as ask_heuristics
from tools.accuracy.heuristics import heuristics_missing
from tools.accuracy.tables import SHIPPED_GPUS, read_packaged

#: device → device with a similar table, which helps to predict it
SIBLINGS = {"h100-sxm5-80gb": "h200-sxm-141gb", "h200-sxm-141gb": "h100-sxm5-80gb"}
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


def packaged_contests(gpus: Sequence[str], rows: int, dtype: str) -> tuple[Plan, list[Absent]]:
    """Plans both protocols on each device's packaged table; returns also the contestants that cannot run."""
    plan: list[tuple[Contest, list[Contestant]]] = []
    absent: list[Absent] = []
    for gpu in gpus:
        if SYSTEMS.get(gpu) not in DEFAULT_TABLES:
            with_table = ", ".join(slug for slug, system in SYSTEMS.items() if system in DEFAULT_TABLES)
            raise InputError("validate", f"--gpu {gpu}", f"one of {with_table}; --table for a table of yours")
        table = read_packaged(gpu, dtype=dtype)
        device = lookup(gpu)
        sites, random = (Contest(device, table, protocol) for protocol in ("sites", "random"))
        others = [heuristics(sites), engine(sites, rows), engine(sites, None)]
        absent += [one for one in others if isinstance(one, Absent)]
        contestants = [*usual(rows)[:-1], *(one for one in others if isinstance(one, Contestant)), ours(rows)]
        contestants += [distilled(rows), ours(MANY_ROWS), ours(FEW_ROWS), few_shot(FEW_ROWS)]
        if gpu in SIBLINGS:
            sibling = read_packaged(SIBLINGS[gpu], dtype=dtype)
            contestants.append(ours(rows, name=f"ours, with the table of {SIBLINGS[gpu]}", sibling=sibling))
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
        found = ask_heuristics(contest.device.name, contest.table.dtype, *contest.shapes(split.test))
        return Answer(found.latency_us, predict_s=found.predict_s, note=f"nvidia-matmul-heuristics {found.version}")

    return Contestant(name, 0, answer, weight=3.0)


def engine(contest: Contest, train_rows: int | None) -> Contestant | Absent:
    """Returns aiconfigurator's engine as a contestant. train_rows: None for all of the training half."""
    name, system = "aiconfigurator's engine", system_of(contest.table.gpu)
    missing = engine_missing()
    if missing is None and system not in DEFAULT_TABLES:
        missing = f"aiconfigurator's engine knows no system {system}"
    if missing is None and contest.table.dtype != "bf16":
        missing = "aiconfigurator's engine was asked about bf16 only"
    if missing is not None:
        return Absent(contest.device.name, name, missing)

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        backend, version = DEFAULT_TABLES[system]
        m, n, k = contest.shapes(split.train)
        rows = {
            "m": m.tolist(), "n": n.tolist(), "k": k.tolist(),
            "latency_ms": (contest.table.latency_us[split.train] / 1e3).tolist(),
        }  # fmt: skip
        place = {"system": system, "backend": backend, "version": version}
        found = ask_engine(place, rows, *contest.shapes(split.test))
        note = f"aiconfigurator-core {found.version}"
        return Answer(found.latency_us, fit_s=found.load_s, predict_s=found.predict_s, note=note)

    return Contestant(name, train_rows, answer, weight=4.0)


def distilled(train_rows: int) -> Contestant:
    """Returns our distilled model as a contestant."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        start = time.process_time()
        fast = fit(contest, split.train, seed).compiled()
        fit_s = time.process_time() - start
        m, n, k = contest.shapes(split.test)
        start = time.process_time()
        latency_us = fast.predict_us(m, n, k)
        return Answer(latency_us, fit_s=fit_s, predict_s=time.process_time() - start)

    return Contestant("ours, distilled", train_rows, answer, weight=2 * OUR_WEIGHT)


def few_shot(train_rows: int) -> Contestant:
    """Returns our model with the shipped models of all other GPUs as prior, including the same architecture's."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        start = time.process_time()
        others = [GemmModel.best(slug) for slug in SHIPPED_GPUS if slug != contest.device.name]
        m, n, k = contest.shapes(split.train)
        model = GemmModel.fit(
            contest.device, m, n, k, contest.table.latency_us[split.train], dtype=contest.table.dtype, prior=others,
            seed=seed,
        )  # fmt: skip
        return answer_of(model, contest, split.test, fit_s=time.process_time() - start)

    return Contestant("ours, from the other GPUs' models", train_rows, answer, weight=OUR_WEIGHT)


#: default devices of `adaptive_contests`: one each of Ampere, Hopper and Blackwell
ADAPTIVE_GPUS = ("a100-sxm4-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
# Share of the rows for the first model; the rest is selected in rounds, each with a new model.
_FIRST_SHARE = 0.5
_ROUNDS = 2
# Random candidates in each round.
_MOST_CANDIDATES = 4000


def adaptive_contests(gpus: Sequence[str], rows: int, dtype: str) -> Plan:
    """Plans the comparison of random and model-selected train rows, on held-out sites with equal numbers of rows."""
    plan: list[tuple[Contest, list[Contestant]]] = []
    for gpu in gpus:
        contest = Contest(lookup(gpu), read_packaged(gpu, dtype=dtype), "sites")
        contestants = [
            ours(rows, name="chosen at random"),
            chosen_by_the_model(rows, edge_share=0.3),
            chosen_by_the_model(rows, edge_share=0.0),
        ]
        plan.append((contest, contestants))
    return plan


def chosen_by_the_model(train_rows: int, *, edge_share: float) -> Contestant:
    """Returns our model with rows from `next_points`. edge_share: share of the rows at suspected edges."""

    def answer(contest: Contest, split: Split, seed: int) -> Answer:
        start = time.process_time()
        pool = contest.split(None, seed).train
        first = max(1, round(_FIRST_SHARE * train_rows))
        taken = pool[:first]
        for done in range(_ROUNDS):
            model = fit(contest, taken, seed)
            left = np.setdiff1d(pool, taken)
            offered = np.random.default_rng((seed, done)).permutation(left)[:_MOST_CANDIDATES]
            wanted = round((train_rows - first) * (done + 1) / _ROUNDS) + first - len(taken)
            chosen = next_points(model, contest.shapes(offered), wanted, edge_share=edge_share, seed=seed)
            taken = np.concatenate([taken, offered[chosen]])
        model = fit(contest, taken, seed)
        return answer_of(model, contest, split.test, fit_s=time.process_time() - start)

    name = "chosen by the model, edges too" if edge_share else "chosen by the model, wide intervals"
    return Contestant(name, train_rows, answer, weight=30.0)
