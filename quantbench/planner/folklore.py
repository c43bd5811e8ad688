"""Judges rules of thumb for parallel layouts by the predictions of a layout search.

The rules come from BigScience's notes on the training of BLOOM. `judge_folklore` gives a verdict on
each rule for one job.
"""

from dataclasses import asdict, dataclass
from typing import Any

from quantbench.planner.layout import Job
from quantbench.planner.memory import GIB
from quantbench.planner.predict import Prediction
from quantbench.planner.search import Found, LayoutSpace
from quantbench.units import percent
from quantbench.workload.dtypes import ALIGNED_ELEMENTS
from quantbench.workload.parameters import parameters

# Largest relative difference in time that is within the planner's accuracy. A rule holds if its
# best layout is at most this much slower than the best of all layouts.
_NEGLIGIBLE = 0.02
# Memory per parameter in the rule of 18 bytes.
_BYTES_PER_PARAMETER = 18
# Usable fraction of a GPU's memory in the rule of 18 bytes.
_MEMORY_SHARE = 0.75

_BIGSCIENCE = "github.com/bigscience-workshop/bigscience/blob/master/train"
_RULES_OF_THUMB = f"{_BIGSCIENCE}/tflops_optimization.md"
_PREQUEL = f"{_BIGSCIENCE}/tr11-176B-ml/chronicles-prequel.md"


@dataclass(frozen=True)
class LayoutRule:
    """A rule of thumb for layouts.

    name: short name of the rule.
    text: the rule in words.
    source: public document that contains the rule.
    weakness: cases in which the rule is wrong, and why.
    """

    name: str
    text: str
    source: str
    weakness: str


