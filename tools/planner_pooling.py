"""Fits the planner's factors to measured iterations of many stacks and GPUs with partial pooling.


A factor of a stack on a GPU is the product of a prior mean and of effects: of all runs, of the
stack's kind of kernels, of the stack, of the GPU's architecture and of both together. Effects have
normal priors on the log scale, so that little data moves them little. Each table of runs also has
an effect on its times and on its network, because runs of one table share what is not modelled;
those effects are estimated and dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantbench.planner.calibration import RANGES, STACKS, Calibration
from quantbench.planner.fitting import PRIORS, TIME, Observed, Term, solve, start_from

_TABLE_SPREAD = 0.08
# Means of the factors. The network: NCCL's rings reach 0.8 of the adapters' rate; the others are
# order of magnitude.
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
# Mean of elementwise_factor by kind of kernels: they move 1.2 to 3.4 times the ideal bytes from
# fused to eager ones.
_ELEMENTWISE_MEANS = {"fused": 1.3, "compiled": 1.7, "eager": 3.0}


@dataclass(frozen=True)
class Pooled:
    """Factors by stack and GPU.

    effects: fitted effect on ln factor by `Term`, whose key is "" (all runs), a kind of kernels, a
        stack, an architecture, or both as `stack@architecture`.
    groups: (stack, architecture) of the runs.
    scatter, unknown_scatter: `Calibration.scatter` of the known stacks, and of unknown ones.
    rest: constants that do not differ between stacks.
    """

    effects: Mapping[Term, float]
    groups: frozenset[tuple[str, str]]
    rest: Mapping[str, Any]
    scatter: float = 0.0
    unknown_scatter: float = 0.0
    provenance: dict[str, Any] = field(default_factory=dict)

    def of(self, stack: str, architecture: str) -> Calibration:
        """Returns the factors of a stack ("": unknown) on a GPU architecture ("": unknown)."""
        values: dict[str, Any] = dict(self.rest)
        for factor in PRIORS:
            terms = _terms(factor, stack, architecture)
            values[factor] = _composed(factor, self.effects, terms, stack)
        seen = stack != "" and any(stack == known for known, _ in self.groups)
        return Calibration(**values, scatter=self.scatter if seen else self.unknown_scatter)

    def of_every(self, stacks: Iterable[str]) -> dict[str, dict[str, Calibration]]:
        """Returns the factors of stacks by architecture, as `Calibrations.stacks` holds them."""
        architectures = ["", *sorted({architecture for _, architecture in self.groups})]
        return {stack: {one: self.of(stack, one) for one in architectures} for stack in stacks}


def fit_pooled(observed: Sequence[Observed], rest: Mapping[str, float]) -> Pooled:
    """Fits effects by stack and GPU to runs of many tables. rest: constants that do not differ
    between stacks.
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
        values = {}
        for factor in PRIORS:
            terms = (*_terms(factor, stack, gpu), Term(factor, f"site {table}"))
            values[factor] = _composed(factor, effects, terms, stack)
        return replace(start, **values)  # type: ignore[arg-type]

    effects, _ = solve(observed, spreads, constants)
    kept = {t: v for t, v in effects.items() if t.factor != TIME and not t.key.startswith("site ")}
    return Pooled(kept, frozenset(one.group[:2] for one in observed), rest)


def _kernels_of(stack: str) -> str:
    """Returns the kind of kernels of a stack; of unknown ones, PyTorch's own."""
    return STACKS[stack].kernels if stack in STACKS else "eager"


def _terms(factor: str, stack: str, architecture: str) -> tuple[Term, ...]:
    """Returns the effects that make up a factor."""
    keys = ("", _kernels_of(stack), stack, architecture, f"{stack}@{architecture}")
    return tuple(Term(factor, key) for key in dict.fromkeys(keys))


def _composed(
    factor: str, effects: Mapping[Term, float], terms: Iterable[Term], stack: str
) -> float:
    """Returns a factor: its prior mean times exp(sum of its terms' effects), within its limits."""
    mean = _MEANS.get(factor, _ELEMENTWISE_MEANS[_kernels_of(stack)])
    low, high = RANGES[factor]
    total = sum(effects.get(term, 0.0) for term in terms)
    return min(max(mean * math.exp(total), low), high)
