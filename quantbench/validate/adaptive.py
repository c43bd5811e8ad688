"""Active sampling replayed on measured tables: the model chooses its rows, against rows chosen at random."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from quantbench.device import lookup
from quantbench.latency.active import next_points
from quantbench.latency.protocol import Split
from quantbench.latency.tables import read_table
from quantbench.validate.gemm_runner import Contest, Contestant, Plan
from quantbench.validate.ours import answer_of, fit, ours
from quantbench.validate.scores import Answer

#: devices that the comparison is made on when none is named: one of each architecture that shipped models know well
ADAPTIVE_GPUS = ("a100-sxm4-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
# A first model needs some rows; then a part of the rest is chosen with each model.
_FIRST_SHARE = 0.5
_ROUNDS = 2
# Candidates looked at in each round, drawn from all that may be measured.
_MOST_CANDIDATES = 4000


def adaptive_contests(gpus: Sequence[str], rows: int, dtype: str) -> Plan:
    """Random choice against the model's, on held-out sites, at the same number of rows."""
    plan: list[tuple[Contest, list[Contestant]]] = []
    for gpu in gpus:
        contest = Contest(lookup(gpu), read_table(gpu, dtype=dtype), "sites")
        contestants = [
            ours(rows, name="chosen at random"),
            chosen_by_the_model(rows, edge_share=0.3),
            chosen_by_the_model(rows, edge_share=0.0),
        ]
        plan.append((contest, contestants))
    return plan


def chosen_by_the_model(train_rows: int, *, edge_share: float) -> Contestant:
    """Ours, with rows that it asked for itself. edge_share: of the rows, for both sides of suspected edges."""

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
