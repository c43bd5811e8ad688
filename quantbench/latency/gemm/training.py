"""Fits a GEMM ensemble and its interval to measured rows, starting from a prior learned on other
GPUs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

import numpy as np

from quantbench.device.registry import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import StoreError
from quantbench.latency.autodiff import Variable, gradient
from quantbench.latency.estimate import IntervalCalibration
from quantbench.latency.families import family, generation, unit
from quantbench.latency.gemm.cost_model import (
    INDEX,
    UNVARIED,
    FloatArray,
    Machine,
    Menu,
    Shapes,
    Values,
    hand_prior,
    keep_freed_memory,
    log_latency,
    runs_in_waves,
)
from quantbench.latency.gemm.ensemble import Ensemble
from quantbench.latency.gemm.member import Growth, Member, TrainingRows, train_member

POOL_FORMAT = "quantbench-gemm-pool"
POOL_VERSION = 1
# Prior deviations as shares of the hand prior's: between two tables of one GPU, between two GPUs of
# one family, and the least between families. Tuned on the five public tables that `tools.accuracy`
# evaluates.
_SAME_GPU, _SAME_FAMILY, _OTHER_FAMILY = 0.4, 0.5, 0.6
# Half-width (log time) if no table of the dtype was measured on the same unit. It covers 90 % of
# the rows of the fp8 tables of aiconfigurator-core 0.12.0 (vLLM 0.24.0) of H100, H200, B200, L40S
# and RTX PRO 6000, GPUs weighted equally.
_UNKNOWN = 1.4
# A GPU outside the pool errs more than the worst of the few inside: with this factor the intervals
# of L40S (bf16), B200 (fp8) and V100 (fp16) cover 90 % of their rows, each predicted from the
# others.
_BEYOND = 1.2


@dataclass(frozen=True)
class Prior:
    """Gaussian prior of the parameters: mean and sd, (parameters + tiles,) each, and the source of
    both.
    """

    mean: FloatArray
    sd: FloatArray
    source: str


@dataclass(frozen=True)
class Known:
    """Parameters of one measured GPU, fitted from the hand prior.

    blind_90: 90th percentile of |log time error| on its table of the prior pooled from the other
        families.
    """

    device: str
    family: str
    dtype: str
    parameters: FloatArray
    rows: int
    table: str
    blind_90: float


@cache
def shipped_pool() -> tuple[Known, ...]:
    """Reads the packaged parameters of measured GPUs."""
    text = (files("quantbench.latency") / "models" / "pool.json").read_text(encoding="utf-8")
    data = json.loads(text)
    if data.get("format") != POOL_FORMAT or data.get("version") != POOL_VERSION:
        raise StoreError(
            "shipped_pool",
            f"format {data.get('format')!r} version {data.get('version')!r}",
            POOL_FORMAT,
        )
    return tuple(Known(**{**k, "parameters": np.array(k["parameters"])}) for k in data["known"])


def pooled(known: Sequence[Known], base: Prior) -> Prior:
    """Builds the prior from the families' mean parameters and `base`, with the spread between
    families.
    """
    if not known:
        return base
    by_family: dict[str, list[FloatArray]] = defaultdict(list)
    for k in known:
        by_family[k.family].append(k.parameters)
    centres = np.array([np.mean(group, axis=0) for group in by_family.values()])
    count = len(centres)
    pool = (centres.sum(axis=0) + base.mean) / (count + 1.0)
    variance = (((centres - pool) ** 2).sum(axis=0) + 2.0 * (_OTHER_FAMILY * base.sd) ** 2) / (
        count + 1.0
    )
    return _without_host(Prior(pool, np.sqrt(variance), "pooled over " + _names(known)))


def near(known: Sequence[Known], *, same_gpu: bool) -> Prior:
    """Builds the prior around the mean of entries of the same GPU or of GPUs of its family."""
    _, sd = hand_prior()
    mean = np.mean([k.parameters for k in known], axis=0)
    if same_gpu:
        return Prior(mean, _SAME_GPU * sd, _names(known))
    return _without_host(Prior(mean, _SAME_FAMILY * sd, _names(known)))


def _names(known: Sequence[Known]) -> str:
    return ", ".join(sorted({k.device for k in known}))


def _without_host(prior: Prior) -> Prior:
    """Resets the host's work in a time to the hand prior: it belongs to a table, not to a GPU."""
    at, (hand, sd) = INDEX["host"], hand_prior()
    prior.mean[at], prior.sd[at] = hand[at], sd[at]
    return prior


