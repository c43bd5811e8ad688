"""Fits the cost model's parameters to measured shapes: maximum a posteriori, by L-BFGS.

The loss is pseudo-Huber in log time, so that outliers do not bend the rest. The penalty is the distance from the prior
in its standard deviations. Entry point: `fit_parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.latency.autodiff import Variable, gradient, value_of
from quantbench.latency.gemm.cost_model import Machine, Shapes, Values, chosen_time, keep_freed_memory, kernel_parts
from quantbench.latency.gemm.menu import Menu

FloatArray = npt.NDArray[np.float64]

_DELTA = 0.05  # log time where the loss turns from square to straight
_NOISE = 0.05  # log time that a row is off without the model being wrong
# Of naming a recorded kernel, beside its time. More bends the times of kernels towards a choice that the form does not
# explain: with 0.5, products of which the kernel is known came out worse than without names.
_CHOICE_WEIGHT = 0.02


@dataclass(frozen=True)
class Prior:
    """What is expected of the parameters, (parameters + tiles,) each, and where from, in words."""

    mean: FloatArray
    sd: FloatArray
    source: str


@dataclass(frozen=True)
class Measured:
    """Measured shapes, (rows,) each. kernel: index in the menu of the kernel that was recorded, -1 where none was."""

    m: FloatArray
    n: FloatArray
    k: FloatArray
    log_us: FloatArray
    kernel: npt.NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.m)

    def take(self, rows: npt.NDArray[np.intp]) -> Measured:
        """Only these rows."""
        return Measured(self.m[rows], self.n[rows], self.k[rows], self.log_us[rows], self.kernel[rows])


def fit_parameters(
    machine: Machine,
    menu: Menu,
    rows: Measured,
    prior: Prior,
    *,
    start: FloatArray | None = None,
    max_iterations: int = 250,
) -> FloatArray:
    """The parameter vector (parameters + tiles,) that explains the rows best without straying from the prior."""
    from scipy.optimize import minimize

    keep_freed_memory()

    shapes = Shapes(machine, menu, rows.m, rows.n, rows.k)
    named = np.flatnonzero(rows.kernel >= 0)

    def objective(u: FloatArray) -> tuple[float, FloatArray]:
        source = Variable(prior.mean + prior.sd * u)
        values = Values(source)
        log_time = kernel_parts(values, shapes)[0]
        predicted = chosen_time(values, shapes, log_time)
        weight = np.ones(len(rows))
        seed = np.zeros(len(rows))
        loss = 0.0
        total = None
        if len(named):
            # A recorded kernel's own time is held against the measurement, and the choice against its name.
            at = rows.kernel[named] * len(rows) + named
            own = _entries(log_time, at)
            part, slope = _pseudo_huber(own.value - rows.log_us[named])
            width = np.exp(value_of(values["choice"]))[0]
            doubt = (own - _rows(predicted, named)) * float(_CHOICE_WEIGHT / width)
            loss += part + float(doubt.value.sum())
            total = (own * slope + doubt, np.ones(len(named)))
            weight[named] = 0.25
        part, slope = _pseudo_huber(predicted.value - rows.log_us, weight)
        loss += part
        seed += slope
        grad = gradient(predicted, source, seed)
        if total is not None:
            grad = grad + gradient(total[0], source, total[1])
        return loss + 0.5 * float(u @ u), grad * prior.sd + u

    first = np.zeros(len(prior.mean)) if start is None else (start - prior.mean) / prior.sd
    options = {"maxiter": max_iterations, "maxcor": 20}
    found = minimize(objective, first, jac=True, method="L-BFGS-B", options=options, bounds=[(-6.0, 6.0)] * len(first))
    return np.asarray(prior.mean + prior.sd * found.x)


def _pseudo_huber(error: FloatArray, weight: FloatArray | float = 1.0) -> tuple[float, FloatArray]:
    """(summed loss, its slope by row)."""
    bend = np.sqrt(1.0 + (error / _DELTA) ** 2)
    scale = np.asarray(weight) / _NOISE**2
    return float((scale * _DELTA**2 * (bend - 1.0)).sum()), scale * error / bend


def _entries(x: Variable, flat: npt.NDArray[np.intp]) -> Variable:
    """Entries of a (kernels, rows) variable by flat index."""
    shape = x.value.shape

    def back(g: FloatArray) -> FloatArray:
        whole = np.zeros(shape)
        whole.ravel()[flat] = g
        return whole

    return Variable(x.value.ravel()[flat], ((x, back),))


def _rows(x: Variable, rows: npt.NDArray[np.intp]) -> Variable:
    return x.take(rows)
