"""Decides whether padding a matrix product saves time, and prices the copies and the memory.

Weights (n and k) are padded once, when the model is built; tokens (m) are copied into a larger
tensor in every call. Padded rows and columns compute nothing of use, so the saving is that of the
same useful work.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from quantbench.advice.cost import Shares, ratio_factor
from quantbench.alignment_rules import Broken, broken_rules
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.estimate import Estimate
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.libraries import resolve_library
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import OpTimes, RememberedTimes, copy_us
from quantbench.quantization import cdiv
from quantbench.workload import Gemm
from quantbench.workload.dtypes import DTYPES

SIDES = ("m", "n", "k")
#: smallest expected saving, as a share of the time, for which padding is advised: the saving of a
#: pair differs by as much between two measurements (docs/padding.md, "differs by": median over the
#: tables)
NOISE = 0.02
# Options whose savings differ by less than this share are alike.
_ALIKE = 0.005
# Padded sizes are the next multiples of these.
_STEPS = (8, 16, 32, 64, 128, 256)
# Multiples of this fill the tiles of every kernel in common use.
_ROUND = 128


@dataclass(frozen=True)
class Change:
    """A side of the product and its padded size.

    at_run_time: whether a tensor is copied in every call.
    """

    dimension: str
    size: int
    to: int
    at_run_time: bool


@dataclass(frozen=True)
class Padding:
    """One way to pad, compared with the product as it is.

    now, then: time without and with padding; `then` leaves out the copy.
    copy_bytes, copy_us: bytes moved by the copy in every call, and its time.
    more_bytes: additional memory of the padded tensors.
    saving, low, high: saved share of the time, the copy included, with its 90 % interval; negative
        if it costs time.
    crashes: number of broken rules by which the library crashes on the padded sizes.
    repairs: whether there are fewer of them than without padding.
    """

    changes: tuple[Change, ...]
    now: Estimate
    then: Estimate
    copy_bytes: int
    copy_us: float
    more_bytes: int
    saving: float
    low: float
    high: float
    crashes: int = 0
    repairs: bool = False

    @property
    def words(self) -> str:
        """Text such as `m 2305 → 2432, n 50257 → 50304`."""
        return ", ".join(f"{one.dimension} {one.size} → {one.to}" for one in self.changes)

    @property
    def worth(self) -> bool:
        """Whether it is expected to save more than measured times scatter."""
        return self.saving >= NOISE

    @property
    def sure(self) -> bool:
        """Whether it is worth it, and the interval of the saving lies above 0."""
        return self.worth and self.low > 0

    @property
    def saving_us(self) -> float:
        return self.saving * self.now.latency_us


@dataclass(frozen=True)
class PaddingVerdict:
    """Whether to pad a product, and how.

    now: time as it is.
    options: the fastest way for each side alone, and for all sides together if that differs. Those
        that repair most come first, then those that save most.
    broken: rules of number formats and libraries that it breaks.
    note: source of the times.
    """

    gemm: Gemm
    device: DeviceSpec
    library: str
    now: Estimate
    options: tuple[Padding, ...]
    broken: tuple[Broken, ...]
    note: str

    @property
    def advised(self) -> tuple[Padding, ...]:
        """Options that are worth it, or without which the library crashes."""
        return tuple(one for one in self.options if one.worth or one.repairs)

    @property
    def best(self) -> Padding | None:
        """The first of `advised`; None if nothing should be padded."""
        return next(iter(self.advised), None)


def padding_verdict(
    gemm: Gemm, device: DeviceSpec, *, library: str = "", times: OpTimes | None = None
) -> PaddingVerdict:
    """Decides whether to pad a product a[m, k] · b[k, n].

    library: whose kernels run; "" for the GPU's default (`libraries.default_library`).
    times: source of times (default: the models of the device and library).

    Raises InputError for an unknown library, or a dtype without a peak on the device.

    >>> from quantbench.device import lookup
    >>> verdict = padding_verdict(Gemm(4096, 50257, 1600, layout="nt"), lookup("a100-sxm4-80gb"))
    >>> verdict.best.words
    'n 50257 → 50304'
    """
    who = "padding_verdict"
    if device.peak(gemm.dtype) is None:
        raise InputError(who, f"{gemm.dtype} on {device.name}", f"one of {device.dtypes}")
    library = resolve_library(device.name, gemm.dtype, library, who)
    known = RememberedTimes(times or ModelTimes(device, library=library))
    sizes = product(*map(_padded_sizes, (gemm.m, gemm.n, gemm.k)))
    _, *padded = [replace(gemm, m=m, n=n, k=k) for m, n, k in sizes]  # the first is the product
    known.ask([gemm, *padded])
    now = known.estimate(gemm)
    broken = broken_rules(gemm, library=library, device=device)
    options = []
    for one in padded:
        crashes = _crashes(broken_rules(one, library=library, device=device))
        found = compare(gemm, one, now, known.estimate(one), known)
        options.append(replace(found, crashes=crashes, repairs=crashes < _crashes(broken)))
    return PaddingVerdict(gemm, device, library, now, _shown(options), broken, known.note)


def compare(gemm: Gemm, padded: Gemm, now: Estimate, then: Estimate, times: OpTimes) -> Padding:
    """Compares the time without and with padding.

    The interval is that of the ratio of two independent errors of the estimates' own intervals,
    which hold the measurement noise and the choice of kernel: a shape and its padded shape do not
    share them.

    Padding m costs a copy of a, which is read with k padded already.

    times: source of the times, for its device and common errors.
    """
    changes = []
    for side in SIDES:
        size = getattr(gemm, side)
        to = getattr(padded, side)
        if size != to:
            changes.append(Change(side, size, to, side == "m"))
    copy_bytes = 0
    copying_us = 0.0
    if padded.m != gemm.m:
        copy_bytes = round(gemm.batch * (gemm.m + padded.m) * padded.k * DTYPES[gemm.dtype].a_bytes)
        copying_us = copy_us(copy_bytes, times.device)
    whole_us = then.latency_us + copying_us
    above: Shares = {padded: (then.latency_us / whole_us, then)}
    ratio = whole_us / now.latency_us
    below: Shares = {gemm: (1.0, now)}
    factor = ratio_factor(above, below, times.common_error, wider=1.0)
    return Padding(
        changes=tuple(changes),
        now=now,
        then=then,
        copy_bytes=copy_bytes,
        copy_us=copying_us,
        more_bytes=padded.min_bytes - gemm.min_bytes,
        saving=1 - ratio,
        low=1 - ratio * factor,
        high=1 - ratio / factor,
    )


def _padded_sizes(size: int) -> list[int]:
    """Returns the size and the next multiples of `_STEPS` above it."""
    sizes = [size]
    for step in _STEPS:
        to = cdiv(size, step) * step
        if to not in sizes and to <= LARGEST_SIDE:
            sizes.append(to)
    return sizes


def _crashes(broken: Iterable[Broken]) -> int:
    return sum(one.rule.effect == "crashes" for one in broken)


def _shown(options: Sequence[Padding]) -> tuple[Padding, ...]:
    """Returns the fastest option of each side alone and of all, each once, the best first."""
    groups: dict[str, list[Padding]] = defaultdict(list)
    for option in options:
        if len(option.changes) == 1:
            groups[option.changes[0].dimension].append(option)
    if options:
        groups["all"] = list(options)
    fastest = dict.fromkeys(map(_fastest, groups.values()))
    return tuple(sorted(fastest, key=lambda one: (one.crashes, -one.saving)))


def _fastest(options: Sequence[Padding]) -> Padding:
    """Returns the option with the fewest crashes and the largest saving.

    Of those within `_ALIKE` of it, it is the one that changes fewest sides, to the roundest sizes,
    as kernels differ in what alignment they want beyond 16 bytes.
    """
    best = min(options, key=lambda one: (one.crashes, -one.saving))
    least = best.saving - _ALIKE

    def rank(one: Padding) -> tuple[int, int, float]:
        # A size's roundness: the largest power of two up to _ROUND that divides it.
        roundness = [min(_ROUND, change.to & -change.to) for change in one.changes]
        return len(one.changes), -min(roundness), -one.saving

    alike = [one for one in options if one.crashes == best.crashes and one.saving >= least]
    return min(alike, key=rank)
