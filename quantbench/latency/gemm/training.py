"""Chooses the prior of a GEMM model, and fits the model to measured rows.

`choose` makes the prior from the shipped parameters of measured GPUs, or from the spec sheet.
`train` fits several members, each a cost model with trees, and calibrates the 90 % interval by
cross-validation. `GemmModel.fit` calls both functions.
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
from quantbench.latency.autodiff import FloatArray, Variable, gradient
from quantbench.latency.estimate import IntervalCalibration
from quantbench.latency.families import family, generation, unit
from quantbench.latency.gemm.cost_model import (
    INDEX,
    UNVARIED,
    Machine,
    Menu,
    Shapes,
    Sizes,
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
# The hand prior's standard deviation times one of these factors is the deviation of a learned
# prior. _SAME_GPU applies to a prior from another table of the same GPU, and _SAME_FAMILY to a
# prior from GPUs of the same family. In a prior pooled over families, _OTHER_FAMILY sets the term
# that does not depend on how much the families differ (`pooled`). The factors were tuned on the
# five public tables that `tools.accuracy` evaluates.
_SAME_GPU = 0.4
_SAME_FAMILY = 0.5
_OTHER_FAMILY = 0.6
# Half-width (log time) of an unfitted model's interval if the pool has no GPU of another generation
# with the same dtype and unit. The interval covers 90 % of the rows in five fp8 tables of
# aiconfigurator-core 0.12.0 (vLLM 0.24.0; H100, H200, B200, L40S and RTX PRO 6000), with the GPUs
# weighted equally.
_UNKNOWN = 1.4
# If the pool has such GPUs, the half-width is their largest error (`MeasuredGpu.blind_90`) times
# this factor. The factor is above 1, because a GPU outside the pool has larger errors than the
# worst of the few GPUs inside. With this factor, the intervals of L40S (bf16), B200 (fp8) and V100
# (fp16) cover 90 % of their rows when each GPU is predicted from the others.
_BEYOND = 1.2


@dataclass(frozen=True)
class Prior:
    """Gaussian prior of a cost model's parameters.

    mean, sd: (parameters + tiles,), mean and standard deviation.
    source: GPUs or specification that the prior was made from, for notes.
    """

    mean: FloatArray
    sd: FloatArray
    source: str


@dataclass(frozen=True)
class MeasuredGpu:
    """Cost model parameters that were fitted to one GPU's table; an entry of the pool.

    parameters: (parameters + tiles,), fitted parameters of the cost model.
    rows: number of measured shapes that were fitted.
    table: name of the table; "" for the parameters of a `GemmModel`.
    blind_90: 90th percentile of the absolute error (log time) on this table, if a prior from other
        GPU generations predicts it; 0.0 for the parameters of a `GemmModel`.
    """

    device: str
    family: str
    dtype: str
    parameters: FloatArray
    rows: int
    table: str
    blind_90: float


@cache
def shipped_pool() -> tuple[MeasuredGpu, ...]:
    """Returns the pool: the parameters of measured GPUs that are part of the package.

    The parameters were fitted from the hand prior. Raises StoreError if the pool's file has another
    format or version.
    """
    text = (files("quantbench.latency") / "models" / "pool.json").read_text(encoding="utf-8")
    data = json.loads(text)
    if data.get("format") != POOL_FORMAT or data.get("version") != POOL_VERSION:
        what = f"format {data.get('format')!r} version {data.get('version')!r}"
        raise StoreError("shipped_pool", what, POOL_FORMAT)
    return tuple(
        MeasuredGpu(**{**gpu, "parameters": np.array(gpu["parameters"])}) for gpu in data["known"]
    )


def pooled(gpus: Sequence[MeasuredGpu], base: Prior) -> Prior:
    """Returns the prior pooled from each family's mean parameters and from `base`.

    `base` counts as one more family. The prior's standard deviation includes the spread between
    families. Without GPUs, the result is `base`.
    """
    if not gpus:
        return base
    by_family: dict[str, list[FloatArray]] = defaultdict(list)
    for gpu in gpus:
        by_family[gpu.family].append(gpu.parameters)
    centres = np.array([np.mean(group, axis=0) for group in by_family.values()])
    count = len(centres) + 1.0
    pool = (centres.sum(axis=0) + base.mean) / count
    # The last term counts the base's variance twice. It keeps the prior from becoming narrow if few
    # families happen to agree.
    squares = ((centres - pool) ** 2).sum(axis=0) + 2.0 * (_OTHER_FAMILY * base.sd) ** 2
    return _without_host(Prior(pool, np.sqrt(squares / count), "pooled over " + _names(gpus)))


def near(gpus: Sequence[MeasuredGpu], *, same_gpu: bool) -> Prior:
    """Returns a prior around the mean parameters of one family's GPUs.

    gpus: pool entries of the family, at least one.
    same_gpu: whether all entries are of the GPU that the prior is for. The prior is then narrower.
    """
    _, sd = hand_prior()
    mean = np.mean([gpu.parameters for gpu in gpus], axis=0)
    if same_gpu:
        return Prior(mean, _SAME_GPU * sd, _names(gpus))
    return _without_host(Prior(mean, _SAME_FAMILY * sd, _names(gpus)))


def _names(gpus: Sequence[MeasuredGpu]) -> str:
    return ", ".join(sorted({gpu.device for gpu in gpus}))


def _without_host(prior: Prior) -> Prior:
    """Returns the prior with the parameter "host" reset to the hand prior.

    The host's work in measured times depends on how a table was measured, not on the GPU. The
    prior's arrays are changed in place.
    """
    host = INDEX["host"]
    mean, sd = hand_prior()
    prior.mean[host] = mean[host]
    prior.sd[host] = sd[host]
    return prior


def spec_sheet(device: DeviceSpec, dtype: str) -> Prior:
    """Returns the prior of a GPU without any measured table.

    The result is the hand prior, which was made for tensor cores. On CUDA cores, two parameters
    differ. First, misaligned rows cost nothing, because only tensor cores need 16-byte alignment
    (cuBLAS documentation, "Tensor Core Usage"). Second, the parameter "fill" is smaller: filling
    the pipeline takes about as long, but CUDA cores multiply fewer elements of k in that time.
    """
    mean, sd = hand_prior()
    which = unit(device, dtype)
    peak = device.peak(dtype)
    other = device.peak("fp16") or device.peak("bf16")
    if which == "CUDA cores":
        mean[INDEX["misaligned"]] = 0.0
        if peak is not None and other is not None and unit(device, "fp16") == "tensor cores":
            mean[INDEX["fill"]] += np.log(peak / other)
    return Prior(mean, sd, f"the peak of its {which} and its bandwidth")


def known_in_waves(device: DeviceSpec, dtype: str) -> bool:
    """Returns whether GEMMs run in waves on a device, according to the shipped parameters.

    The parameters are those of this GPU, or else of its family. The result is False if neither is
    shipped.
    """
    return _known_in_waves(device.name, family(device), unit(device, dtype), dtype)


@cache
def _known_in_waves(device: str, family_name: str, which: str, dtype: str) -> bool:
    related = _related(_applicable(shipped_pool(), which, dtype), device, family_name)
    return bool(related) and runs_in_waves([gpu.parameters for gpu in related])


def _related(gpus: Sequence[MeasuredGpu], device: str, family_name: str) -> list[MeasuredGpu]:
    """Returns the pool entries of a GPU, or else the entries of its family."""
    same = [gpu for gpu in gpus if gpu.device == device]
    return same or [gpu for gpu in gpus if gpu.family == family_name]


def _applicable(gpus: Sequence[MeasuredGpu], which: str, dtype: str) -> list[MeasuredGpu]:
    """Returns the pool entries for a dtype that were measured on a unit.

    Entries for bf16 also apply to fp16, which runs at the same rate.

    which: unit, such as "tensor cores" (`families.unit`).
    """
    dtypes = {dtype, "bf16"} if dtype == "fp16" else {dtype}

    def applies(gpu: MeasuredGpu) -> bool:
        return gpu.dtype in dtypes and unit(lookup(gpu.device), gpu.dtype) == which

    return list(filter(applies, gpus))


# Reference card for power. CUDA cores made in 7 nm or an older process are assumed to need at least
# this card's power per TFLOP/s. The card, made in 7 nm, runs fp32 at its peak within its power
# limit.
_LEAST_POWER = "a100-pcie-40gb"


def _log_power_limit(device: DeviceSpec, dtype: str) -> float:
    """Returns the log fraction of peak that a card's power limit allows, at most 0.

    The result can be below 0 only for CUDA cores made in 7 nm or an older process.
    """
    newer = device.compute_capability is None or device.compute_capability > (8, 0)
    if newer or not device.board_power_w or unit(device, dtype) != "CUDA cores":
        return 0.0
    known = lookup(_LEAST_POWER)
    needed_w = known.board_power_w / (known.peak("fp32") or 1.0) * (device.peak(dtype) or 1.0)
    return min(0.0, float(np.log(device.board_power_w / needed_w)))


def choose(
    device: DeviceSpec, dtype: str, gpus: Sequence[MeasuredGpu], *, family_out: bool
) -> tuple[Prior, float]:
    """Returns the prior for a device, and the half-width in log time of the prior's 90 % interval.

    gpus: pool entries, of which those for the same unit and dtype are used. If there are none, the
        prior is `spec_sheet`.
    family_out: whether to exclude all GPUs of the device's generation, including the device.

    The half-width is halved if the prior comes from tables of the device itself.
    """
    base = spec_sheet(device, dtype)
    usable = _applicable(gpus, unit(device, dtype), dtype)
    others = [gpu for gpu in usable if generation(gpu.family) != generation(family(device))]
    blind = _UNKNOWN
    if others:
        blind = _BEYOND * max(gpu.blind_90 for gpu in others)
    if not family_out:
        related = _related(usable, device.name, family(device))
        if related:
            same_gpu = related[0].device == device.name
            return near(related, same_gpu=same_gpu), blind / 2 if same_gpu else blind
        others = usable
    efficiency = np.eye(len(base.mean))[INDEX["efficiency"]]
    # Log efficiencies are pooled relative to each GPU's power limit (`_log_power_limit`). The limit
    # of this device is then added to the pooled log efficiency.
    relative = []
    for gpu in others:
        powered = _log_power_limit(lookup(gpu.device), gpu.dtype)
        relative.append(replace(gpu, parameters=gpu.parameters - powered * efficiency))
    start = pooled(relative, base)
    start = replace(start, mean=start.mean + _log_power_limit(device, dtype) * efficiency)
    return start, blind


_DELTA = 0.05  # error in log time at which the loss turns from quadratic to linear
_NOISE = 0.05  # standard deviation of a row's noise in log time, which weighs rows against prior


#: smallest number of rows for a fit; with fewer, the result is the prior
FEWEST_ROWS = 20
#: smallest number of rows for growing trees
FEWEST_FOR_TREES = 60
_FOLDS = 5
# Pairs (quantile, ratio), from which the held-out errors' 0.9 quantile is estimated. The width of
# the interval follows from this estimate. Taken directly, the 0.9 quantile of some two hundred
# errors would depend on only twenty rows of a few sites (a site is one (n, k, batch)), so coverage
# would vary. Each lower quantile times its ratio is one estimate, and the geometric mean of the
# estimates is used. The ratios come from folds of the public tables' training sites, and vary
# little between GPUs and numbers of rows.
_TAILS = ((0.6, 2.24), (0.7, 1.77), (0.8, 1.38))
# Typical error of a fold's model (one member, four fifths of the rows) over the full ensemble's
# error. The interval is calibrated on folds, so its width is divided by this ratio.
_FOLD_EXCESS = 1.04
# Standard deviation of the noise that is added for the members after the first: to the prior's mean
# (in units of the prior's deviation) and to the rows (in log time). The noise makes members differ
# in the parameters that the rows do not determine. The parameters in UNVARIED get no noise in their
# prior.
_SHAKEN_PRIOR = 0.7
_SHAKEN_ROWS = 0.08
# A kernel leaves the menu if its probability is at most this for 98 % of the shapes (`_likely`).
_UNLIKELY = 0.04


@dataclass(frozen=True)
class Effort:
    """Settings of a fit that trade accuracy for time.

    members: number of cost models.
    rows_first: largest number of rows that the first cost model is fitted to.
    rows_other: largest number of rows that each other cost model is fitted to.
    growth: settings of the trees.
    """

    members: int = 2
    rows_first: int = 800
    rows_other: int = 400
    growth: Growth = field(default_factory=Growth)

    @classmethod
    def of(cls, rows: int) -> Effort:
        """Returns the default effort of a fit to `rows` rows.

        With fewer than 150 rows, single rows can change a fit, so four members are averaged.
        """
        return cls(members=4) if rows < 150 else cls()


#: largest number of table rows that a model is fitted to
TABLE_ROWS = 8000
#: effort for tables with thousands of rows; ten trees keep a model's file near 0.2 MB
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
    """Returns the parameter vector, (parameters + tiles,), that minimises loss plus penalty.

    The loss is pseudo-Huber in log time, which is robust to outliers. The penalty is half the
    squared distance from the prior's mean, in units of the prior's standard deviations. The search
    stays within six of these deviations.

    start: (parameters + tiles,), starting point of the search; None for the prior's mean.
    """
    from scipy.optimize import minimize

    keep_freed_memory()
    shapes = Shapes.of(machine, menu, rows.sizes)

    # u is the distance from the prior's mean in units of the prior's standard deviations.
    def objective(u: FloatArray) -> tuple[float, FloatArray]:
        source = Variable(prior.mean + prior.sd * u)
        predicted = log_latency(Values(source), shapes)[0]
        loss, slope = _pseudo_huber(predicted.value - rows.log_us)
        grad = gradient(predicted, source, slope)
        return loss + 0.5 * float(u @ u), grad * prior.sd + u

    first = np.zeros(len(prior.mean))
    if start is not None:
        first = (start - prior.mean) / prior.sd
    found = minimize(
        objective,
        first,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": max_iterations, "maxcor": 20},
        bounds=[(-6.0, 6.0)] * len(first),
    )
    return np.asarray(prior.mean + prior.sd * found.x)


def _pseudo_huber(error: FloatArray) -> tuple[float, FloatArray]:
    """Returns the summed loss and its slope for each row, (rows,).

    error: (rows,), error in log time.
    """
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
    """Fits the members, grows their trees and calibrates the interval by cross-validation.

    reference: model whose correction is an input of the trees; None if there is no such model.
    """
    rng = np.random.default_rng(seed)
    vectors = _member_parameters(machine, menu, rows, prior, effort, rng)
    menu = _likely(machine, menu, rows, vectors)
    residual = None if reference is None else reference.correction(rows.sizes)
    members = _members(machine, menu, rows, vectors, residual, effort, seed)
    ensemble = Ensemble(machine, menu, members, reference)
    return ensemble, _calibrate(ensemble, rows, prior, residual, effort, seed)


def _members(
    machine: Machine,
    menu: Menu,
    rows: TrainingRows,
    vectors: Sequence[FloatArray],
    residual: FloatArray | None,
    effort: Effort,
    seed: int,
) -> tuple[Member, ...]:
    """Returns one member for each parameter vector, with trees for FEWEST_FOR_TREES rows or more.

    residual: (rows,), the reference model's correction; None if there is no reference model.
    """
    members = []
    for i, vector in enumerate(vectors):
        member = Member(vector, None)
        if len(rows) >= FEWEST_FOR_TREES:
            growth = effort.growth
            member = train_member(machine, menu, vector, rows, residual, growth, 1000 * seed + i)
        members.append(member)
    return tuple(members)


def _member_parameters(
    machine: Machine,
    menu: Menu,
    rows: TrainingRows,
    prior: Prior,
    effort: Effort,
    rng: np.random.Generator,
) -> list[FloatArray]:
    """Returns the fitted parameter vector of each member.

    The first member is fitted to a random sample of the rows (to all rows, if they are few) with
    the given prior. Each further member gets its own sample, with noise added to the rows and to
    the prior's mean.
    """
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
    """Returns the menu without the kernels that all members are unlikely to choose.

    A smaller menu makes predictions faster, because their cost is proportional to the number of
    kernels. Probabilities are computed for 1000 random shapes and for up to 1000 measured shapes.

    vectors: (parameters + tiles,) each, parameters of each member.
    """
    rng = np.random.default_rng(0)
    count = 1000
    m = np.floor(2 ** rng.uniform(0, 15, count))
    n = 8 * np.floor(2 ** rng.uniform(2, 13, count))
    k = 8 * np.floor(2 ** rng.uniform(2, 13, count))
    near_rows = rows.sizes.take(slice(count))
    # The layout is left out, because it changes the kernels' times only for very long rows.
    given = Sizes.of(near_rows.m, near_rows.n, near_rows.k, near_rows.batch)
    shapes = [Shapes.of(machine, menu, sizes) for sizes in (Sizes.of(m, n, k), given)]
    likely = np.zeros(len(menu))
    for vector in vectors:
        member = Member(vector, None)
        weights = [member.weights(member.physics(part)[1]) for part in shapes]
        likely = np.maximum(likely, np.quantile(np.concatenate(weights, axis=1), 0.98, axis=1))
    return menu.subset(np.flatnonzero(likely > _UNLIKELY))


def _calibrate(
    ensemble: Ensemble,
    rows: TrainingRows,
    prior: Prior,
    residual: FloatArray | None,
    effort: Effort,
    seed: int,
) -> IntervalCalibration:
    """Calibrates the interval by cross-validation over sites.

    A site is one (n, k, batch). Each fold of sites is predicted by a fit to the other folds.

    residual: (rows,), the reference model's correction; None if there is no reference model.
    """
    machine = ensemble.machine
    menu = ensemble.menu
    sizes = rows.sizes
    rng = np.random.default_rng(seed)
    sites, site = np.unique(np.stack([sizes.n, sizes.k, sizes.batch]), axis=1, return_inverse=True)
    fold_of = (rng.permutation(sites.shape[1]) % _FOLDS)[site.ravel()]
    error = np.zeros(len(rows))
    variance = np.zeros(len(rows))
    single = replace(effort, members=1, rows_first=effort.rows_other)
    for fold in range(_FOLDS):
        inside = np.flatnonzero(fold_of == fold)
        outside = np.flatnonzero(fold_of != fold)
        if not len(inside) or not len(outside):
            continue
        seen = rows.take(outside)
        few = seen.take(rng.permutation(len(seen))[: single.rows_first])
        vector = fit_parameters(
            machine, menu, few, prior, start=ensemble.members[0].parameters, max_iterations=80
        )
        shared = None if residual is None else residual[outside]
        members = _members(machine, menu, seen, [vector], shared, single, seed)
        held = rows.take(inside)
        answer = replace(ensemble, members=members).raw(held.sizes)
        error[inside] = np.abs(answer.log_us - held.log_us)
        variance[inside] = answer.variance
    # A fold's model has a single member, so its `variance` lacks the variance between members. The
    # variance between the ensemble's members is added instead.
    shapes = ensemble.shapes(sizes)
    variance += np.var([member.physics(shapes)[0] for member in ensemble.members], axis=0)
    found = IntervalCalibration.of_held_out(error, variance, _TAILS)
    return replace(found, factor=found.factor / _FOLD_EXCESS)