def spec_sheet(device: DeviceSpec, dtype: str) -> Prior:
    """Returns the prior of a GPU without any measured table: the hand prior, which was made for
    tensor cores.

    Two parameters differ on CUDA cores: misaligned rows cost nothing (only tensor cores need
    16-byte alignment; cuBLAS documentation, "Tensor Core Usage"), and a pipeline fill of about the
    same time is worth fewer elements of k.
    """
    mean, sd = hand_prior()
    which = unit(device, dtype)
    peak, other = device.peak(dtype), device.peak("fp16") or device.peak("bf16")
    if which == "CUDA cores":
        mean[INDEX["misaligned"]] = 0.0
        if peak is not None and other is not None and unit(device, "fp16") == "tensor cores":
            mean[INDEX["fill"]] += np.log(peak / other)
    return Prior(mean, sd, f"the peak of its {which} and its bandwidth")


def known_in_waves(device: DeviceSpec, dtype: str) -> bool:
    """Returns whether GEMMs run in waves according to the shipped parameters of this GPU, or else
    of its family.
    """
    return _known_in_waves(device.name, family(device), unit(device, dtype), dtype)


@cache
def _known_in_waves(device: str, family_name: str, which: str, dtype: str) -> bool:
    usable = [k for k in shipped_pool() if _teaches(k, which, dtype)]
    known = [k for k in usable if k.device == device] or [
        k for k in usable if k.family == family_name
    ]
    return bool(known) and runs_in_waves([k.parameters for k in known])


def _teaches(known: Known, which: str, dtype: str) -> bool:
    """Returns whether an entry applies to a dtype on a unit. fp16 learns from bf16 too: it runs at
    the same rate.
    """
    same = known.dtype == dtype or (dtype == "fp16" and known.dtype == "bf16")
    return same and unit(lookup(known.device), known.dtype) == which


# This card, made in 7 nm, runs fp32 at its peak within its power: less power a TFLOP/s than any
# CUDA cores of older processes.
_LEAST_POWER = "a100-pcie-40gb"


def _powered(device: DeviceSpec, dtype: str) -> float:
    """Returns the log share of its peak that a card's power allows, at most 0; 0 but for CUDA cores
    up to 7 nm.
    """
    newer = device.compute_capability is None or device.compute_capability > (8, 0)
    if newer or not device.board_power_w or unit(device, dtype) != "CUDA cores":
        return 0.0
    known = lookup(_LEAST_POWER)
    needed_w = known.board_power_w / (known.peak("fp32") or 1.0) * (device.peak(dtype) or 1.0)
    return min(0.0, float(np.log(device.board_power_w / needed_w)))


def choose(
    device: DeviceSpec, dtype: str, known: Sequence[Known], *, family_out: bool
) -> tuple[Prior, float]:
    """Returns the prior for a device and the half-width (log time) of a 90 % interval around its
    unfitted prediction.

    known: entries of measured GPUs. Those of the same unit and dtype apply (`_teaches`); without
        any, the prior is
    `spec_sheet`. family_out: whether to exclude all GPUs of the device's generation, itself
    included.
    """
    base = spec_sheet(device, dtype)
    usable = [k for k in known if _teaches(k, unit(device, dtype), dtype)]
    others = [k for k in usable if generation(k.family) != generation(family(device))]
    blind = _BEYOND * max((k.blind_90 for k in others), default=_UNKNOWN / _BEYOND)
    if not family_out:
        own = [k for k in usable if k.device == device.name]
        if own:
            return near(own, same_gpu=True), blind / 2
        kin = [k for k in usable if k.family == family(device)]
        if kin:
            return near(kin, same_gpu=False), blind
        others = usable
    efficiency = np.eye(len(base.mean))[INDEX["efficiency"]]  # relative to what the power allows
    start = pooled(
        [
            replace(k, parameters=k.parameters - _powered(lookup(k.device), k.dtype) * efficiency)
            for k in others
        ],
        base,
    )
    start = replace(start, mean=start.mean + _powered(device, dtype) * efficiency)
    return start, blind if others else _UNKNOWN


_DELTA = 0.05  # log error at which the loss turns from quadratic to linear
_NOISE = 0.05  # standard deviation of measurement noise, log time


