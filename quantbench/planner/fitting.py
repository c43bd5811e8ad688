"""Fits the planner's factors to measured iterations, of one site or of many stacks and GPUs.

The fit is a robust (soft L1) Gauss-Newton fit of log times, with normal priors on the log scale, so
that little data changes the factors little. A table of more than eight runs counts as eight runs,
because its runs repeat a few layouts.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import RANGES, Calibration, architecture
from quantbench.planner.iteration import iteration
from quantbench.planner.layer_time import LayerTimes
from quantbench.planner.rows import Case
from quantbench.units import counted

FloatArray = npt.NDArray[np.float64]

# Standard deviation of ln time between repeated or similar runs of a table.
_ROW_SPREAD = 0.03
# A table with more runs than this weighs as much as a table with this number of runs.
_RUNS_THAT_COUNT = 8
# Each factor is multiplied by this number to get the slope of the predicted time.
_STEP = 0.99
# Fraction of measured times that the intervals of predicted times cover.
_COVERED = 0.9
# Smallest number of rows to which the factors of a site are fitted.
_FEWEST = 5
# A factor is not determined if its spread after the fit is at least this fraction of the spread of
# its prior. Two factors are not told apart if the absolute correlation of their errors is larger
# than the second value.
_DETERMINED = 0.7
_APART = 0.7
# A factor is unusual if the fit moves it by more than this number of spreads of its prior.
_UNUSUAL = 2


class Prior(NamedTuple):
    """Standard deviations of the effects on one factor, on the log scale.

    common: effect that all runs share, or all runs with the same kind of kernels (`Stack.kernels`).
    stack, gpu, both: effect of a stack, of a GPU architecture, and of the two together.
    site: effect of a table, whose runs share a site.
    """

    common: float
    stack: float = 0.0
    gpu: float = 0.0
    both: float = 0.0
    site: float = 0.0


#: priors of the factors
PRIORS = {
    "compute_factor": Prior(0.05, 0.03, 0.06, 0.03),
    "quantized_factor": Prior(0.2, 0.0, 0.1),
    "experts_factor": Prior(0.3, 0.0, 0.1),
    "attention_factor": Prior(0.2, 0.2, 0.1),
    "elementwise_factor": Prior(0.2, 0.3, 0.15, 0.25),
    "tensor_factor": Prior(0.3, 0.4, 0.1),
    "layer_overhead_ms": Prior(0.7, 0.8),
    "step_overhead_ms": Prior(0.3, 0.3),
    "data_parallel_share": Prior(0.2, site=0.5),
    "exposed_share": Prior(0.4, 0.4),
    "hop_us": Prior(0.4, site=1.0),
    "congestion": Prior(0.5, site=0.7),
    "straggler_spread": Prior(0.5, 0.5),
}
#: name, in place of a factor, of the effect of a table on all of its times
TIME = "time"


class Term(NamedTuple):
    """Effect on the logarithm of a factor.

    key: name of the group of runs that share the effect; "" for all runs.
    """

    factor: str
    key: str


#: (stack, GPU architecture, table) of a run
Group = tuple[str, str, str]
Effects = dict[Term, float]


@dataclass(frozen=True)
class Observed:
    """Measured iteration of a case.

    layers: layer times of the job.
    measured_s: measured time per iteration, in s.
    table: name of the runs that share a site and software.
    """

    case: Case
    layers: LayerTimes
    measured_s: float
    table: str

    @property
    def group(self) -> Group:
        """Stack, GPU architecture and table of the run."""
        job = self.case.job
        return job.stack, architecture(job.cluster.device), self.table


def observe(runs: Iterable[tuple[Case, float, str]], times: TimesOf) -> list[Observed]:
    """Prepares measured runs for fits. The runs of one job share their layer times.

    runs: (case, time per iteration in s, table) of each run.
    times: function that returns the source of op times for a GPU.
    """
    known: dict[object, LayerTimes] = {}
    found = []
    for case, seconds, table in runs:
        key = (case.job.shape, case.job.cluster.key)
        if key not in known:
            known[key] = LayerTimes(case.job, times(case.job.cluster.device))
        found.append(Observed(case, known[key], seconds, table))
    return found


def predicted_s(one: Observed, calibration: Calibration) -> float:
    """Returns the predicted time per iteration, in s."""
    return iteration(one.case.job, one.case.layout, one.layers, calibration).sec.mid


def log_errors(observed: Sequence[Observed], calibration: Calibration) -> FloatArray:
    """Returns ln(predicted / measured) of each run (observed,)."""
    return np.log([predicted_s(one, calibration) / one.measured_s for one in observed])


def op_spreads(observed: Sequence[Observed], errors: FloatArray) -> FloatArray:
    """Returns the half-width in ln time that the ops alone give to each run (observed,).

    If an interval is asymmetric, the half-width is that of the side on which the measured time
    lies: the upper side if the prediction is too short.

    errors: ln(predicted / measured) of each run, (observed,).
    """
    sides = []
    for one, error in zip(observed, errors, strict=True):
        span = iteration(one.case.job, one.case.layout, one.layers, start_from({})).sec
        sides.append((span.high if error < 0 else span.low) / span.mid)
    return np.abs(np.log(sides))


def scatter_beyond(observed: Sequence[Observed], errors: FloatArray) -> float:
    """Returns the half-width in ln time that is missing in the intervals of the ops.

    Added in quadrature to the half-width of the ops, it covers nine in ten of `errors`.
    """
    beyond = np.maximum(errors**2 - op_spreads(observed, errors) ** 2, 0.0)
    return float(np.quantile(np.sqrt(beyond), _COVERED))


def start_from(rest: Mapping[str, float]) -> Calibration:
    """Returns the factors before a fit, which are those of ideal single ops.

    rest: factors that no fit of times determines, by name.
    """
    values: dict[str, Any] = {"base_gib": 4.0, "activation_slack": 0.1, **rest}
    return Calibration(1.0, 0.0, 1.0, **values)


def fit_site(observed: Sequence[Observed], prior: Calibration) -> Calibration:
    """Fits every factor to the rows of one site, starting from the factors of its stack.

    The provenance of the result names three kinds of factors. `undetermined` are factors about
    which the rows say little, so that they stay close to the values of the stack. `confounded` are
    pairs of factors that the rows do not tell apart, of which only the joint effect is known.
    `unusual` are factors that differ from those of the stack by more than is expected of nineteen
    in twenty sites.

    Raises InputError if there are too few rows.
    """
    if len(observed) < _FEWEST:
        what = f"{counted(len(observed), 'row')} with a time"
        raise InputError("plan --fit", what, f"at least {_FEWEST}")
    spread = {Term(name, ""): math.sqrt(sum(s**2 for s in prior)) for name, prior in PRIORS.items()}

    def constants(effects: Effects, _: object) -> Calibration:
        """Returns the factors of the site, within their plausible ranges."""
        values = {}
        for name, _ in effects:
            low, high = RANGES[name]
            # A factor of 0 starts a little above 0, because its effect multiplies it.
            value = max(getattr(prior, name), 1e-3) * math.exp(effects[Term(name, "")])
            values[name] = min(max(value, low / _STEP), high)  # so that a step down stays inside
        return replace(prior, **values)

    effects, jacobian = solve(observed, lambda _: spread, constants)
    found = constants(effects, None)
    names = list(PRIORS)
    # Covariance of the effects after the fit, in units of the spreads of the priors. The last rows
    # of the Jacobian, which are those of the priors, form the identity matrix.
    covariance = np.linalg.inv(jacobian.T @ jacobian)
    spread_left = np.sqrt(np.diag(covariance))
    apart = np.abs(covariance / np.outer(spread_left, spread_left)) <= _APART
    # Only factors about which the rows say anything can be confounded.
    unsure = np.flatnonzero(spread_left < 1 - 1e-3)
    pairs = [(names[i], names[j]) for i, j in combinations(unsure, 2) if not apart[i, j]]
    rows = jacobian[: len(observed)]
    leverage = np.einsum("ij,jk,ik->i", rows, covariance, rows)
    # Error of each row in a linear fit without the row: the error of the fit over 1 - leverage. The
    # lower bound keeps it below ten times the error of the fit.
    left_out_log = log_errors(observed, found) / np.maximum(1 - leverage, 0.1)
    provenance: dict[str, Any] = {
        "rows_fitted": len(observed),
        "leave_one_out_mean_error_pct": float(100 * np.abs(np.expm1(left_out_log)).mean()),
        "undetermined": [names[i] for i in np.flatnonzero(spread_left >= _DETERMINED)],
        "confounded": pairs,
        "unusual": [term.factor for term, s in spread.items() if abs(effects[term]) > _UNUSUAL * s],
        "stack": observed[0].case.job.stack,
    }
    scatter = scatter_beyond(observed, left_out_log)
    return replace(found, scatter=scatter, provenance=provenance)


def solve(
    observed: Sequence[Observed],
    spreads: Callable[[Group], Effects],
    constants: Callable[[Effects, Group], Calibration],
) -> tuple[Effects, FloatArray]:
    """Minimizes the robust log errors plus the priors.

    Returns the effects, and the Jacobian of the residuals by the effects, with each effect in units
    of its spread. Its rows are those of the runs (observed), then those of the priors (effects).

    spreads: function that returns the spread of each effect on the rows of a group.
    constants: function that returns the factors of a group, given the effects.
    """
    from scipy.optimize import least_squares

    groups = {one.group: spreads(one.group) for one in observed}
    spread: Effects = {}
    for found in groups.values():
        spread |= found
    index = {term: i for i, term in enumerate(spread)}
    sd = np.array(list(spread.values()))  # (effects,)
    runs = Counter(one.table for one in observed)
    repeats = np.array([max(1.0, runs[one.table] / _RUNS_THAT_COUNT) for one in observed])
    noise = _ROW_SPREAD * repeats**0.5

    def residuals(z: FloatArray, *, slopes: bool) -> tuple[FloatArray, FloatArray]:
        """Returns the log errors of the runs over their noise, and their Jacobian by z.

        z: effects in units of their spreads, (effects,).
        slopes: whether to compute the Jacobian, which is 0 otherwise.
        """
        effects = dict(zip(spread, (z * sd).tolist(), strict=True))
        known = {group: constants(effects, group) for group in groups}
        nudged: dict[Group, dict[str, Calibration]] = {}
        if slopes:
            for group, c in known.items():
                nudged[group] = {n: replace(c, **{n: getattr(c, n) * _STEP}) for n in PRIORS}
        errors = np.empty(len(observed))
        jacobian = np.zeros((len(observed), len(sd)))
        for i, one in enumerate(observed):
            seconds = predicted_s(one, known[one.group])
            errors[i] = math.log(seconds / one.measured_s) + effects.get(Term(TIME, one.table), 0.0)
            if not slopes:
                continue
            slope = {}
            for n, c in nudged[one.group].items():
                slope[n] = math.log(predicted_s(one, c) / seconds) / math.log(_STEP)
            for term in groups[one.group]:
                jacobian[i, index[term]] = slope.get(term.factor, 1.0)
        return errors / noise, jacobian * sd / noise[:, None]

    # Squaring these residuals gives the soft L1 loss 2 · (√(1 + r²) - 1) of each run, plus z² of
    # each prior.
    def function(z: FloatArray) -> FloatArray:
        r, _ = residuals(z, slopes=False)
        return np.concatenate([np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r * r) - 1)), z])

    # Jacobian of `function`: the weight is the derivative of the soft residual by r.
    def weighted(z: FloatArray) -> FloatArray:
        r, jacobian = residuals(z, slopes=True)
        root = np.sqrt(1 + r * r)
        soft = np.sqrt(2 * (root - 1))
        weight = np.where(soft > 1e-6, np.abs(r) / root / np.maximum(soft, 1e-9), 1.0)
        return np.vstack([weight[:, None] * jacobian, np.eye(len(sd))])

    found = least_squares(function, np.zeros(len(sd)), jac=weighted, max_nfev=15, ftol=1e-4)
    return dict(zip(spread, (found.x * sd).tolist(), strict=True)), weighted(found.x)
