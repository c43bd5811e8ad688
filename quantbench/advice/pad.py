"""Decides whether to pad a GEMM, by the time that padding saves and the time that it costs.

`padding_verdict` compares the GEMM with padded sizes. Weights (n and k) are padded once, when the
model is built. Tokens (m) are padded in every call by a copy into a larger tensor, and the copy's
time counts against padding. Padded rows and columns do no useful work. The times of both GEMMs are
therefore compared, not their TFLOP/s.
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
from quantbench.latency.op_times import CachedTimes, OpTimes, copy_us
from quantbench.quantization import cdiv
from quantbench.workload import Gemm
from quantbench.workload.dtypes import DTYPES

#: sides of a GEMM that can be padded
SIDES = ("m", "n", "k")
#: Smallest saving, as a fraction of the time, for which padding is advised. Two measurements of the
#: same saving differ by this much (docs/padding.md, "differs by", median over the tables).
NOISE = 0.02
# Largest difference between two savings, as fractions of the time, that counts as no difference.
_ALIKE = 0.005
# Multiples to which sizes are padded: the next multiple of each number is tried.
_STEPS = (8, 16, 32, 64, 128, 256)
# Multiple that fills whole tiles of all kernels in common use.
_ROUND = 128


@dataclass(frozen=True)
class Change:
    """One padded side of a GEMM.

    dimension: m, n or k.
    size: size without padding.
    to: padded size.
    at_run_time: True if padding needs a copy in every call, False if weights are padded once.
    """

    dimension: str
    size: int
    to: int
    at_run_time: bool


@dataclass(frozen=True)
class Padding:
    """One way to pad a GEMM, compared with the GEMM without padding.

    changes: padded sides.
    now: time without padding.
    then: time with padding, without the copy.
    copy_bytes: bytes that the copy reads and writes in every call; 0 without a copy.
    copy_us: time of the copy in µs.
    more_bytes: additional memory of the padded tensors, in bytes.
    saving: fraction of `now` that padding saves, after the time of the copy; negative if padding
        costs time.
    low, high: 90 % interval of the saving.
    crashes: number of broken rules that make the library crash on the padded sizes.
    repairs: whether padding reduces the number of broken rules that make the library crash.
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
        """Whether the expected saving is at least the noise of measurements (NOISE)."""
        return self.saving >= NOISE

    @property
    def sure(self) -> bool:
        """Whether padding is worth it, and the saving's whole 90 % interval is above 0."""
        return self.worth and self.low > 0

    @property
    def saving_us(self) -> float:
        """Time in µs that padding saves per call."""
        return self.saving * self.now.latency_us


@dataclass(frozen=True)
class PaddingVerdict:
    """Whether to pad a GEMM, and to which sizes.

    library: library whose kernels run.
    now: time without padding.
    options: best way to pad each side alone, and best way overall. Options with the fewest crashes
        come first, then those with the largest saving.
    broken: rules of number formats and libraries that the GEMM breaks without padding.
    note: sources of the predicted times.
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
        """Options that save enough time to be worth it, or that avoid a crash of the library."""
        return tuple(one for one in self.options if one.worth or one.repairs)

    @property
    def best(self) -> Padding | None:
        """The first advised option; None if nothing should be padded."""
        return next(iter(self.advised), None)


def padding_verdict(
    gemm: Gemm, device: DeviceSpec, *, library: str = "", times: OpTimes | None = None
) -> PaddingVerdict:
    """Decides whether to pad a GEMM a[m, k] · b[k, n].

    library: library whose kernels run; "" for the GPU's default (`libraries.default_library`).
    times: op times on the device; None for the latency models of the device and library.

    Raises InputError for an unknown library, and for a dtype without a peak rate on the device.

    >>> from quantbench.device import lookup
    >>> verdict = padding_verdict(Gemm(4096, 50257, 1600, layout="nt"), lookup("a100-sxm4-80gb"))
    >>> verdict.best.words
    'n 50257 → 50304'
    """
    who = "padding_verdict"
    if device.peak(gemm.dtype) is None:
        raise InputError(who, f"{gemm.dtype} on {device.name}", f"one of {device.dtypes}")
    library = resolve_library(device.name, gemm.dtype, library, who)
    known = CachedTimes(times or ModelTimes(device, library=library))
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
    """Compares the predicted times of a GEMM without and with padding.

    If m is padded, the time of copying a in every call is added. The copied a is assumed to have
    the padded k already. The saving's interval follows from the ratio of the two times. Both times
    have the common error of `times`. The rest of their errors counts as independent, because the
    two GEMMs are measured separately and may run different kernels.

    now, then: times of `gemm` and of `padded`.
    times: source of the times, which provides the device and the common error.
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
    """Returns the size itself, and the next larger multiple of each number in `_STEPS`."""
    sizes = [size]
    for step in _STEPS:
        to = cdiv(size, step) * step
        if to not in sizes and to <= LARGEST_SIDE:
            sizes.append(to)
    return sizes


def _crashes(broken: Iterable[Broken]) -> int:
    """Returns the number of broken rules that make the library crash."""
    return sum(one.rule.effect == "crashes" for one in broken)


def _shown(options: Sequence[Padding]) -> tuple[Padding, ...]:
    """Returns the best option for each side alone and the best option overall, each once.

    Options with the fewest crashes come first, then those with the largest saving.
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

    Among options with the fewest crashes, savings within `_ALIKE` of the largest count as equal.
    Of equal options, the one that pads the fewest sides is chosen. A further tie goes to the option
    whose padded sizes are all divisible by the largest power of two, because kernels differ in the
    alignment that they need beyond 16 bytes.
    """
    best = min(options, key=lambda one: (one.crashes, -one.saving))
    least = best.saving - _ALIKE

    def rank(one: Padding) -> tuple[int, int, float]:
        # Roundness of a padded size: the largest power of two, up to 128, that divides the size.
        # For an option, its least round size counts.
        roundness = [min(_ROUND, change.to & -change.to) for change in one.changes]
        return len(one.changes), -min(roundness), -one.saving

    alike = [one for one in options if one.crashes == best.crashes and one.saving >= least]
    return min(alike, key=rank)
