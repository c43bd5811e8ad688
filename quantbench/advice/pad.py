"""Decides whether padding a GEMM saves time, given the copies and the memory that padding costs.

Weights (n and k) are padded once, when the model is built. Tokens (m) are copied into a larger
tensor in every call. Padded rows and columns compute nothing useful, so times are compared for the
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
#: Smallest expected saving, as a fraction of the time, for which padding is advised. The saving of
#: one pair of shapes differs by this much between two measurements (docs/padding.md, "differs by":
#: median over the tables).
NOISE = 0.02
# Options whose savings, as fractions of the time, differ by less than this count as equal.
_ALIKE = 0.005
# A size is padded to the next multiple of each of these numbers.
_STEPS = (8, 16, 32, 64, 128, 256)
# A size that is a multiple of this fills the tiles of every kernel in common use.
_ROUND = 128


@dataclass(frozen=True)
class Change:
    """A side of a GEMM and the size that it is padded to.

    dimension: m, n or k.
    at_run_time: whether a tensor is copied in every call.
    """

    dimension: str
    size: int
    to: int
    at_run_time: bool


@dataclass(frozen=True)
class Padding:
    """One way to pad a GEMM, compared with the GEMM as it is.

    now, then: time without and with padding; `then` does not include the copy.
    copy_bytes, copy_us: bytes that the copy moves in every call, and its time.
    more_bytes: additional memory of the padded tensors.
    saving, low, high: fraction of `now` that padding saves, with its 90 % interval. The time of the
        copy counts against the saving, which is negative if padding costs time.
    crashes: number of broken rules that make the library crash on the padded sizes.
    repairs: whether fewer such rules are broken than without padding.
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
        """Whether padding is expected to save more than measured times scatter."""
        return self.saving >= NOISE

    @property
    def sure(self) -> bool:
        """Whether padding is worth it and the 90 % interval of the saving lies above 0."""
        return self.worth and self.low > 0

    @property
    def saving_us(self) -> float:
        return self.saving * self.now.latency_us


@dataclass(frozen=True)
class PaddingVerdict:
    """Whether to pad a GEMM, and how.

    now: time without padding.
    options: the fastest way for each side alone, and for all sides together if that differs.
        Options that avoid the most crashes come first, and then options that save the most.
    broken: rules of number formats and libraries that the GEMM breaks.
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
        """Options that are worth it, or that avoid a crash of the library."""
        return tuple(one for one in self.options if one.worth or one.repairs)

    @property
    def best(self) -> Padding | None:
        """First of the advised options; None if nothing should be padded."""
        return next(iter(self.advised), None)


def padding_verdict(
    gemm: Gemm, device: DeviceSpec, *, library: str = "", times: OpTimes | None = None
) -> PaddingVerdict:
    """Decides whether to pad a GEMM a[m, k] · b[k, n].

    library: library whose kernels run; "" for the GPU's default (`libraries.default_library`).
    times: source of times; None for the models of the device and library.

    Raises InputError for an unknown library, and for a dtype without a peak on the device.

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
    _, *padded = [replace(gemm, m=m, n=n, k=k) for m, n, k in sizes]  # the first is not padded
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
    """Compares the times without and with padding.

    The interval is that of a ratio of two times, each with its own interval. The errors of the two
    times are independent except for the common error of `times`: they come from measurement noise
    and from the choice of kernel, which a shape and its padded shape do not share. Padding m costs
    a copy of a in every call. The k of the copied tensor is padded beforehand.

    now, then: times of `gemm` and of `padded`.
    times: source of the times, for its device and its common error.
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
    """Returns the size itself and the next multiples of `_STEPS` above it."""
    sizes = [size]
    for step in _STEPS:
        to = cdiv(size, step) * step
        if to not in sizes and to <= LARGEST_SIDE:
            sizes.append(to)
    return sizes


def _crashes(broken: Iterable[Broken]) -> int:
    """Returns how many of the broken rules make the library crash."""
    return sum(one.rule.effect == "crashes" for one in broken)


def _shown(options: Sequence[Padding]) -> tuple[Padding, ...]:
    """Returns the fastest option for each side alone and for all sides, best first.

    An option that is the fastest in several of these groups is listed once.
    """
    groups: dict[str, list[Padding]] = defaultdict(list)
    for option in options:
        if len(option.changes) == 1:
            groups[option.changes[0].dimension].append(option)
    if options:
        groups["all"] = list(options)
    fastest = dict.fromkeys(map(_fastest, groups.values()))
    return tuple(sorted(fastest, key=lambda one: (one.crashes, -one.saving)))


def _fastest(options: Sequence[Padding]) -> Padding:
    """Returns the option with the fewest crashes and nearly the largest saving.

    Options with this number of crashes count as equal if their saving is within `_ALIKE` of the
    largest. Of these, the option that changes the fewest sides is returned, and of several such
    options the one whose least round size is roundest, because kernels differ in the alignment that
    they need beyond 16 bytes.
    """
    best = min(options, key=lambda one: (one.crashes, -one.saving))
    least = best.saving - _ALIKE

    def rank(one: Padding) -> tuple[int, int, float]:
        # The roundness of a size is the largest power of two, up to _ROUND, that divides it.
        roundness = [min(_ROUND, change.to & -change.to) for change in one.changes]
        return len(one.changes), -min(roundness), -one.saving

    alike = [one for one in options if one.crashes == best.crashes and one.saving >= least]
    return min(alike, key=rank)
