"""The rules of thumb of the BigScience documents, compared with the best layouts that a search finds for a job.

Each rule is quoted with the layout that it leads to, the cost against the best layout, and the reason where it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quantbench.planner.formulas import parameters
from quantbench.planner.layout import ALIGNED_ELEMENTS, Job
from quantbench.planner.memory import GIB
from quantbench.planner.predict import Prediction
from quantbench.planner.search import Found
from quantbench.units import percent

#: below this a rule's choice is as good as the best: the model itself is no better
NEGLIGIBLE = 0.02
_BYTES_PER_PARAMETER = 18
_MEMORY_SHARE = 0.75

_BIGSCIENCE = "github.com/bigscience-workshop/bigscience/blob/master/train"
_RULES_OF_THUMB = f"{_BIGSCIENCE}/tflops_optimization.md"
_PREQUEL = f"{_BIGSCIENCE}/tr11-176B-ml/chronicles-prequel.md"


@dataclass(frozen=True)
class Rule:
    """A rule of thumb. source: the public document. weakness: where it goes wrong, in general."""

    name: str
    text: str
    source: str
    weakness: str


@dataclass(frozen=True)
class Judged:
    """A rule and what the search says of it. verdict: holds, costs time, fails (nothing it asks for fits), or note.
    cost: the rule's best layout over the best of all, minus 1; None where there is none. choice: that layout."""

    rule: Rule
    verdict: str
    finding: str
    cost: float | None = None
    choice: Prediction | None = None


def judge(job: Job, found: Found) -> list[Judged]:
    """Every rule against the layouts that fit. Empty where none does."""
    if not found.ranked:
        return []
    return [rule(job, found) for rule in _RULES]


def _choice(rule: Rule, found: Found, keep: Callable[[Prediction], bool], nothing: str, what: str) -> Judged:
    best = found.ranked[0]
    chosen = next((p for p in found.ranked if keep(p)), None)
    if chosen is None:
        return Judged(rule, "fails", f"{nothing}; the best is {best.layout}")
    cost = chosen.sec_per_it / best.sec_per_it - 1
    if cost <= NEGLIGIBLE:
        return Judged(rule, "holds", f"{what} {chosen.layout}: {percent(cost)} from the best", cost, chosen)
    finding = f"{what} {chosen.layout}, which takes {percent(cost)} more than {best.layout}"
    return Judged(rule, "costs time", finding, cost, chosen)


def _data_parallel(job: Job, found: Found) -> Judged:
    rule = Rule(
        "DP", "use as much DP as you can", _RULES_OF_THUMB,
        "data-parallel traffic grows with the share of the model that a GPU holds, and bubble is cheap while gbs is "
        "large: the documents' own DP 24 and PP 2 lost 20 % to DP 8 and PP 6",
    )  # fmt: skip
    most = max(p.layout.dp for p in found.ranked)
    return _choice(rule, found, lambda p: p.layout.dp == most, "", f"the best with the most DP ({most}) is")


def _no_tensor(job: Job, found: Found) -> Judged:
    rule = Rule(
        "TP last", "usually PP = MP; TP only where a layer does not fit one GPU", _RULES_OF_THUMB,
        "long pipelines make the logits' stage and the bubble dear; TP 2 to 4 inside a node costs less",
    )  # fmt: skip
    least = min(p.layout.tp for p in found.ranked)
    keep = lambda p: p.layout.tp == least  # noqa: E731
    return _choice(rule, found, keep, "", f"the best with the least TP that fits ({least}) is")


def _whole_node(job: Job, found: Found) -> Judged:
    node = job.cluster.gpus_per_node
    rule = Rule(
        "TP = node", f"TP = {node} (all GPUs of a node) is best", _PREQUEL,
        "collectives of every layer grow with TP while products shrink; the documents found TP 4 to be 3 % faster",
    )  # fmt: skip
    keep = lambda p: p.layout.tp == node  # noqa: E731
    return _choice(rule, found, keep, f"nothing with TP {node} fits", f"the best with TP {node} is")