#: fewest rows for a fit; with fewer, the prior is returned
FEWEST_ROWS = 20
#: fewest rows for growing trees
FEWEST_FOR_TREES = 60
_FOLDS = 5
# The 0.9 quantile of some two hundred errors depends on twenty rows of a few sites, so coverage
# would vary. It is estimated as the geometric mean of lower quantiles, each times the typical ratio
# of the 0.9 quantile to it. The ratios (from folds of the public tables' training sites) vary
# little between GPUs and numbers of rows.
_TAILS = ((0.6, 2.24), (0.7, 1.77), (0.8, 1.38))
# Errors of a fold (one member, four fifths of the rows) over those of the full ensemble.
_FOLD_EXCESS = 1.04
# Noise added to the prior (share of its deviation) and the rows (log time) of members after the
# first, so that members differ in what the rows do not determine. The prior of the parameters in
# UNVARIED is left as it is.
_SHAKEN_PRIOR, _SHAKEN_ROWS = 0.7, 0.08
_UNLIKELY = 0.04


@dataclass(frozen=True)
class Effort:
    """Effort of a fit: number of cost models, most rows to fit the first and the others, settings
    of their trees.
    """

    members: int = 2
    rows_first: int = 800
    rows_other: int = 400
    growth: Growth = field(default_factory=Growth)

    @classmethod
    def of(cls, rows: int) -> Effort:
        """Returns the default for this many rows. Below 150 a fit varies with single rows: more are
        averaged.
        """
        return cls(members=4) if rows < 150 else cls()


#: most rows of a table that a model is fitted to
TABLE_ROWS = 8000
#: effort for thousands of rows: ten trees keep a file near 0.2 MB
TABLE_EFFORT = Effort(members=2, rows_first=1000, rows_other=600, growth=Growth(trees=10, leaf=3))


def fit_parameters(
    machine: Machine,
    menu: Menu,
    rows: TrainingRows,
    prior: Prior,
    *,
    start: FloatArray | None = None,
    max_iterations: int = 250,
) -> FloatArray:
    """Returns the parameter vector, (parameters + tiles,), with the least loss plus penalty.

    The loss is pseudo-Huber in log time, which is robust to outliers. The penalty is half the
    squared distance from the prior in its standard deviations.
    """
    from scipy.optimize import minimize

    keep_freed_memory()
    shapes = Shapes(machine, menu, *rows.sizes)

    def objective(u: FloatArray) -> tuple[float, FloatArray]:
        source = Variable(prior.mean + prior.sd * u)
        values = Values(source)
        predicted = log_latency(values, shapes)[0]
        loss, slope = _pseudo_huber(predicted.value - rows.log_us)
        grad = gradient(predicted, source, slope)
        return loss + 0.5 * float(u @ u), grad * prior.sd + u

    first = np.zeros(len(prior.mean)) if start is None else (start - prior.mean) / prior.sd
    options = {"maxiter": max_iterations, "maxcor": 20}
    found = minimize(
        objective,
        first,
        jac=True,
        method="L-BFGS-B",
        options=options,
        bounds=[(-6.0, 6.0)] * len(first),
    )
    return np.asarray(prior.mean + prior.sd * found.x)


def _pseudo_huber(error: FloatArray) -> tuple[float, FloatArray]:
    """Returns the summed loss and its slope by row."""
    bend = np.sqrt(1.0 + (error / _DELTA) ** 2)
    return float((_DELTA**2 * (bend - 1.0)).sum()) / _NOISE**2, error / bend / _NOISE**2


def train(
    machine: Machine,
    menu: Menu,
    rows: TrainingRows,
    prior: Prior,
    reference: Ensemble | None,
    effort: Effort,
    seed: int,
) -> tuple[Ensemble, IntervalCalibration]:
    """Fits the members, grows their trees and calibrates the interval by cross-validation."""
    rng = np.random.default_rng(seed)
    vectors = _member_parameters(machine, menu, rows, prior, effort, rng)
    menu = _likely(machine, menu, rows, vectors)
    residual = None if reference is None else reference.correction(*rows.sizes)
    ensemble = Ensemble(
        machine, menu, _members(machine, menu, rows, vectors, residual, effort, seed), reference
    )
    return ensemble, _calibrate(ensemble, rows, prior, residual, effort, seed)


