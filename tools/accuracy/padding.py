"""Compares padding decisions with the better of both shapes on measured tables, for docs/padding.md.

    python -m tools.accuracy.padding docs/padding.md [--rows 8000] [--seeds 0] [--rules-only]

Entry points: `main`; `pairs` and `regret`, the comparison; `rules_table`. Used by `make docs` and tests. Needs the
extra `tables`.

A pair is a measured shape and the next larger measured size of one side, of at most twice the size: m one past another
measured m ("tokens"), n or k that is no multiple of 1024 ("widths"). The model is fitted to rows of one half of the
(n, k) and decides on pairs of the other half. `compare` of `advice.pad` decides, as in the command, without copies.

Sums are dominated by the largest products, so there is one regret over all pairs, and one over those of n and k up to
16384, the widths of models, without rows that no hardware explains; the median is that of each pair's own loss.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantbench.advice.pad import Change, Padding, compare
from quantbench.alignment_rules import RULES
from quantbench.device import lookup
from quantbench.latency.contests import Contest, fit
from quantbench.latency.gemm.inputs import machine_of
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.public import TABLE_EFFORT
from quantbench.latency.gemm.table_audit import audit
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.tables import GemmTable
from quantbench.workload import Gemm
from tools.accuracy.tables import read_packaged
from tools.guide.markers import fill, kept, table

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

#: device, library and dtype of the tables
TABLES = (
    ("a100-sxm4-80gb", "sglang", "bf16"),
    ("h100-sxm5-80gb", "vllm", "bf16"),
    ("h100-sxm5-80gb", "vllm", "fp8"),
    ("h100-sxm5-80gb", "trtllm", "fp8"),
    ("h100-sxm5-80gb", "trtllm", "fp8_block"),
    ("h200-sxm-141gb", "sglang", "fp8_block"),
    ("l40s-48gb", "vllm", "fp8"),
    ("b200-sxm-180gb", "vllm", "nvfp4"),
    ("b200-sxm-180gb", "vllm", "fp8"),
)
#: sides larger than this are rare in models
USUAL = 16384
_ROUND = 1024
_FEW = 2000


@dataclass(frozen=True)
class Regret:
    """Losses against the better of both shapes, as shares.

    chosen, never, always: of the sums of times, if the decisions are followed, nothing is padded, all is.
    median, mean: of single pairs, if the decisions are followed.
    covered: share of the measured savings that lie within their 90 % interval.
    """

    pairs: int
    chosen: float
    never: float
    always: float
    median: float
    mean: float
    covered: float


def pairs(table: GemmTable, rows: IntArray, side: str) -> IntArray:
    """Returns indices, (pairs, 2), of a shape and the same with the next larger measured size of `side`.

    rows: indices of the rows to use.
    side: m, one past another measured m; n or k, no multiple of 1024.
    """
    sizes = {name: getattr(table, name) for name in "mnk"}
    known = np.unique(sizes[side])
    at = {tuple(int(sizes[name][i]) for name in "mnk"): int(i) for i in rows}
    found = []
    for shape, i in at.items():
        size = int(sizes[side][i])
        after = known[known > size]
        past = np.isin(size - 1, known) if side == "m" else size % _ROUND != 0
        if past and len(after) and after[0] <= 2 * size and size > 1:
            other = tuple(int(after[0]) if name == side else value for name, value in zip("mnk", shape, strict=True))
            if other in at:
                found.append((i, at[other]))
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def regret(table: GemmTable, both: IntArray, judged: Sequence[Padding]) -> Regret:
    """Compares decisions with the better of both. both: (pairs, 2) indices. judged: one padding per pair."""
    now, then = table.latency_us[both[:, 0]], table.latency_us[both[:, 1]]
    best, chosen = np.minimum(now, then), np.where([one.worth for one in judged], then, now)
    low, high = (np.array([getattr(one, end) for one in judged]) for end in ("low", "high"))
    covered = float(np.mean((low <= 1 - then / now) & (1 - then / now <= high)))

    def loss(us: FloatArray) -> float:
        return float(us.sum() / best.sum() - 1)

    each = chosen / best - 1
    return Regret(
        len(both), loss(chosen), loss(now), loss(then), float(np.median(each)), float(each.mean()), covered,
    )  # fmt: skip


def decide(times: ModelTimes, table: GemmTable, both: IntArray) -> list[Padding]:
    """Compares each pair as `advice.pad` does, without copies."""
    works = [
        [Gemm(int(table.m[i]), int(table.n[i]), int(table.k[i]), dtype=table.dtype) for i in column]
        for column in both.T
    ]
    estimates = times.estimates([*works[0], *works[1]])
    decisions = []
    for gemm, padded, now, then in zip(*works, estimates[: len(both)], estimates[len(both) :], strict=True):
        change = Change("m", gemm.m, padded.m, at_run_time=False)
        found = compare((change,), {gemm: (1.0, now)}, {padded: (1.0, then)}, now, then, [], 0, times)
        decisions.append(found)
    return decisions


def _unexplained(contest: Contest, rows: IntArray) -> IntArray:
    """Returns the rows that no hardware explains, as `quantbench check --audit` finds them."""
    sizes = [x.astype(float) for x in (*contest.shapes(rows), np.ones(len(rows)))]
    peak = machine_of(contest.device, contest.table.dtype).flop_per_us
    found = audit(sizes, contest.table.latency_us[rows], peak, group=np.zeros(len(rows), dtype=np.intp))
    return np.asarray(rows[[one.row for one in found]])


def judge(gpu: str, library: str, dtype: str, rows: int, seed: int) -> dict[str, Regret]:
    """Returns the regrets of one table by set of pairs: tokens, widths, both, and both up to USUAL."""
    found = read_packaged(gpu, dtype=dtype, library=library)
    contest = Contest(lookup(gpu), found, "sites")
    split = contest.split(rows, seed)
    if rows <= _FEW:
        model = fit(contest, split.train, seed)
    else:  # as tools.ship_gemm fits the models of the package
        m, n, k = contest.shapes(split.train)
        model = GemmModel.fit(
            contest.device, m, n, k, found.latency_us[split.train], dtype=dtype, prior="none", seed=seed,
            effort=TABLE_EFFORT,
        )  # fmt: skip
    times = ModelTimes(contest.device, gemm=lambda _: (model, ""))
    tokens = pairs(found, split.test, "m")
    widths = np.concatenate([pairs(found, split.test, "n"), pairs(found, split.test, "k")])
    whole = np.concatenate([tokens, widths])
    judged = decide(times, found, whole)
    usual = (found.n[whole[:, 1]] <= USUAL) & (found.k[whole[:, 1]] <= USUAL)
    usual &= ~np.isin(whole, _unexplained(contest, split.test)).any(axis=1)
    first = np.arange(len(whole)) < len(tokens)
    sets = {
        "tokens": first & usual, "widths": ~first & usual, "both": usual, "all sizes": np.ones(len(whole), dtype=bool),
    }  # fmt: skip
    return {name: regret(found, whole[kept], [judged[i] for i in np.flatnonzero(kept)]) for name, kept in sets.items()}


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def regret_table(rows: int, seeds: Sequence[int]) -> str:
    """Formats the regrets of all tables, means over seeds, in percent."""
    lines = []
    for gpu, library, dtype in TABLES:
        found = [judge(gpu, library, dtype, rows, seed) for seed in seeds]
        for name in ("tokens", "widths", "both", "all sizes"):
            own = [one[name] for one in found]
            means = (
                float(np.mean([getattr(one, field) for one in own]))
                for field in ("chosen", "never", "always", "mean", "median", "covered")
            )
            where = f"{gpu} {library} {dtype}" if name == "tokens" else ""
            lines.append([where, name, f"{own[0].pairs:,}", *map(_percent, means)])
            print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    head = [
        "table",
        "pairs of",
        "pairs",
        "chosen, %",
        "never pad",
        "always pad",
        "chosen, mean of pairs",
        "median",
        "interval covers",
    ]
    text = table(head, lines)
    said = f"Fitted to {rows:,} rows of the other (n, k), {'seed' if len(seeds) == 1 else 'seeds'} "
    return (
        f"{text}\n{said}{', '.join(map(str, seeds))}. tokens, widths, both: n and k up to {USUAL}, without the rows "
        "that `quantbench check --audit` finds; all sizes: all rows, n and k up to 65536, where a few products of "
        "milliseconds decide the sums. `python -m tools.accuracy.padding` writes this.\n"
    )


def rules_table() -> str:
    """Formats the rules on divisibility."""
    lines = []
    for rule in RULES:
        multiple = rule.multiple if isinstance(rule.multiple, int) else ", ".join(map(str, rule.multiple))
        unit = " bytes" if "rows" in rule.sides else ""
        when = [f"tp ≥ {rule.min_tp}"] * (rule.min_tp > 1) + ["training"] * rule.training
        sources = " ".join(f"[{number}]({url})" for number, url in enumerate(rule.sources, 1))
        dtypes = "all" if len(rule.dtypes) > 3 else ", ".join(rule.dtypes)
        limits = f" ({', '.join(when)})" if when else ""
        words = f"{rule.effect} in {rule.whose}{limits}: {rule.why}"
        lines.append([dtypes, ", ".join(rule.sides), f"{multiple}{unit}", words, sources])
    return table(["format", "side", "multiple of", "else", "sources"], lines, numeric=False)


def main() -> None:
    """Fills the tables of the page; minutes per table of measurements on one core."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="docs/padding.md")
    parser.add_argument("--rows", type=int, default=8000, help="train rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rules-only", action="store_true", help="keep the table of regrets")
    asked = parser.parse_args()
    text = asked.page.read_text(encoding="utf-8")
    regrets = kept(text, "regret") if asked.rules_only else regret_table(asked.rows, asked.seeds)
    asked.page.write_text(fill(text, {"rules": rules_table(), "regret": regrets}), encoding="utf-8")


if __name__ == "__main__":
    main()
