"""Compares padding decisions with the better of both shapes on measured tables, for docs/padding.md.

    python -m tools.accuracy.padding docs/padding.md [--rows 8000] [--seeds 0] [--rules-only]

Entry points: `main`; `pairs`, `measured_again` and `regret`, the comparison; `rules_table`. Used by `make docs` and
tests. Needs the extra `tables`.

A pair is a measured shape and the next larger measured size of one side, of at most twice the size: m one past another
measured m ("tokens"), n or k that is no multiple of 1024 ("widths"). The model is fitted to rows of one half of the
(n, k) and decides on pairs of the other half. `compare` of `advice.pad` decides, as in the command, without copies.

Sums are dominated by the largest products, so there is one regret over all pairs, and one over those of n and k up to
16384, the widths of models, without rows that no hardware explains.

The better of both is partly the luckier of both. What that alone costs is seen in two ways: pairs of 2 to 16 tokens
fill the same tiles, so only scatter tells them apart; and the same pairs were measured again, in the table of another
library that runs the same kernels, or of a GPU with the same SMs: whoever decides by those times loses "again".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quantbench.advice.pad import NOISE, Padding, compare
from quantbench.alignment_rules import RULES
from quantbench.device import lookup
from quantbench.device.spec import PEAK_MARGIN
from quantbench.latency.gemm.inputs import machine_of
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.gemm.training import TABLE_EFFORT
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.tables import GemmTable
from quantbench.units import percent
from quantbench.workload import Gemm
from tools.accuracy.contests import Contest, fit
from tools.accuracy.tables import read_packaged
from tools.guide.markers import fill, kept, table

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

#: device, library and dtype of the tables → device and library of a second measurement of their products, if any: both
#: libraries run torch's bf16 products; the two GPUs have the same architecture, and as many SMs
TABLES = {
    ("a100-sxm4-80gb", "sglang", "bf16"): None,
    ("h100-sxm5-80gb", "vllm", "bf16"): ("h100-sxm5-80gb", "trtllm"),
    ("h100-sxm5-80gb", "vllm", "fp8"): ("h200-sxm-141gb", "vllm"),
    ("h100-sxm5-80gb", "trtllm", "fp8"): ("h200-sxm-141gb", "trtllm"),
    ("h100-sxm5-80gb", "trtllm", "fp8_block"): ("h200-sxm-141gb", "trtllm"),
    ("h200-sxm-141gb", "sglang", "fp8_block"): ("h100-sxm5-80gb", "sglang"),
    ("l40s-48gb", "vllm", "fp8"): None,
    ("b200-sxm-180gb", "vllm", "nvfp4"): ("b300-sxm-270gb", "vllm"),
    ("b200-sxm-180gb", "vllm", "fp8"): ("b300-sxm-270gb", "vllm"),
}
#: sides larger than this are rare in models
USUAL = 16384
#: sets of pairs
SETS = ("2 to 16 tokens", "tokens", "widths", "both", "all sizes")
_ROUND = 1024
# Regret that is wanted at most.
_SMALL = 0.005
# As many tokens fill one tile of any kernel.
_ONE_TILE = 16
_FEW = 2000


@dataclass(frozen=True)
class Regret:
    """Losses against the better of both shapes, as shares.

    chosen, never, always: of the sums of times, if the decisions are followed, nothing is padded, all is.
    again, shipped: if the times of a second measurement decide, or those of the shipped model; nan without one.
    mean: of single pairs, if the decisions are followed.
    covered: share of the measured savings that lie within their 90 % interval.
    differs: median difference of a saving between both measurements; nan without a second one.
    """

    pairs: int
    chosen: float
    never: float
    always: float
    again: float
    shipped: float
    mean: float
    covered: float
    differs: float


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


def regret(
    table: GemmTable, both: IntArray, judged: Sequence[Padding], *, again: FloatArray | None, shipped: FloatArray | None
) -> Regret:
    """Compares decisions with the better of both.

    both: (pairs, 2) indices.
    judged: one padding per pair.
    again, shipped: (rows,) µs, other times of the table's rows by which to decide, None if there are none.
    """
    now, then = table.latency_us[both[:, 0]], table.latency_us[both[:, 1]]
    best, chosen = np.minimum(now, then), np.where([one.worth for one in judged], then, now)
    low, high = (np.array([getattr(one, end) for one in judged]) for end in ("low", "high"))
    covered = float(np.mean((low <= 1 - then / now) & (1 - then / now <= high)))

    def loss(us: FloatArray) -> float:
        return float(us.sum() / best.sum() - 1)

    def loss_by(us: FloatArray | None) -> float:
        if us is None:
            return float("nan")
        return loss(np.where(us[both[:, 1]] <= (1 - NOISE) * us[both[:, 0]], then, now))

    def saving(us: FloatArray) -> FloatArray:
        return np.asarray(1 - us[both[:, 1]] / us[both[:, 0]])

    differs = float("nan") if again is None else float(np.nanmedian(np.abs(saving(again) - (1 - then / now))))
    return Regret(
        len(both), loss(chosen), loss(now), loss(then), loss_by(again), loss_by(shipped),
        float((chosen / best - 1).mean()), covered, differs,
    )  # fmt: skip


def measured_again(table: GemmTable, other: GemmTable) -> FloatArray:
    """Returns the times of the table's shapes in another table, (rows,) µs; nan, by which nothing is padded, for shapes
    that it lacks."""
    # One integer per shape: sizes are below 2**21.
    found, wanted = ((one.m << 42) | (one.n << 21) | one.k for one in (other, table))
    order = np.argsort(found)
    place = order[np.minimum(np.searchsorted(found, wanted, sorter=order), len(found) - 1)]
    return np.where(found[place] == wanted, other.latency_us[place], np.nan)


def decide(times: ModelTimes, table: GemmTable, both: IntArray) -> list[Padding]:
    """Compares each pair as `advice.pad` does, without copies."""
    works = [
        [Gemm(int(table.m[i]), int(table.n[i]), int(table.k[i]), dtype=table.dtype) for i in column]
        for column in both.T
    ]
    estimates = times.estimates([*works[0], *works[1]])
    decisions = []
    for gemm, padded, now, then in zip(*works, estimates[: len(both)], estimates[len(both) :], strict=True):
        decisions.append(compare(gemm, padded, now, then, times, copied=False))
    return decisions


def _unexplained(contest: Contest, rows: IntArray) -> IntArray:
    """Returns the rows above the peak, and those that two larger products contradict: they take half the time."""
    m, n, k = contest.shapes(rows)
    latency_us = contest.table.latency_us[rows]
    peak = machine_of(contest.device, contest.table.dtype).flop_per_us
    found = 2.0 * m * n * k > PEAK_MARGIN * peak * latency_us
    for row in range(len(rows)):
        larger = (m >= m[row]) & (n >= n[row]) & (k >= k[row]) & (latency_us <= latency_us[row] / 2)
        found[row] |= (larger & ~found).sum() >= 2
    return np.asarray(rows[found])


def judge(gpu: str, library: str, dtype: str, rows: int, seed: int) -> dict[str, Regret]:
    """Returns the regrets of one table by set of pairs: those in SETS."""
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
    few = first & (found.m[whole[:, 0]] <= _ONE_TILE)
    masks = (few & usual, first & usual, ~first & usual, usual, np.ones(len(whole), dtype=bool))
    second, packaged = TABLES[gpu, library, dtype], shipped_model(gpu, dtype, library)
    again = measured_again(found, read_packaged(second[0], dtype=dtype, library=second[1])) if second else None
    shipped = packaged.predict(found.m, found.n, found.k).latency_us if packaged else None
    return {
        name: regret(found, whole[kept], [judged[i] for i in np.flatnonzero(kept)], again=again, shipped=shipped)
        for name, kept in zip(SETS, masks, strict=True)
    }


def _percent(share: float) -> str:
    return "–" if np.isnan(share) else f"{100 * share:.2f}"


def regret_table(rows: int, seeds: Sequence[int]) -> str:
    """Formats the regrets of all tables, means over seeds, in percent."""
    lines, small = [], 0
    for gpu, library, dtype in TABLES:
        found = [judge(gpu, library, dtype, rows, seed) for seed in seeds]
        for name in SETS:
            own = [one[name] for one in found]
            means = (
                float(np.mean([getattr(one, field) for one in own]))
                for field in ("chosen", "never", "always", "again", "differs", "shipped", "mean", "covered")
            )
            small += name == "both" and float(np.mean([one.chosen for one in own])) <= _SMALL
            where = f"{gpu} {library} {dtype}" if name == SETS[0] else ""
            lines.append([where, name, f"{own[0].pairs:,}", *map(_percent, means)])
            print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    head = [
        "table",
        "pairs of",
        "pairs",
        "chosen, %",
        "never pad",
        "always pad",
        "measured again",
        "differs by",
        "shipped model",
        "chosen, mean of pairs",
        "interval covers",
    ]
    text = table(head, lines)
    said = f"Fitted to {rows:,} rows of the other (n, k), {'seed' if len(seeds) == 1 else 'seeds'} "
    return (
        f"{text}\n{said}{', '.join(map(str, seeds))}. tokens, widths, both: n and k up to {USUAL}, without rows "
        "above the peak and rows that two larger products contradict, as they take half the time; all sizes: "
        "all rows, n and k up to 65536, where a few products of "
        f"milliseconds decide the sums. {small} of {len(TABLES)} tables lose at most {percent(_SMALL)} of both. "
        f"Measured again: {_second_measurements()}. `python -m tools.accuracy.padding` writes this.\n"
    )


def _second_measurements() -> str:
    """Names where each table's products were measured again."""
    pairs = (
        f"{gpu} {library} {dtype} by {second[1]} on {second[0]}"
        for (gpu, library, dtype), second in TABLES.items()
        if second
    )
    return "; ".join(pairs)


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
        words = f"{rule.effect} in {rule.whose}{limits}: {rule.claim}"
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
