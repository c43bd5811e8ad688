"""Tests rules of thumb for transformer shapes against measurements.

`judge_all` gives a verdict on each rule in `RULES`. A rule comes with its sources, the shapes to
measure, and the function that finds the pairs of measurements that test it (see `rule_pairs`). The
sources are BigScience's notes on sizing BLOOM, NVIDIA's guide to matmuls, and the code of
Megatron-LM, Apex and DeepGEMM. Rules that need more than one GPU are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product, starmap
from math import exp, lcm, log, sqrt
from operator import add, attrgetter

import numpy as np

from quantbench.analysis.experts import rows_of
from quantbench.analysis.rule_pairs import (
    PairFinder,
    PairsOrReason,
    RulePair,
    RunData,
    best_value,
    doublings,
    fallbacks,
    first_of,
    halves,
    multiples,
    whole_waves,
)
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError
from quantbench.megatron import batches_per_block
from quantbench.rules import Rule, Verdict
from quantbench.stats import CONFIDENCE, median_interval, normal_quantile
from quantbench.sweep.axes import Held
from quantbench.sweep.sizes import GROUPED_OPS, LINEAR_OPS
from quantbench.units import counted
from quantbench.workload import Softmax

#: smallest relative gain that makes a rule worth following
MARGIN = 0.01
_SMALLEST_EFFECT = log(1 + MARGIN)
# Minimum number of pairs for which the median has a distribution-free interval.
_MANY = 6
# The effects of pairs are inconsistent if their standard deviation is more than this many times the
# root mean square of the pairs' standard errors.
_INCONSISTENT = 2.0
# Maximum number of record keys that a verdict keeps as evidence, because there may be thousands.
_MOST_EVIDENCE = 200


def verdict_on(rule: RuleOfThumb, found: PairsOrReason) -> Verdict:
    """Returns the verdict on one rule.

    The verdict is CONFIRMED if the whole 95 % interval of the effect is above 1 + MARGIN, REFUTED
    if the whole interval is below 1 + MARGIN, and INCONCLUSIVE otherwise. Without pairs, the
    verdict is NOT TESTED.

    found: pairs that test the rule, or the reason why there are no pairs.
    """
    if isinstance(found, str):
        return Verdict(rule.id, rule.statement, rule.claim, "NOT TESTED", reason=found)
    middle, low, high = _interval(found)
    verdict = "INCONCLUSIVE"
    reason = "the interval holds both a gain worth having and none"
    if low > _SMALLEST_EFFECT or high < _SMALLEST_EFFECT:
        verdict = "CONFIRMED" if low > _SMALLEST_EFFECT else "REFUTED"
        reason = ""
    predicted = None
    predictions = [pair.predicted for pair in found if pair.predicted is not None]
    if len(predictions) == len(found):
        predicted = exp(float(np.median(predictions)))
    keys = tuple(dict.fromkeys(chain.from_iterable(pair.keys for pair in found)))
    return Verdict(
        rule.id,
        rule.statement,
        rule.claim,
        verdict,
        effect=exp(middle),
        low=exp(low),
        high=exp(high),
        num_pairs=len(found),
        predicted=predicted,
        evidence=keys[:_MOST_EVIDENCE],
        evidence_total=len(keys),
        reason=reason,
    )


def _interval(pairs: Sequence[RulePair]) -> tuple[float, float, float]:
    """Returns the center, the lower bound and the upper bound of the pairs' log effects, at 95 %.

    With six or more pairs, the center is the median, and its interval comes from order statistics.

    With fewer pairs, the center is the mean, and its interval comes from the standard errors. If
    the effects are inconsistent (see _INCONSISTENT), the interval is wider. It spans the intervals
    of all pairs if these agree on whether the effect exceeds MARGIN. Otherwise it comes from the
    scatter, by Student's t.
    """
    effects = np.array([pair.log_effect for pair in pairs])
    errors = np.array([pair.standard_error for pair in pairs])
    width = normal_quantile()
    reach = width * sqrt(float((errors**2).sum())) / len(pairs)
    if len(pairs) >= _MANY:
        interval = median_interval(effects)
        middle = float(np.median(effects))
        # The interval is at least as wide as the standard errors require, because order statistics
        # of equal effects would give an interval of zero width.
        return middle, min(interval.low, middle - reach), max(interval.high, middle + reach)
    mean = float(effects.mean())
    if len(pairs) > 1:
        scatter = float(effects.std(ddof=1))
        if scatter > _INCONSISTENT * float(np.sqrt((errors**2).mean())):
            low = float((effects - width * errors).min())
            high = float((effects + width * errors).max())
            if low > _SMALLEST_EFFECT or high < _SMALLEST_EFFECT:
                return mean, low, high
            from scipy import special

            quantile = float(special.stdtrit(len(pairs) - 1, (1 + CONFIDENCE) / 2))
            reach = quantile * scatter / sqrt(len(pairs))
    return mean, mean - reach, mean + reach


_ATTENTION_OPS = ("scores", "context", "attention")
_SOFTMAX_PROVIDERS = ("torch.eager", "triton.fused")
_ONLY_GPUS = "about GPUs (tensor cores, SMs, waves, CUDA kernels), not judged on a CPU"
_LAYER_OPS = ("qkv", "attention", "proj", "mlp_up", "mlp_down")


@dataclass(frozen=True)
class Experiment:
    """A sweep that measures the points for testing one rule.

    dims: axes with their values (`hidden=1024,2048`).
    held: values of all other dimensions.
    """

    dims: tuple[str, ...]
    held: Held
    providers: tuple[str, ...] = ("torch",)


@dataclass(frozen=True)
class RuleOfThumb(Rule):
    """A rule of thumb and how to test it.

    find: function that finds pairs for testing the rule in a run.
    plan: experiment that measures such pairs, or a function that returns the experiment for a
        device.
    gpu_only: whether the rule is about tensor cores, SMs, waves or CUDA kernels. Such a rule is not
        tested on a CPU.
    """

    find: PairFinder
    plan: Experiment | Callable[[DeviceSpec], Experiment]
    gpu_only: bool = True

    def applies_to(self, spec: DeviceSpec) -> bool:
        """Returns whether the rule can be tested on this kind of device."""
        return spec.kind != "cpu" or not self.gpu_only

    def experiment(self, spec: DeviceSpec) -> Experiment:
        """Returns the sweep that tests the rule on a device.

        Raises UnsupportedError for a GPU rule on a CPU.
        """
        if not self.applies_to(spec):
            others = ", ".join(rule.id for rule in RULES if not rule.gpu_only)
            raise UnsupportedError(
                f"--experiment {self.id}",
                f"{spec.name} is a CPU, and the rule is about GPUs",
                f"a GPU, or a rule that holds on a CPU as well: {others}",
            )
        return self.plan if isinstance(self.plan, Experiment) else self.plan(spec)


def _around_each(held: Held, axis: str, bases: Sequence[int], offsets: Sequence[int]) -> Experiment:
    """Builds an experiment over all values base + offset of one axis: `hidden=1984,2048,2112`.

    held: values of all other dimensions.
    """
    values = set(starmap(add, product(bases, offsets)))
    return Experiment((f"{axis}={','.join(map(str, sorted(values)))}",), held)


_LINEAR = Held(seq=2048, ops=LINEAR_OPS)
_PRODUCT = Held(m=4096, n=4096, layout="nt")
_REDUCTIONS = (1024, 2048, 4096, 8192)
_HEADS = Held(hidden=2048, heads=32, seq=2048, ops=("attention",))
_LOGITS = Held(hidden=4096, seq=2048)
_VOCABULARIES = (32000, 50304, 128256)
_EXPERTS = Held(
    hidden=2048, experts=8, top_k=2, moe_ffn=2048, vocab=32000, seq=2048, ops=GROUPED_OPS
)
# With 8 experts and top_k = 2, each expert gets a quarter of the tokens as rows.
_TOKENS = (512, 1024, 2048, 4096)


def _hidden_sm_count(spec: DeviceSpec) -> Experiment:
    """Builds an experiment around up to five common multiples of the SM count and 64."""
    step = lcm(spec.sm_count, 64)
    bases = [step * i for i in range(1, 9) if 1024 <= step * i <= 12288][:5]
    return _around_each(_LINEAR, "hidden", bases, (-128, 0, 128))


def _softmax(*dims: str, heads: int = 0, seq: int = 0) -> Experiment:
    """Builds an experiment that runs both the fused softmax and its fallback."""
    held = Held(hidden=2048, heads=heads, head_dim=64, seq=seq, ops=("softmax",))
    return Experiment(dims, held, _SOFTMAX_PROVIDERS)


def _layer(spec: DeviceSpec, dim: str) -> Experiment:
    """Builds an experiment over whole layers: large layers on a GPU, smaller ones on a CPU core."""
    held = Held(hidden=4096, heads=32, seq=2048, ops=_LAYER_OPS)
    if spec.kind == "cpu":
        held = replace(held, hidden=256, seq=128)
    return Experiment((dim,), held)


# Pair finder for rules on the rows per expert of grouped GEMMs and MoE layers. The points lie along
# the axis tokens, which determines the rows per expert.
_multiples_of_rows = partial(multiples, axis="tokens", ops=(*GROUPED_OPS, "moe"), size_of=rows_of)


def _breaks_only_batches_per_block(work: Softmax) -> bool:
    """Returns whether a softmax keeps the rule heads-mbs-4 but breaks batches-per-block."""
    return work.batch % 4 == 0 and work.batch % batches_per_block(work.cols) != 0


_BIGSCIENCE = "https://github.com/bigscience-workshop/bigscience/blob/master/train"
_RULES_OF_THUMB = (f"{_BIGSCIENCE}/tflops_optimization.md",)
_PREQUEL = (f"{_BIGSCIENCE}/tr11-176B-ml/chronicles-prequel.md",)
_MATRIX_GUIDE = (
    "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/",
)
_FUSED_SOFTMAX = (
    "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/fusions/fused_softmax.py",
)
_APEX_SOFTMAX = (
    "https://github.com/NVIDIA/apex/blob/master/csrc/megatron/scaled_masked_softmax.h",
)
_VOCAB_PADDING = ("https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py",)
_GROUPED_GEMM = ("https://github.com/deepseek-ai/DeepGEMM/issues/15",)

RULES: tuple[RuleOfThumb, ...] = (
    RuleOfThumb(
        "hidden-128",
        "hidden % 128 == 0",
        "multiples of 128 fill whole tiles; other sizes are slower",
        _PREQUEL,
        partial(multiples, axis="hidden", divisor=128, alike=(64,), ops=LINEAR_OPS),
        _around_each(_LINEAR, "hidden", (1024, 2048, 3072, 4096, 6144), (-64, 0, 64)),
    ),
    RuleOfThumb(
        "hidden-sm-count",
        "hidden % SM count == 0",
        "the tiles fill whole waves",
        _PREQUEL,
        partial(
            multiples,
            axis="hidden",
            divisor=attrgetter("sm_count"),
            alike=(64, 128),
            ops=LINEAR_OPS,
        ),
        _hidden_sm_count,
    ),
    RuleOfThumb(
        "hidden-864",
        "hidden % 864 == 0",
        "multiples of both 128 and 108 (BigScience; but 128 does not divide 864)",
        _PREQUEL,
        partial(multiples, axis="hidden", divisor=864, alike=(32, 64, 128), ops=LINEAR_OPS),
        _around_each(_LINEAR, "hidden", (1728, 2592, 3456, 5184, 6912), (-128, 0, 128)),
    ),
    RuleOfThumb(
        "k-8",
        "k % 8 == 0",
        "16-bit rows start at multiples of 16 bytes and are loaded in full",
        _MATRIX_GUIDE,
        partial(multiples, axis="k", divisor=8),
        _around_each(_PRODUCT, "k", _REDUCTIONS, (-4, -2, -1, 0, 1, 2, 4)),
    ),
    RuleOfThumb(
        "k-64",
        "k % 64 == 0",
        "rows start at cache lines, and the last step of the reduction is full",
        _MATRIX_GUIDE,
        partial(multiples, axis="k", divisor=64, alike=(8,)),
        _around_each(_PRODUCT, "k", _REDUCTIONS, (-32, -16, -8, 0, 8, 16, 32)),
    ),
    RuleOfThumb(
        "head-dim-8",
        "head_dim % 8 == 0",
        "attention rows start at multiples of 16 bytes",
        _PREQUEL,
        partial(multiples, axis="head_dim", divisor=8, same_padding=True, ops=_ATTENTION_OPS),
        _around_each(_HEADS, "head-dim", (72, 104, 120), (-4, -2, 0, 2, 4)),
    ),
    RuleOfThumb(
        "head-dim-64",
        "head_dim % 64 == 0",
        "attention pads to whole tiles of 64",
        _PREQUEL,
        partial(multiples, axis="head_dim", divisor=64, alike=(8,), ops=_ATTENTION_OPS),
        _around_each(_HEADS, "head-dim", (64, 120, 128, 192), (-8, 0, 8)),
    ),
    RuleOfThumb(
        "vocab-8",
        "vocab % 8 == 0",
        "rows of the logits start at multiples of 16 bytes",
        _MATRIX_GUIDE,
        partial(multiples, axis="vocab", divisor=8, ops=("logits",)),
        _around_each(_LOGITS, "vocab", _VOCABULARIES, (-4, -1, 0, 1, 4)),
    ),
    RuleOfThumb(
        "vocab-128",
        "vocab % 128 == 0",
        "the logits fill their tiles (Megatron pads the vocabulary to it)",
        _VOCAB_PADDING,
        partial(multiples, axis="vocab", divisor=128, alike=(8,), ops=("logits",)),
        _around_each(_LOGITS, "vocab", _VOCABULARIES, (-64, -8, 0, 8, 64)),
    ),
    RuleOfThumb(
        "heads-mbs-4",
        "heads / TP × MBS % 4 == 0",
        "Megatron's fused softmax runs instead of its fallback",
        _FUSED_SOFTMAX,
        partial(
            fallbacks,
            breaks=lambda work: work.batch % 4 != 0,
            same=("rows", "cols"),
            what="heads / TP × MBS no multiple of 4",
        ),
        _softmax("heads=8,9,10,15,16,17,24,26,32,33", seq=2048),
    ),
    RuleOfThumb(
        "batches-per-block",
        "heads / TP × MBS % batches_per_block == 0",
        "the fused softmax runs: rows of up to 128 columns need a multiple of 8, not 4",
        _APEX_SOFTMAX,
        partial(
            fallbacks,
            breaks=_breaks_only_batches_per_block,
            same=("rows", "cols"),
            what="heads / TP × MBS a multiple of 4 and not of 8",
        ),
        _softmax("heads=8,12,16,20,24,28,32,36,64,68", "seq=64,128"),
    ),
    RuleOfThumb(
        "softmax-sk-2048",
        "16 < sk <= 2048",
        "the fused softmax of early Megatron versions runs",
        _APEX_SOFTMAX,
        partial(
            fallbacks,
            breaks=lambda work: work.cols > 2048,
            same=("batch",),
            what="rows of more than 2048 columns",
        ),
        _softmax("seq=1024,1536,2048,2112,2560,3072,4096", heads=16),
    ),
    RuleOfThumb(
        "mbs-2",
        "MBS == 2",
        "a micro-batch of two is the fastest per token",
        _PREQUEL,
        partial(best_value, axis="mbs", value=2),
        lambda spec: _layer(spec, "mbs=1,2,4,8"),
        gpu_only=False,
    ),
    RuleOfThumb(
        "tp-shrinks-n",
        "TP as small as memory allows",
        "each doubling of TP halves n and slows every GPU",
        _RULES_OF_THUMB,
        partial(first_of, finders=(partial(doublings, axis="tp"), partial(halves, axis="n"))),
        lambda spec: _layer(spec, "tp=1,2,4,8"),
        gpu_only=False,
    ),
    RuleOfThumb(
        "whole-waves",
        "tiles % (SM count × blocks per SM) == 0",
        "no wave runs nearly empty",
        _MATRIX_GUIDE,
        whole_waves,
        # m is small and n grows in small steps, so that for any tile the sweep contains a size that
        # fills its last wave to 90 % or more.
        Experiment(("n=4096:16384:256@edges",), Held(m=512, k=4096, layout="nt")),
    ),
    RuleOfThumb(
        "expert-rows-64",
        "tokens per expert % 64 == 0",
        "the rows of every expert fill tiles of 64",
        _GROUPED_GEMM,
        partial(_multiples_of_rows, divisor=64),
        _around_each(_EXPERTS, "tokens", _TOKENS, (-128, -64, 0, 64, 128)),
    ),
    RuleOfThumb(
        "expert-rows-128",
        "tokens per expert % 128 == 0",
        "the rows of every expert fill tiles of 128",
        _GROUPED_GEMM,
        partial(_multiples_of_rows, divisor=128, alike=(64,)),
        _around_each(_EXPERTS, "tokens", _TOKENS, (-256, 0, 256)),
    ),
    RuleOfThumb(
        "expert-width-128",
        "expert_ffn / TP % 128 == 0",
        "the columns of every expert fill tiles of 128",
        _GROUPED_GEMM,
        partial(multiples, axis="moe_ffn", divisor=128, alike=(64,), ops=GROUPED_OPS),
        _around_each(
            replace(_EXPERTS, seq=4096), "moe-ffn", (1024, 1536, 2048, 3072), (-64, 0, 64)
        ),
    ),
)


def rule_named(name: str) -> RuleOfThumb:
    """Returns the rule with the id `name`.

    Raises InputError that lists all ids if there is no such rule.
    """
    by_id = {rule.id: rule for rule in RULES}
    if name not in by_id:
        raise InputError("--experiment", repr(name), "one of " + ", ".join(by_id))
    return by_id[name]


def judge_all(material: RunData, rules: Sequence[RuleOfThumb] = RULES) -> tuple[Verdict, ...]:
    """Returns a verdict on each rule. On a CPU, rules about GPUs are NOT TESTED.

    material: points and curves of the run.
    """
    verdicts = []
    for rule in rules:
        found = rule.find(material) if rule.applies_to(material.spec) else _ONLY_GPUS
        verdicts.append(verdict_on(rule, found))
    return tuple(verdicts)


def untested_lines(verdicts: Sequence[Verdict], spec: DeviceSpec) -> list[str]:
    """Describes the untested rules in up to two lines.

    The first line names the rules that can be tested on this device. If the device is a CPU, the
    second line counts the rules about GPUs.
    """
    own = {}
    gpu_rules = 0
    for one in verdicts:
        if one.verdict == "NOT TESTED" and rule_named(one.rule).applies_to(spec):
            own[one.rule] = one.reason
        elif one.verdict == "NOT TESTED":
            gpu_rules += 1
    lines = []
    if len(own) == 1:
        lines += [f"{rule} not tested: {reason}" for rule, reason in own.items()]
    elif own:
        how = "`quantbench check --experiment NAME` measures one"
        lines.append(f"{len(own)} rules not tested: {', '.join(own)}; {how}")
    if gpu_rules:
        lines.append(f"{counted(gpu_rules, 'rule')} {_ONLY_GPUS}")
    return lines