def _members(
    machine: Machine,
    menu: Menu,
    rows: TrainingRows,
    vectors: Sequence[FloatArray],
    known: FloatArray | None,
    effort: Effort,
    seed: int,
) -> tuple[Member, ...]:
    if len(rows) < FEWEST_FOR_TREES:
        return tuple(Member(vector, None) for vector in vectors)
    return tuple(
        train_member(machine, menu, vector, rows, known, effort.growth, seed=1000 * seed + i)
        for i, vector in enumerate(vectors)
    )


def _member_parameters(
    machine: Machine,
    menu: Menu,
    rows: TrainingRows,
    prior: Prior,
    effort: Effort,
    rng: np.random.Generator,
) -> list[FloatArray]:
    order = rng.permutation(len(rows))
    varied = np.delete(np.arange(len(prior.mean)), UNVARIED)
    vectors = [fit_parameters(machine, menu, rows.take(order[: effort.rows_first]), prior)]
    for _ in range(1, effort.members):
        part = rows.take(rng.permutation(len(rows))[: effort.rows_other])
        shaken = replace(part, log_us=part.log_us + _SHAKEN_ROWS * rng.standard_normal(len(part)))
        mean = prior.mean.copy()
        mean[varied] += _SHAKEN_PRIOR * prior.sd[varied] * rng.standard_normal(len(varied))
        vectors.append(fit_parameters(machine, menu, shaken, replace(prior, mean=mean)))
    return vectors


def _likely(
    machine: Machine, menu: Menu, rows: TrainingRows, vectors: Sequence[FloatArray]
) -> Menu:
    """Returns the kernels that some member would choose: the cost of a prediction is proportional
    to the menu.
    """
    rng = np.random.default_rng(0)
    count = 1000
    m = np.concatenate([np.floor(2 ** rng.uniform(0, 15, count)), rows.m[:count]])
    n, k = (
        np.concatenate([8 * np.floor(2 ** rng.uniform(2, 13, count)), own[:count]])
        for own in (rows.n, rows.k)
    )
    batch = np.concatenate(
        [np.ones(count), rows.batch[:count]]
    )  # the layout does not matter to the kernels' times
    shapes = Shapes(machine, menu, m, n, k, batch)
    likely = np.zeros(len(menu))
    for vector in vectors:
        member = Member(vector, None)
        weights = member.weights(member.physics(shapes)[1])
        likely = np.maximum(likely, np.quantile(weights, 0.98, axis=1))
    return menu.subset(np.flatnonzero(likely > _UNLIKELY))


def _calibrate(
    ensemble: Ensemble,
    rows: TrainingRows,
    prior: Prior,
    known: FloatArray | None,
    effort: Effort,
    seed: int,
) -> IntervalCalibration:
    """Calibrates the interval on the errors of folds of (n, k) sites, each predicted by a fit
    without it.
    """
    machine, menu = ensemble.machine, ensemble.menu
    rng = np.random.default_rng(seed)
    sites, site = np.unique(np.stack([rows.n, rows.k, rows.batch]), axis=1, return_inverse=True)
    fold_of = (rng.permutation(sites.shape[1]) % _FOLDS)[site.ravel()]
    error, variance = np.zeros(len(rows)), np.zeros(len(rows))
    single = replace(effort, members=1, rows_first=effort.rows_other)
    for fold in range(_FOLDS):
        inside, outside = np.flatnonzero(fold_of == fold), np.flatnonzero(fold_of != fold)
        if not len(inside) or not len(outside):
            continue
        seen = rows.take(outside)
        few = seen.take(rng.permutation(len(seen))[: single.rows_first])
        vector = fit_parameters(
            machine, menu, few, prior, start=ensemble.members[0].parameters, max_iterations=80
        )
        members = _members(
            machine, menu, seen, [vector], None if known is None else known[outside], single, seed
        )
        held = rows.take(inside)
        answer = Ensemble(machine, menu, members, ensemble.reference).raw(*held.sizes)
        error[inside], variance[inside] = np.abs(answer.log_us - held.log_us), answer.variance
    # A fold has a single member, so the variance between members is added.
    between = [member.physics(Shapes(machine, menu, *rows.sizes))[0] for member in ensemble.members]
    variance += np.var(between, axis=0)
    found = IntervalCalibration.of_held_out(error, variance, _TAILS)
    return replace(found, factor=found.factor / _FOLD_EXCESS)