@dataclass(frozen=True)
class Judged:
    """Verdict on a rule of thumb for one job.

    verdict: `holds`, `costs time`, `fails` (no layout that follows the rule fits, or the rule
        predicts the memory wrongly), or `note` (the rule is not compared, for example because the
        search excluded its layouts).
    finding: result of the comparison in words.
    cost: relative extra time of the rule's best layout over the best of all layouts; None if no
        layout was compared.
    choice: the best layout that follows the rule; None if no layout was compared.
    """

    rule: LayoutRule
    verdict: str
    finding: str
    cost: float | None = None
    choice: Prediction | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the rule and the verdict as a JSON object."""
        return {
            **asdict(self.rule),
            "verdict": self.verdict,
            "finding": self.finding,
            "cost": self.cost,
            "choice": self.choice and asdict(self.choice.layout),
        }


_DATA_PARALLEL = LayoutRule(
    "DP",
    "use as much DP as you can",
    _RULES_OF_THUMB,
    "data-parallel traffic grows with the share of the model that a GPU holds, and bubble is "
    "cheap while gbs is "
    "large: the documents' own DP 24 and PP 2 lost 20 % to DP 8 and PP 6",
)
_TENSOR_LAST = LayoutRule(
    "TP last",
    "usually PP = MP; TP only where a layer does not fit one GPU",
    _RULES_OF_THUMB,
    "long pipelines make the logits' stage and the bubble dear; TP 2 to 4 inside a node costs less",
)
_MICRO_BATCH = LayoutRule(
    "MBS 2",
    "MBS 2 is about the best",
    _PREQUEL,
    "it was so for hidden 14400, whose misaligned heads hid what larger products gain; the "
    "best MBS balances "
    "products and launches against bubble and memory",
)
_FULL_MEMORY = LayoutRule(
    "fill memory",
    "raise MBS to use the free memory",
    _RULES_OF_THUMB,
    "the same document adds to test it: more memory in use means neither more speed nor less",
)
_EIGHTEEN_BYTES = LayoutRule(
    "18 bytes",
    "18 bytes · parameters < 75 % of a GPU's memory means no model parallelism is needed",
    _RULES_OF_THUMB,
    "it knows neither ZeRO, which shards 12 of the 18 bytes, nor activations",
)
_FEW_MICRO_BATCHES = LayoutRule(
    "gbs/mbs and DP",
    "gbs / mbs close to DP loses pipeline efficiency",
    _RULES_OF_THUMB,
    "exactly: the bubble is (pp - 1) / (gbs / (mbs · dp)) of the work, so it is pp that it "
    "must be large against",
)
_WAVES = LayoutRule(
    "hidden % 108",
    "hidden % 128, % 108 and % 8 together: hidden = 864 · c",
    _PREQUEL,
    "waves depend on ceil(m / tile) · ceil(n / tile) against the SMs, not on hidden alone; 864 "
    "· c is no multiple "
    "of 128; and most of what 13824 gained over 14400 was its aligned heads",
)
_ALIGNED_HEADS = LayoutRule(
    "head_dim",
    "head_dim % 8 == 0 (and % 64 is best)",
    f"{_PREQUEL}; NVIDIA's guide",
    "% 8 is real: unaligned rows cost 34 % in the documents; % 64 is not seen there: 128-wide "
    "heads were slower "
    "than 224-wide ones, unexplained",
)


def judge_folklore(job: Job, found: Found, space: LayoutSpace) -> list[Judged]:
    """Returns the verdict on every rule for one job. The list is empty if no layout fits.

    found: result of the layout search.
    space: limits of the layout search.
    """
    if not found.ranked:
        return []
    best = found.ranked[0]
    hidden = job.shape.hidden
    head_dim = job.shape.head_dim
    node = job.cluster.gpus_per_node
    whole_node = LayoutRule(
        "TP = node",
        f"TP = {node} (all GPUs of a node) is best",
        _PREQUEL,
        "collectives of every layer grow with TP while products shrink; the documents found TP 4 "
        "to be 3 % faster",
    )
    most = max(p.layout.dp for p in found.ranked)
    least = min(p.layout.tp for p in found.ranked)
    fullest = max(found.ranked, key=lambda p: p.memory.total)
    bubble = f"{percent(best.iteration.bubble_share)} bubble"
    batches = f"{best.layout.micro_batches(job.gbs)} micro-batches for {best.layout.pp} stages"
    past_edges = f"{hidden % 128} over a multiple of 128, {hidden % 108} over one of 108"
    unaligned = head_dim % ALIGNED_ELEMENTS
    aligned = "holds"
    distance = f"a multiple of {ALIGNED_ELEMENTS}"
    if unaligned:
        aligned = "costs time"
        distance = f"{unaligned} over {distance}"
    fullest_words = f"the fullest layout that fits ({fullest.memory.total_gib:.0f} GiB)"
    return [
        _best_of(_DATA_PARALLEL, found, space, "dp", most, f"with the most DP ({most})"),
        _best_of(_TENSOR_LAST, found, space, "tp", least, f"with the least TP that fits ({least})"),
        _best_of(whole_node, found, space, "tp", node, f"with TP {node}"),
        _best_of(_MICRO_BATCH, found, space, "mbs", 2, "with MBS 2"),
        _compared(_FULL_MEMORY, found, fullest, fullest_words),
        _eighteen_bytes(job, found, space),
        Judged(_FEW_MICRO_BATCHES, "note", f"the best has {batches}: {bubble}"),
        Judged(_WAVES, "note", f"hidden {hidden}: {past_edges}"),
        Judged(_ALIGNED_HEADS, aligned, f"head_dim {head_dim} is {distance}"),
    ]


def _excluded(space: LayoutSpace, name: str, degree: int) -> bool:
    """Returns whether the limits of the search exclude a value.

    name: field of `LayoutSpace`, such as `tp`.
    degree: value of the field.
    """
    searched = getattr(space, name)
    return bool(searched) and degree not in searched


def _best_of(
    rule: LayoutRule, found: Found, space: LayoutSpace, name: str, degree: int, which: str
) -> Judged:
    """Compares the best layout that has a given degree to the best of all layouts.

    name: field of `Layout`, such as `tp`.
    degree: value of the field.
    which: description of the layouts with this degree, for the finding.
    """
    if _excluded(space, name, degree):
        return Judged(rule, "note", f"layouts {which} are excluded by --{name}")
    choice = next((p for p in found.ranked if getattr(p.layout, name) == degree), None)
    if choice is None:
        return Judged(
            rule,
            "fails",
            f"no layout {which} keeps every rule and fits; the best is {found.ranked[0].layout}",
        )
    return _compared(rule, found, choice, f"the best {which}")


def _compared(rule: LayoutRule, found: Found, choice: Prediction, which: str) -> Judged:
    """Compares one layout to the best of all layouts.

    choice: layout to compare.
    which: description of the layout, for the finding.
    """
    best = found.ranked[0]
    cost = choice.sec_per_it / best.sec_per_it - 1
    finding = f"{which} is {choice.layout}"
    if cost <= _NEGLIGIBLE:
        return Judged(rule, "holds", f"{finding}: {percent(cost)} from the best", cost, choice)
    finding += f", which takes {percent(cost)} more than {best.layout}"
    return Judged(rule, "costs time", finding, cost, choice)


def _eighteen_bytes(job: Job, found: Found, space: LayoutSpace) -> Judged:
    """Judges the rule that predicts from 18 bytes per parameter whether a model fits on one GPU.

    The rule holds if the search agrees, that is, if a layout with tp = pp = 1 fits or does not fit
    as predicted.
    """
    for name in ("tp", "pp"):
        if _excluded(space, name, 1):
            text = f"layouts without model parallelism are excluded by --{name}"
            return Judged(_EIGHTEEN_BYTES, "note", text)
    needed = _BYTES_PER_PARAMETER * parameters(job.shape)
    limit = _MEMORY_SHARE * job.cluster.device.memory_bytes
    alone = any(p.layout.tp * p.layout.pp == 1 for p in found.ranked)
    sizes = f"{needed / GIB:.0f} GiB against {limit / GIB:.0f}"
    if (needed < limit) == alone:
        word = "fits one GPU" if alone else "needs model parallelism"
        return Judged(_EIGHTEEN_BYTES, "holds", f"{sizes}: the model {word}, as the search finds")
    if alone:
        finding = f"{sizes} says that model parallelism is needed; with ZeRO it fits without"
    else:
        finding = f"{sizes} says that one GPU is enough; activations leave no room"
    return Judged(_EIGHTEEN_BYTES, "fails", finding)
