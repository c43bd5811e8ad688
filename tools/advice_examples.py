"""Writes the tables of docs/advising.md, with advice on public models: `python -m tools.advice_examples docs`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quantbench.advice.advise import Advice, Advised, advise
from quantbench.device import lookup
from quantbench.latency.model_times import ModelTimes
from quantbench.units import percent
from quantbench.workload.presets import preset
from tools.guide.markers import fill, table

PAGE = "advising.md"
#: GPUs of the page, by the name of their marker in it
GPUS = {"a100": "a100-sxm4-80gb", "h100": "h100-sxm5-80gb"}
#: (preset, usual tensor parallelism on a node of eight GPUs)
MODELS = (
    ("gpt2-xl", 1), ("pythia-6.9b", 1), ("gpt-neox-20b", 4), ("opt-66b", 8), ("bloom-176b", 8),
    ("falcon-7b", 1), ("falcon-180b", 8), ("llama-2-7b", 1), ("llama-2-70b", 8), ("llama-3-8b", 1),
    ("llama-3-70b", 8), ("mistral-7b", 1), ("qwen2.5-7b", 1), ("qwen2.5-14b", 2), ("gemma-7b", 1),
)  # fmt: skip
_HEAD = ["model", "attention", "tokens", "not measured", "wasted past edges", "advice"]


def advice_on(name: str, tp: int, times: ModelTimes) -> Advice:
    """Computes the advice on a preset at tp, with one sample of its default sequence length per micro-batch."""
    shape = preset(name)
    return advise(replace(shape, tp=tp), times)


def row(name: str, tp: int, advice: Advice) -> list[str]:
    """Formats one row of the table."""
    shape, unmeasured = advice.shape, percent(sum(one.share for one in advice.unmeasured))
    return [f"{name}, tp = {tp}", shape.attention, str(shape.tokens), unmeasured, _wasted(advice), _words(advice)]


def _wasted(advice: Advice) -> str:
    cost = advice.cost
    said = percent(cost.waste_share)
    worst = next(iter(cost.by_name.values()))
    if sum(op.waste_us for op in worst) < 0.005 * cost.latency.latency_us:
        return said
    finding = max(worst, key=lambda op: op.waste_us).findings[0]
    return f"{said}; {worst[0].op.name} most: {finding.edge.words}"


def _words(advice: Advice) -> str:
    shape = advice.shape
    named = {one.found.shape: one for one in (*advice.better, *advice.better_alone)}
    found = sorted(named.values(), key=lambda one: -one.found.low)
    changes, batches = ([one for one in found if (one.found.shape.mbs == shape.mbs) == same] for same in (True, False))
    said = [_change(one) for one in changes] or ["keep it"]
    return "; ".join([*said, *map(_change, batches)]).replace("; keep it", ": keep it")


def _change(one: Advised) -> str:
    return f"{one.changes}: {one.found.gain_words}"


def tables(models: Sequence[tuple[str, int]] = MODELS) -> dict[str, str]:
    """Returns the Markdown table for each GPU, by the name of its marker."""
    found = {}
    for place, slug in GPUS.items():
        times = ModelTimes(lookup(slug))
        found[place] = table(_HEAD, [row(name, tp, advice_on(name, tp, times)) for name, tp in models], numeric=False)
    return found


def main() -> None:
    """Writes the tables into the page."""
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs") / PAGE
    page.write_text(fill(page.read_text(encoding="utf-8"), tables()), encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