def _micro_batch(job: Job, found: Found) -> Judged:
    rule = Rule(
        "MBS 2", "MBS 2 is about the best", _PREQUEL,
        "it was so for hidden 14400, whose misaligned heads hid what larger products gain; the best MBS balances "
        "products and launches against bubble and memory",
    )  # fmt: skip
    return _choice(rule, found, lambda p: p.layout.mbs == 2, "nothing with MBS 2 fits", "the best with MBS 2 is")


def _full_memory(job: Job, found: Found) -> Judged:
    rule = Rule(
        "fill memory", "raise MBS to use the free memory", _RULES_OF_THUMB,
        "the same document adds to test it: more memory in use means neither more speed nor less",
    )  # fmt: skip
    fullest = max(found.ranked, key=lambda p: p.memory.total)
    finding = f"the fullest layout that fits ({fullest.memory.total_gib:.0f} GiB) is"
    return _choice(rule, found, lambda p: p is fullest, "", finding)


def _eighteen_bytes(job: Job, found: Found) -> Judged:
    rule = Rule(
        "18 bytes", "18 bytes · parameters < 75 % of a GPU's memory means no model parallelism is needed",
        _RULES_OF_THUMB, "it knows neither ZeRO, which shards 12 of the 18 bytes, nor activations",
    )  # fmt: skip
    needed = _BYTES_PER_PARAMETER * parameters(job.shape)
    limit = _MEMORY_SHARE * job.cluster.device.memory_bytes
    says = needed < limit
    alone = any(p.layout.tp * p.layout.pp == 1 for p in found.ranked)
    sizes = f"{needed / GIB:.0f} GiB against {limit / GIB:.0f}"
    if says == alone:
        word = "fits one GPU" if alone else "needs model parallelism"
        return Judged(rule, "holds", f"{sizes}: the model {word}, as the search finds")
    if alone:
        return Judged(rule, "fails", f"{sizes} says that model parallelism is needed; with ZeRO it fits without")
    return Judged(rule, "fails", f"{sizes} says that one GPU is enough; activations leave no room")


def _few_micro_batches(job: Job, found: Found) -> Judged:
    rule = Rule(
        "gbs/mbs and DP", "gbs / mbs close to DP loses pipeline efficiency", _RULES_OF_THUMB,
        "exactly: the bubble is (pp - 1) / (gbs / (mbs · dp)) of the work, so it is pp that it must be large against",
    )  # fmt: skip
    best = found.ranked[0]
    count = best.layout.micro_batches(job.gbs)
    bubble = f"{percent(best.iteration.bubble_share)} bubble"
    finding = f"the best has {count} micro-batches for {best.layout.pp} stages: {bubble}"
    return Judged(rule, "note", finding)


def _waves(job: Job, found: Found) -> Judged:
    rule = Rule(
        "hidden % 108", "hidden % 128, % 108 and % 8 together: hidden = 864 · c", _PREQUEL,
        "waves depend on ceil(m / tile) · ceil(n / tile) against the SMs, not on hidden alone; 864 · c is no multiple "
        "of 128; and most of what 13824 gained over 14400 was its aligned heads",
    )  # fmt: skip
    hidden = job.shape.hidden
    over = f"{hidden % 128} over a multiple of 128, {hidden % 108} over one of 108"
    return Judged(rule, "note", f"hidden {hidden}: {over}")


def _aligned_heads(job: Job, found: Found) -> Judged:
    rule = Rule(
        "head_dim", "head_dim % 8 == 0 (and % 64 is best)", f"{_PREQUEL}; NVIDIA's guide",
        "% 8 is real: unaligned rows cost 34 % in the documents; % 64 is not seen there: 128-wide heads were slower "
        "than 224-wide ones, unexplained",
    )  # fmt: skip
    width = job.shape.head_dim
    over = width % ALIGNED_ELEMENTS
    if over:
        return Judged(rule, "costs time", f"head_dim {width} is {over} over a multiple of {ALIGNED_ELEMENTS}")
    return Judged(rule, "holds", f"head_dim {width} is a multiple of {ALIGNED_ELEMENTS}")


_RULES: tuple[Callable[[Job, Found], Judged], ...] = (
    _data_parallel, _no_tensor, _whole_node, _micro_batch, _full_memory, _eighteen_bytes, _few_micro_batches, _waves,
    _aligned_heads,
)  # fmt: skip
