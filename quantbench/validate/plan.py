"""Which contests `quantbench validate` runs: every packaged table, or one of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.tables import DEFAULT_TABLES, SYSTEMS, read_table
from quantbench.validate.contestants import engine, gaussian_process, heuristics, log_interpolation, roofline
from quantbench.validate.gemm_runner import Contest, Contestant, Plan
from quantbench.validate.ours import distilled, few_shot, ours, with_sibling

#: devices whose tables resemble each other closely enough for one to help predict the other
SIBLINGS = {"h100-sxm5-80gb": "h200-sxm-141gb", "h200-sxm-141gb": "h100-sxm5-80gb"}
#: rows of the second, larger fit
MANY_ROWS = 1000
#: rows of a device in few-shot transfer
FEW_ROWS = 50


def packaged_contests(gpus: Sequence[str], rows: int, dtype: str) -> Plan:
    """Held-out sites and the random split on each device's packaged table."""
    plan: list[tuple[Contest, list[Contestant]]] = []
    for gpu in gpus:
        if SYSTEMS.get(gpu) not in DEFAULT_TABLES:
            with_table = ", ".join(slug for slug, system in SYSTEMS.items() if system in DEFAULT_TABLES)
            raise InputError("validate", f"--gpu {gpu}", f"one of {with_table}; --table for a table of yours")
        table = read_table(gpu, dtype=dtype)
        device = lookup(gpu)
        sites, random = (Contest(device, table, protocol) for protocol in ("sites", "random"))
        contestants = _usual(sites, rows)
        contestants += [distilled(rows), ours(MANY_ROWS), ours(FEW_ROWS), few_shot(FEW_ROWS)]
        if gpu in SIBLINGS:
            contestants.append(with_sibling(rows, SIBLINGS[gpu], read_table(SIBLINGS[gpu], dtype=dtype)))
        plan.append((sites, contestants))
        plan.append((random, [ours(rows), gaussian_process(rows), log_interpolation(rows)]))
    return plan


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
        plan.append((contest, _usual(contest, rows)))
    return plan


def _usual(contest: Contest, rows: int) -> list[Contestant]:
    return [
        roofline(), heuristics(contest), log_interpolation(rows), gaussian_process(rows), engine(contest, rows),
        engine(contest, None), ours(rows),
    ]  # fmt: skip
