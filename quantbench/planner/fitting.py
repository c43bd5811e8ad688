"""Fits the planner's factors to measured training iterations.

`fit_site` fits the factors of one site for `plan --fit`. `solve` is the underlying least-squares
fit, which the developers' tools also use to fit many stacks and GPUs together. It is a robust (soft
L1) fit of log times. Factors have normal priors on the log scale, so a few measurements change them
little. A table with more than eight runs counts as eight runs, because its runs repeat a few
layouts.
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

# Standard deviation of ln time between repeated runs, or similar runs, of one table.
_ROW_SPREAD = 0.03
# Largest weight of a table in a fit, as a number of runs. All runs of a larger table together have
# this weight.
_RUNS_THAT_COUNT = 8
# Multiplier of a factor for the finite-difference slope of the predicted time.
_STEP = 0.99
# Fraction of measured times that the intervals of predicted times cover.
_COVERED = 0.9
# Minimum number of measured runs for the fit of a site.
_FEWEST = 5
# A factor counts as undetermined if the fit leaves at least this fraction of its prior's spread.
_DETERMINED = 0.7
# Two factors count as confounded if the absolute correlation of their errors exceeds this value.
_CONFOUNDED_CORRELATION = 0.7
# A factor counts as unusual if the fit moves it by more than this multiple of its prior's spread.
_UNUSUAL = 2


class Prior(NamedTuple):
    """Prior standard deviations of a factor's effects, on the log scale.

    A factor is a mean times the exponential of its summed effects. 0 means no such effect.

    common: effect on all runs, or for elementwise_factor, on all runs with one kind of kernels
        (`Stack.kernels`).
    stack: effect of a software stack.
    gpu: effect of a GPU architecture.
    both: additional effect of one stack on one GPU architecture.
    site: effect of a table. The runs of a table share a site.
    """

    common: float
    stack: float = 0.0
    gpu: float = 0.0
    both: float = 0.0
    site: float = 0.0


#: prior of each fitted factor, by the factor's name in `Calibration`
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
#: value of `Term.factor` for an effect that scales all times of a table instead of one factor
TIME = "time"


class Term(NamedTuple):
    """Identifies one effect on the logarithm of a factor.

    factor: name of the factor, or TIME.
    key: name of the runs that share the effect, such as a stack or a table; "" for all runs.
    """

    factor: str
    key: str


#: (stack, GPU architecture, table) of a run
Group = tuple[str, str, str]
#: effects, or their prior spreads, on the log scale
Effects = dict[Term, float]


@dataclass(frozen=True)
class Observed:
    """A measured training run.

    case: job and layout of the run.
    layers: modelled layer times of the job.
    measured_s: measured time per iteration, in s.
    table: name of the table that lists the run. Its runs share a site and software.
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
    """Prepares measured runs for fits.

    Runs with equal models and clusters share one cache of layer times.

    runs: (case, time per iteration in s, name of the table) of each run.
    times: function from a GPU to its op times.
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
    """Returns the predicted time per iteration of a measured run, in s."""
    return iteration(one.case.job, one.case.layout, one.layers, calibration).sec.mid


def log_errors(observed: Sequence[Observed], calibration: Calibration) -> FloatArray:
    """Returns ln(predicted time / measured time) of each run, (observed,)."""
    return np.log([predicted_s(one, calibration) / one.measured_s for one in observed])


def op_spreads(observed: Sequence[Observed], errors: FloatArray) -> FloatArray:
    """Returns the half-width in ln time that the op times give each run's interval, (observed,).

    The half-width is measured on the side of the measured time: the upper side if the prediction is
    too short, else the lower side.

    errors: ln(predicted / measured) of each run, (observed,).
    """
    sides = []
    for one, error in zip(observed, errors, strict=True):
        span = iteration(one.case.job, one.case.layout, one.layers, start_from({})).sec
        sides.append((span.high if error < 0 else span.low) / span.mid)
    return np.abs(np.log(sides))


def scatter_beyond(observed: Sequence[Observed], errors: FloatArray) -> float:
    """Returns the half-width in ln time of an additional error, as for `Calibration.scatter`.

    Added in quadrature to the half-widths from the op times, it covers 90 % of `errors`.

    errors: ln(predicted / measured) of each run, (observed,).
    """
    beyond = np.maximum(errors**2 - op_spreads(observed, errors) ** 2, 0.0)
    return float(np.quantile(np.sqrt(beyond), _COVERED))


def start_from(rest: Mapping[str, float]) -> Calibration:
    """Returns the factors of ideal training, in which every op takes its isolated time.

    rest: factors that are not fitted to times, by name. They replace the default values.
    """
    values: dict[str, Any] = {"base_gib": 4.0, "activation_slack": 0.1, **rest}
    return Calibration(1.0, 0.0, 1.0, **values)


def fit_site(observed: Sequence[Observed], prior: Calibration) -> Calibration:
    """Fits all factors in PRIORS to the measured runs of one site.

    The result's provenance lists three kinds of factors. An `undetermined` factor stays close to
    its prior value, because the runs hardly depend on it. For a `confounded` pair, only the joint
    effect of the two factors is known. An `unusual` factor differs from its prior value by more
    than two prior standard deviations, which is expected for 5 % of sites.

    prior: factors of the site's stack. They are the prior values of the fit.

    Raises InputError if there are fewer than five runs.
    """
    if len(observed) < _FEWEST:
        what = f"{counted(len(observed), 'row')} with a time"
        raise InputError("plan --fit", what, f"at least {_FEWEST}")
    spread = {Term(name, ""): math.sqrt(sum(s**2 for s in prior)) for name, prior in PRIORS.items()}

    def constants(effects: Effects, _: object) -> Calibration:
        """Returns the site's factors with these effects, clipped to their plausible ranges."""
        values = {}
        for name, _ in effects:
            low, high = RANGES[name]
            # Effects multiply the factor, so a factor of 0 starts slightly above 0.
            value = max(getattr(prior, name), 1e-3) * math.exp(effects[Term(name, "")])
            values[name] = min(max(value, low / _STEP), high)  # so that a step down stays inside
        return replace(prior, **values)

    effects, jacobian = solve(observed, lambda _: spread, constants)
    found = constants(effects, None)
    names = list(PRIORS)
    # Covariance of the fitted effects, each in units of its prior's spread. The last rows of the
    # Jacobian belong to the priors and form the identity matrix, so the product is invertible.
    covariance = np.linalg.inv(jacobian.T @ jacobian)
    spread_left = np.sqrt(np.diag(covariance))
    apart = np.abs(covariance / np.outer(spread_left, spread_left)) <= _CONFOUNDED_CORRELATION
    # A factor on which the runs do not depend at all cannot be confounded.
    unsure = np.flatnonzero(spread_left < 1 - 1e-3)
    pairs = [(names[i], names[j]) for i, j in combinations(unsure, 2) if not apart[i, j]]
    rows = jacobian[: len(observed)]
    leverage = np.einsum("ij,jk,ik->i", rows, covariance, rows)
    # Leave-one-out error of each run in the linearised fit: the run's error over 1 - leverage. The
    # lower bound of 0.1 limits the leave-one-out error to ten times the run's error.
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
    """Fits effects by minimizing the runs' robust log errors plus the priors' penalties.

    Returns the fitted effects and the Jacobian of the residuals, (observed + effects, effects). The
    Jacobian's first rows belong to the runs and its last rows to the priors. Derivatives are with
    respect to effects in units of their prior spreads.

    spreads: function from a group to the prior spread of each effect on the group's runs.
    constants: function from effects and a group to the group's factors.
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
        """Returns the runs' log errors in units of their noise, and the Jacobian by z.

        z: effects in units of their prior spreads, (effects,).
        slopes: whether to compute the Jacobian; False returns a Jacobian of zeros.
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

    # Residuals whose squares are the soft L1 loss of each run, 2 · (√(1 + r²) - 1), and z² for each
    # prior.
    def function(z: FloatArray) -> FloatArray:
        r, _ = residuals(z, slopes=False)
        return np.concatenate([np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r * r) - 1)), z])

    # Jacobian of `function`. The weight is the derivative of a run's soft L1 residual by r.
    def weighted(z: FloatArray) -> FloatArray:
        r, jacobian = residuals(z, slopes=True)
        root = np.sqrt(1 + r * r)
        soft = np.sqrt(2 * (root - 1))
        weight = np.where(soft > 1e-6, np.abs(r) / root / np.maximum(soft, 1e-9), 1.0)
        return np.vstack([weight[:, None] * jacobian, np.eye(len(sd))])

    found = least_squares(function, np.zeros(len(sd)), jac=weighted, max_nfev=15, ftol=1e-4)
    return dict(zip(spread, (found.x * sd).tolist(), strict=True)), weighted(found.x)
