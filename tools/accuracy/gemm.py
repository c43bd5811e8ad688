"""Defines the comparisons of GEMM predictors on aiconfigurator's tables for docs/accuracy.md."""

from __future__ import annotations

from collections.abc import Sequence

from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.libraries import DEFAULT_TABLES, system_of
from tools.accuracy.aiconfigurator_engine import engine as ask_engine
from tools.accuracy.contests import (
    Answer,
    Contest,
    Contestant,
    Plan,
    at_random,
    fitted,
    gaussian_process,
    log_interpolation,
    ours,
    roofline,
)
from tools.accuracy.tables import SHIPPED_GPUS, GemmTable, read_packaged

#: number of train rows of the larger fit
MANY_ROWS = 1000
#: number of train rows of the few-shot fits
FEW_ROWS = 50


def packaged_contests(gpus: Sequence[str], rows: int) -> Plan:
    """Plans the contests on each GPU's packaged bf16 table, with held-out sites and random rows.

    gpus: slugs of the GPUs.
    rows: number of train rows of most contestants.
    """
    plan: list[tuple[Contest, list[Contestant]]] = []
    for gpu in gpus:
        table = read_packaged(gpu)
        learned = [log_interpolation(rows), gaussian_process(rows)]
        others = [roofline(), *learned, engine(rows), engine(None)]
        own = [ours(rows), ours(MANY_ROWS), ours(FEW_ROWS), few_shot(FEW_ROWS)]
        plan.append((Contest(table), [*others, *own]))
        plan.append((Contest(table, "random", at_random), [own[0], *reversed(learned)]))
    return plan


def engine(train_rows: int | None) -> Contestant:
    """Returns aiconfigurator's engine as a contestant.

    train_rows: number of rows in the engine's table; None for all of the training half.
    """

    def answer(train: GemmTable, test: GemmTable, seed: int) -> Answer:
        system = system_of(train.gpu)
        return ask_engine((system, *DEFAULT_TABLES[system]), train, test)

    return Contestant("aiconfigurator's engine", train_rows, answer)


def few_shot(train_rows: int) -> Contestant:
    """Returns our model as a contestant whose prior is the shipped models of all other GPUs.

    Other GPUs of the same architecture are among them.
    """

    def others(train: GemmTable) -> list[GemmModel]:
        return [GemmModel.best(slug) for slug in SHIPPED_GPUS if slug != train.gpu]

    return fitted("ours, from the other GPUs' models", train_rows, others)
