"""Fills docs/experts.md and draws its figures: rules on experts judged on public tables of whole layers.

Entry points: `write_page`, or `python -m tools.guide.experts [docs]`; `GPUS`. Run by `make docs`.

Layers are of TensorRT-LLM in bf16, as in the tables of aiconfigurator; those of vLLM and SGLang may have masked rows.
What no table has is predicted by the shipped models and labelled so.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from quantbench.analysis.experts import BALANCED, SPREAD, Choice, matched
from quantbench.latency.moe import MoEModel
from quantbench.report.canvas import figure
from quantbench.workload import MoE
from tools.accuracy.moe import MoETable, read_moe
from tools.guide.figures import COLOURS
from tools.guide.markers import fill, table
from tools.guide.rules import effect_of, words

PAGE = "experts.md"
#: slugs of the GPUs by name
GPUS = {"A100": "a100-sxm4-80gb", "H100": "h100-sxm5-80gb", "H200": "h200-sxm-141gb", "B200": "b200-sxm-180gb"}
_LIBRARY, _DTYPE = "trtllm", "bf16"
_LIBRARIES = ("trtllm", "vllm", "sglang")
# Layers with so many tokens are bound by arithmetic on one GPU as on eight.
_MANY_TOKENS = 8192
# Layers with fewer rows per expert read weights and compute little.
_LEAST_ROWS, _FEW_TOKENS = 32, 1024
# Neighbours on a curve are at most this factor apart.
_NEAR = 2.0
_SIZE_IN = (9.0, 3.6)
# Pairs at equal active and total widths (experts, top_k, expert_ffn) for which the models are asked.
_SMALL, _LARGE = (256, 16, 512), (64, 4, 2048)
_WIDTHS = range(640, 4097, 128)
_HIDDEN, _TOKENS = (2048, 4096, 7168), (2048, 4096, 8192, 16384)

Judge = Callable[[MoETable, MoEModel], list[float]]


def _between(divisor: int, alike: int) -> Judge:
    """Builds a judge of rows per expert: the cost per row at others over that of the neighbouring multiples."""

    def judge(of: MoETable, _: MoEModel) -> list[float]:
        curves: dict[MoE, dict[float, float]] = defaultdict(dict)
        for work, us in zip(of.works, of.latency_us, strict=True):
            if work.distribution == "balanced" and work.rows_per_expert >= _LEAST_ROWS:
                curves[replace(work, tokens=1)][work.rows_per_expert] = float(us)
        ratios = []
        for curve in curves.values():
            sizes = sorted(curve)
            for below, size, above in zip(sizes, sizes[1:], sizes[2:], strict=False):
                whole = below % divisor == above % divisor == 0 and size % divisor and size % alike == 0
                if whole and above / below <= _NEAR:
                    share = np.log(size / below) / np.log(above / below)
                    ends = [np.log(curve[x] / x) for x in (below, above)]
                    ratios.append(float(curve[size] / size / np.exp((1 - share) * ends[0] + share * ends[1])))
        return ratios

    return judge


def _chosen(choice: Choice, ep: int = 0) -> Judge:
    """Builds a judge of a choice between measured layers of many tokens. ep: GPUs that hold them; 0 for any number."""

    def judge(of: MoETable, _: MoEModel) -> list[float]:
        pairs = matched(of.works, choice)
        return [
            float(of.latency_us[bad] / of.latency_us[good])
            for good, bad in pairs
            if of.works[good].tokens >= _FEW_TOKENS and ep in (0, of.works[good].ep)
        ]

    return judge


def _widths(_: MoETable, model: MoEModel) -> list[float]:
    """Predicts the cost per column of widths half a tile past a multiple of 128 over that of its neighbours."""
    ratios = []
    for hidden in _HIDDEN:
        for width in _WIDTHS:
            sizes = (width, width + 64, width + 128)
            below, middle, above = model.predict([MoE(8192, hidden, x, 64, 8) for x in sizes]).latency_us / sizes
            ratios.append(float(middle / np.sqrt(below * above)))
    return ratios


def _sizes(_: MoETable, model: MoEModel) -> list[float]:
    """Predicts the time of many small experts over that of few large ones."""
    works = [
        [MoE(tokens, hidden, ffn, experts, top_k) for hidden in _HIDDEN for tokens in _TOKENS]
        for experts, top_k, ffn in (_SMALL, _LARGE)
    ]
    small, large = (model.predict(own).latency_us for own in works)
    return [float(ratio) for ratio in small / large]


_EVEN = Choice(SPREAD.alike, lambda work: SPREAD.order(work) if work.distribution == "balanced" else None)
_UNEVEN = Choice(SPREAD.alike, lambda work: SPREAD.order(work) if work.distribution == "power_law_1.2" else None)
_RULES: tuple[tuple[str, Judge, str], ...] = (
    ("tokens per expert % 64", _between(64, 1), "where refuted: choose tokens without it"),
    (
        "tokens per expert % 128, where 64 divides them",
        _between(128, 64),
        "where confirmed: choose tokens × top_k / experts on multiples of 128",
    ),
    ("expert_ffn / TP % 128 (predicted)", _widths, "where confirmed: keep it; elsewhere measure"),
    (
        f"EP rather than TP, as many GPUs, {_FEW_TOKENS} tokens or more, balanced",
        _chosen(_EVEN),
        "compare both with `quantbench advise`: communication is not in these times",
    ),
    (
        "EP rather than TP, the same with a power law of 1.2",
        _chosen(_UNEVEN),
        "with skew the busiest GPU of EP sets the pace; TP shares out every expert",
    ),
    ("balanced routing over 8 GPUs, not a power law of 1.2", _chosen(BALANCED, 8), "balance, or replicate hot experts"),
    (
        f"{_LARGE[0]} experts of {_LARGE[2]} rather than {_SMALL[0]} of {_SMALL[2]} (predicted)",
        _sizes,
        "small experts cost time; weigh it against their quality",
    ),
)


def write_page(docs: Path) -> list[Path]:
    """Fills docs/experts.md and draws its figures. Returns the written paths."""
    tables = {name: read_moe(slug, _LIBRARY)[_DTYPE] for name, slug in GPUS.items()}
    models = {name: MoEModel.best(slug, dtype=_DTYPE, library=_LIBRARY) for name, slug in GPUS.items()}
    rows = [
        [rule, *(words(effect_of(judge(tables[name], models[name]))) for name in GPUS), instead]
        for rule, judge, instead in _RULES
    ]
    sources = "; ".join(f"{one.package}: {one.file} ({one.version}), {one.rows:,} layers" for one in tables.values())
    page = docs / PAGE
    savings = [[name, *(_saved(read_moe(slug, name)[_DTYPE]) for slug in GPUS.values())] for name in _LIBRARIES]
    found = {
        "rules": table(["rule", *GPUS, "what to do"], rows, numeric=False), "sources": sources,
        "saved": table(["library", *GPUS], savings),
    }  # fmt: skip
    page.write_text(fill(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    caption = f"{_LIBRARY}, {_DTYPE} · layers measured by aiconfigurator"
    paths = [docs / "figures" / f"experts-{name}.png" for name in ("rows", "skew", "split")]
    _draw_rows(tables, paths[0], caption)
    _draw_skew(tables, paths[1], caption)
    _draw_split(tables, paths[2], caption)
    return [page, *paths]


def _saved(of: MoETable) -> str:
    """Returns the median and the extremes of the time with ep = 8 over that with ep = 1: balanced layers of as many
    tokens, whole experts."""
    times = dict(zip(of.works, of.latency_us, strict=True))
    shared = [work for work in times if work.ep == 8 and work.tp == 1 and work.tokens >= _MANY_TOKENS]
    ratios = [
        float(times[work] / times[alone])
        for work in shared
        if work.distribution == "balanced" and (alone := replace(work, ep=1)) in times
    ]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "–"


def _draw_rows(tables: dict[str, MoETable], path: Path, caption: str) -> None:
    """Plots the rate of whole layers over the rows per expert: the median of all models on one GPU."""
    with figure(path, _SIZE_IN, title="rate over rows per expert, balanced", caption=caption) as panels:
        for name, of in tables.items():
            rates: dict[float, list[float]] = defaultdict(list)
            for work, us in zip(of.works, of.latency_us, strict=True):
                if work.distribution == "balanced" and work.tp == work.ep == 1 and work.rows_per_expert >= 1:
                    rates[2 ** round(np.log2(work.rows_per_expert))].append(work.flops / us / 1e6)
            _line(panels[0][0], name, {rows: median(own) for rows, own in sorted(rates.items())})
        panels[0][0].set_xscale("log", base=2)
        panels[0][0].set(xlabel="rows per expert (nearest power of two)", ylabel="TFLOP/s")


def _draw_skew(tables: dict[str, MoETable], path: Path, caption: str) -> None:
    """Plots the time with a power law over that with balanced experts, by the number of GPUs."""
    title = f"time with a power law of 1.2 over balanced, {_FEW_TOKENS} tokens or more (median)"
    with figure(path, _SIZE_IN, title=title, caption=caption) as panels:
        for name, of in tables.items():
            ratios: dict[float, list[float]] = defaultdict(list)
            for good, bad in matched(of.works, BALANCED):
                if of.works[good].tokens >= _FEW_TOKENS and of.works[good].tp == 1:
                    ratios[of.works[good].ep].append(of.latency_us[bad] / of.latency_us[good])
            _line(panels[0][0], name, {ep: median(own) for ep, own in sorted(ratios.items())})
        panels[0][0].set_xscale("log", base=2)
        panels[0][0].set(xlabel="GPUs that share out the experts (ep)", ylabel="times as long")


def _draw_split(tables: dict[str, MoETable], path: Path, caption: str) -> None:
    """Plots the time with tp over that with ep on 8 GPUs, by tokens, balanced and skewed."""
    title = "time with tp = 8 over that with ep = 8 (median): above 1, ep is faster"
    with figure(path, _SIZE_IN, 1, 2, title=title, caption=caption, sharey=True) as panels:
        for panel, (choice, how) in zip(panels[0], ((_EVEN, "balanced"), (_UNEVEN, "power law of 1.2")), strict=True):
            for name, of in tables.items():
                ratios: dict[float, list[float]] = defaultdict(list)
                for good, bad in matched(of.works, choice):
                    if of.works[good].ep == 8:
                        ratios[of.works[good].tokens].append(of.latency_us[bad] / of.latency_us[good])
                _line(panel, name, {tokens: median(own) for tokens, own in sorted(ratios.items())})
            panel.axhline(1, color="0.4", linewidth=0.8)
            panel.set(xscale="log", xlabel="tokens", title=how)
        panels[0][0].set_ylabel("times as long")


def _line(panel: object, name: str, points: dict[float, float]) -> None:
    if not points:
        return  # no such layers were measured there
    panel.plot(list(points), list(points.values()), "o-", color=COLOURS[name], markersize=3, linewidth=1, label=name)  # type: ignore[attr-defined]


def main(words_typed: Sequence[str]) -> None:
    """Writes the page and prints the written paths."""
    for path in write_page(Path(words_typed[0] if words_typed else "docs")):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
