"""Fits the planner's factors to measured iterations of many software stacks and GPUs.

Partial pooling lets stacks and GPUs with few measurements borrow from the rest. A factor is the
product of a prior mean (the value without measurements) and several effects: those of all runs, of
the stack's kind of kernels, of the stack, of the GPU's architecture, and of the stack on the
architecture. Effects have normal priors on the log scale, so few measurements change them little.
Each table of runs also has effects, for causes that are not modelled and that its runs have in
common. They are dropped after the fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantbench.planner.calibration import RANGES, STACKS, Calibration
from quantbench.planner.fitting import PRIORS, TIME, Observed, Term, solve, start_from

_TABLE_SPREAD = 0.08
# Prior means of the factors. NCCL's rings reach 0.8 of the adapters' rate. The other means are
# orders of magnitude.
_MEANS = {
    "compute_factor": 1.05,
    "quantized_factor": 1.0,
    "experts_factor": 1.2,
    "attention_factor": 1.1,
    "tensor_factor": 0.9,
    "layer_overhead_ms": 0.1,
    "step_overhead_ms": 15.0,
    "data_parallel_share": 0.8,
    "exposed_share": 0.5,
    "hop_us": 15.0,
    "congestion": 0.02,
    "straggler_spread": 0.005,
}
# Prior mean of elementwise_factor, by kind of kernels. Fused kernels move 1.2 times the ideal bytes
# and eager ones up to 3.4 times.
_ELEMENTWISE_MEANS = {"fused": 1.3, "compiled": 1.7, "eager": 3.0}


@dataclass(frozen=True)
class Pooled:
    """Fitted effects, from which the factors of any stack on any GPU architecture are computed.

    effects: effect on the logarithm of a factor. The key of its `Term` is "" (all runs), a kind of
        kernels, a stack, an architecture, or `stack@architecture`.
    groups: every (stack, architecture) that the runs have.
    rest: constants of the planner that do not differ between stacks, by name.
    scatter, unknown_scatter: `Calibration.scatter` for stacks in the runs, and for all others.
    """

    effects: Mapping[Term, float]
    groups: frozenset[tuple[str, str]]
    rest: Mapping[str, Any]
    scatter: float = 0.0
    unknown_scatter: float = 0.0
    provenance: dict[str, Any] = field(default_factory=dict)

    def of(self, stack: str, architecture: str) -> Calibration:
        """Returns the factors of a stack ("": unknown) on a GPU architecture ("": unknown)."""
        values = {**self.rest, **_factors(self.effects, stack, architecture)}
        seen = stack != "" and any(stack == known for known, _ in self.groups)
        return Calibration(**values, scatter=self.scatter if seen else self.unknown_scatter)

    def of_every(self, stacks: Iterable[str]) -> dict[str, dict[str, Calibration]]:
        """Returns the factors of stacks by architecture, as `Calibrations.stacks` holds them."""
        architectures = ["", *sorted({architecture for _, architecture in self.groups})]
        return {stack: {one: self.of(stack, one) for one in architectures} for stack in stacks}


def fit_pooled(observed: Sequence[Observed], rest: Mapping[str, float]) -> Pooled:
    """Fits the effects of stacks and GPU architectures to runs of many tables.

    rest: constants of the planner that do not differ between stacks, by name.
    """

    def spreads(group: tuple[str, str, str]) -> dict[Term, float]:
        stack, gpu, table = group
        found = {Term(TIME, table): _TABLE_SPREAD}
        for factor, prior in PRIORS.items():
            common = "" if factor in _MEANS else _kernels_of(stack)
            of_keys = {
                common: prior.common,
                stack: prior.stack,
                gpu: prior.gpu,
                f"{stack}@{gpu}": prior.both,
                f"site {table}": prior.site,
            }
            for key, spread in of_keys.items():
                if spread:
                    found[Term(factor, key)] = spread
        return found

    start = start_from(rest)

    def constants(effects: dict[Term, float], group: tuple[str, str, str]) -> Calibration:
        stack, gpu, table = group
        factors = _factors(effects, stack, gpu, f"site {table}")
        return replace(start, **factors)  # type: ignore[arg-type]

    effects, _ = solve(observed, spreads, constants)
    kept = {t: v for t, v in effects.items() if t.factor != TIME and not t.key.startswith("site ")}
    return Pooled(kept, frozenset(one.group[:2] for one in observed), rest)


def _kernels_of(stack: str) -> str:
    """Returns the kind of kernels that a stack runs; unknown stacks count as eager PyTorch."""
    return STACKS[stack].kernels if stack in STACKS else "eager"


def _factors(
    effects: Mapping[Term, float], stack: str, architecture: str, *more_keys: str
) -> dict[str, float]:
    """Returns the factors of a stack on a GPU architecture, by name.

    A factor is its prior mean times exp(sum of the effects on it). It is clipped to the range that
    the planner allows.

    more_keys: keys of further effects.
    """
    kernels = _kernels_of(stack)
    keys = ("", kernels, stack, architecture, f"{stack}@{architecture}", *more_keys)
    found = {}
    for factor in PRIORS:
        mean = _MEANS.get(factor, _ELEMENTWISE_MEANS[kernels])
        low, high = RANGES[factor]
        total = sum(effects.get(Term(factor, key), 0.0) for key in dict.fromkeys(keys))
        found[factor] = min(max(mean * math.exp(total), low), high)
    return found
