"""Decides whether padding a dimension of a GEMM or of a transformer saves time, and prices the copies and the memory.

Entry points: `padding_verdict`, for a GEMM, which returns a `PaddingVerdict`; `shape_padding`, for a transformer at its
tensor-parallel degree, which returns a `ShapePadding`; both hold `Padding` objects with their `Change`s; `compare`, for
times that are known; the constant `NOISE`. Used by the command `pad`, by `tools.accuracy.padding` and by users' Python
code.

Weights, the vocabulary, ffn and head_dim are padded once, when the model is built; they cost memory and arithmetic.
Tokens are padded at run time, and so is any side that the caller names: its tensor is copied in every call, at the
memory's bandwidth. Padded rows and columns compute nothing of use, so the saving is that of the same useful work.

Decision. Padding is advised if the expected saving, copies included, is at least `NOISE`, and called sure if the 90 %
interval of the saving lies above 0. The errors of a shape and of its padded shape are nearly independent in units of
the model's own intervals: on six public tables (bf16, fp8 and fp8_block on A100, H100 and B200, rows that the model was
not fitted to), the interval of two independent errors covers 84 to 99 % of the ratios. `python -m
tools.accuracy.padding` recomputes what the decisions lose against the better of both shapes.

>>> from quantbench.device import lookup
>>> from quantbench.workload import Gemm
>>> verdict = padding_verdict(Gemm(4096, 50257, 1600, layout="nt"), lookup("a100-sxm4-80gb"))
>>> verdict.best.words
'n 50257 → 50304'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from quantbench.advice.cost import Shares, ratio_factor
from quantbench.alignment_rules import Broken, broken_by_shape, broken_rules, side_names
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.estimate import Estimate
from quantbench.latency.gemm.model import LARGEST_SIDE
from quantbench.latency.libraries import resolve_library
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import OpEstimate, OpTimes, RememberedTimes, copy_us, correlation_of, total
from quantbench.quantization import cdiv
from quantbench.workload import Attention, Gemm, Op, TransformerShape
from quantbench.workload.dtypes import DTYPES, element_bytes

SIDES = ("m", "n", "k")
#: smallest expected saving, as a share of the time, for which padding is advised: the repeat noise of measured times
NOISE = 0.01
# Padded sizes are the next multiples of these.
_STEPS = (8, 16, 32, 64, 128, 256)
# Multiples of this fill the tiles of every kernel in common use.
_ROUND = 128


@dataclass(frozen=True)
class Change:
    """A dimension and its padded size. at_run_time: whether a tensor is copied in every call."""

    dimension: str
    size: int
    to: int
    at_run_time: bool


@dataclass(frozen=True)
class Padding:
    """One way to pad, compared with the shape as it is.

    now, then: time without and with padding; `then` leaves out the copies.
    copy_bytes, copy_us: bytes moved by copies in every call (or step), and their time.
    more_bytes: additional memory of the padded tensors; of a transformer, of the weights on one GPU.
    saving, low, high: saved share of the time, copies included, with its 90 % interval; negative if it costs time.
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
    """Whether to pad a GEMM, and how.

    now: time as it is.
    options: the fastest way for each side alone, and for all sides together if that differs, fastest first.
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
    def must(self) -> bool:
        """Whether the library crashes on the GEMM as it is."""
        return _crashes(self.broken) > 0

    @property
    def best(self) -> Padding | None:
        """The padding to choose; None if the GEMM should stay as it is."""
        return next((one for one in self.options if not one.crashes and (one.worth or one.repairs)), None)


@dataclass(frozen=True)
class ShapePadding:
    """Whether to pad the dimensions of a transformer. options: the fastest size of each dimension alone."""

    shape: TransformerShape
    device: DeviceSpec
    library: str
    now: Estimate
    options: tuple[Padding, ...]
    broken: tuple[Broken, ...]
    note: str


def padding_verdict(
    gemm: Gemm,
    device: DeviceSpec,
    *,
    library: str = "",
    at_run_time: Sequence[str] = ("m",),
    times: OpTimes | None = None,
) -> PaddingVerdict:
    """Decides whether to pad a GEMM a[m, k] · b[k, n], on its sides m, n and k.

    library: whose kernels run; "" for the GPU's default (`libraries.default_library`).
    at_run_time: sides that are padded in every call: m and k copy a, n copies the result. The others are padded once.
    times: source of times (default: the models of the device and library).

    Raises InputError for an unknown side or library, or a dtype without a peak on the device.
    """
    for side in at_run_time:
        require_choice("padding_verdict", "at_run_time", side, SIDES)
    if device.peak(gemm.dtype) is None:
        have = ", ".join(sorted(device.peak_tflops))
        raise InputError("padding_verdict", f"{gemm.dtype} on {device.name}", f"one of {have}")
    library = resolve_library(device.name, gemm.dtype, library, "padding_verdict")
    times = times or ModelTimes(device, library=library)
    sizes = [_padded_sizes(getattr(gemm, side)) for side in SIDES]
    gemms = [replace(gemm, m=m, n=n, k=k) for m, n, k in product(*sizes)]
    known = dict(zip(gemms, times.estimates(gemms), strict=True))
    broken = broken_rules(gemm, library=library)
    options = []
    for padded in gemms[1:]:  # the first is the GEMM itself
        changes = tuple(
            Change(side, getattr(gemm, side), getattr(padded, side), side in at_run_time)
            for side in SIDES
            if getattr(padded, side) != getattr(gemm, side)
        )
        found = compare(
            changes, {gemm: (1.0, known[gemm])}, {padded: (1.0, known[padded])}, known[gemm], known[padded],
            _gemm_copies(gemm, padded, at_run_time), padded.min_bytes - gemm.min_bytes, times,
        )  # fmt: skip
        options.append(_judged(found, broken, broken_rules(padded, library=library)))
    alone = (_fastest([one for one in options if [c.dimension for c in one.changes] == [side]]) for side in SIDES)
    shown = dict.fromkeys(one for one in (*alone, _fastest(options)) if one is not None)
    return PaddingVerdict(gemm, device, library, known[gemm], _sorted(shown), broken, times.note)


def shape_padding(
    shape: TransformerShape,
    times: OpTimes,
    *,
    library: str = "",
    backward: bool = True,
    unaligned_share: float | None = None,
) -> ShapePadding:
    """Decides whether to pad vocab, ffn, head_dim and the tokens of a transformer, each alone.

    times: source of times.
    library: whose kernels run; "" for the GPU's default.
    backward: whether a training step is priced, or a forward pass only.
    unaligned_share: see `op_times.as_run`.
    """
    library = resolve_library(times.device.name, shape.dtype, library, "shape_padding")
    known = RememberedTimes(times, softmax=shape.softmax, unaligned_share=unaligned_share)
    ops = shape.ops(backward=backward)
    passes = 2 if backward else 1
    variants: list[tuple[Change, tuple[Op, ...], list[int], int, tuple[Broken, ...]]] = []
    broken = broken_by_shape(shape, library=library, backward=backward)
    sizes = {name: _padded_sizes(getattr(shape, name), shape.tp)[1:] for name in ("vocab", "ffn")}
    sizes["head_dim"] = sorted({one.to for one in broken if one.name == "head_dim"})
    for name, candidates in sizes.items():
        size = getattr(shape, name)
        for to in candidates:
            changed: dict[str, int] = {name: to}
            other = replace(shape, **changed)  # type: ignore[arg-type]
            more = (other.parameters - shape.parameters) // shape.tp
            held = round(more * DTYPES[shape.dtype].b_bytes)
            then_broken = broken_by_shape(other, library=library, backward=backward)
            variants.append((Change(name, size, to, False), other.ops(backward=backward), [], held, then_broken))
    for to in _padded_sizes(shape.tokens, shape.tp)[1:]:
        # The hidden states (backward: their gradients) are copied once into padded tensors, and once out of them.
        copy = (shape.tokens + to) * shape.hidden * element_bytes(shape.attention_dtype)
        variants.append((Change("tokens", shape.tokens, to, True), _with_tokens(ops, to), [copy] * passes, 0, ()))
    known.ask(op.workload for own in (ops, *(variant[1] for variant in variants)) for op in own)
    now, below = _summed(ops, known)
    options = []
    for change, own, copies, more, then_broken in variants:
        then, above = _summed(own, known)
        option = compare((change,), below, above, now, then, copies, more, known)
        options.append(_judged(option, broken, broken if change.at_run_time else then_broken))
    best = (_fastest([one for one in options if one.changes[0].dimension == name]) for name in (*sizes, "tokens"))
    return ShapePadding(
        shape, times.device, library, now, _sorted(one for one in best if one is not None), broken, known.note
    )


def compare(
    changes: tuple[Change, ...],
    below: Shares,
    above: Shares,
    now: Estimate,
    then: Estimate,
    copies: Sequence[int],
    more_bytes: int,
    times: OpTimes,
) -> Padding:
    """Compares the time with and without padding.

    below, above: shares of the sums of times without and with padding, by workload.
    now, then: these sums.
    copies: bytes moved by each copy in a call.
    times: source of the times, for its device and common errors.
    """
    copied_us = sum(copy_us(moved, times.device) for moved in copies)
    whole_us = then.latency_us + copied_us
    weight = then.latency_us / whole_us
    above = {work: (share * weight, estimate) for work, (share, estimate) in above.items()}
    ratio, factor = whole_us / now.latency_us, ratio_factor(above, below, times.common_error, wider=1.0)
    return Padding(
        changes, now, then, sum(copies), copied_us, more_bytes, 1 - ratio, 1 - ratio * factor, 1 - ratio / factor
    )


def _padded_sizes(size: int, parts: int = 1) -> list[int]:
    """Returns the size and the next multiples of `_STEPS` above it, of each of `parts` equal parts."""
    multiples = (cdiv(size, step * parts) * step * parts for step in _STEPS)
    return list(dict.fromkeys([size, *(multiple for multiple in multiples if multiple <= LARGEST_SIDE)]))


def _gemm_copies(gemm: Gemm, padded: Gemm, at_run_time: Sequence[str]) -> list[int]:
    """Returns the bytes read and written by each copy that pads the sides in `at_run_time`."""
    kind, copies = DTYPES[gemm.dtype], []
    changed = [side for side in at_run_time if getattr(gemm, side) != getattr(padded, side)]
    if "m" in changed or "k" in changed:
        read_k = gemm.k if "k" in changed else padded.k  # a side that is padded once comes padded
        read_m = gemm.m if "m" in changed else padded.m
        copies.append(round(gemm.batch * (read_m * read_k + padded.m * padded.k) * kind.a_bytes))
    if "n" in changed:
        copies.append(2 * gemm.batch * gemm.m * gemm.n * element_bytes(gemm.output_dtype))
    return copies


def _with_tokens(ops: Iterable[Op], to: int) -> tuple[Op, ...]:
    """Returns the ops with their sides named `tokens` set to `to`."""
    out = []
    for op in ops:
        changes: dict[str, int] = {side: to for side, name in side_names(op).items() if name == "tokens"}
        out.append(replace(op, workload=replace(op.workload, **changes)))  # type: ignore[arg-type]
    return tuple(out)


def _summed(ops: Sequence[Op], times: RememberedTimes) -> tuple[Estimate, Shares]:
    """Returns the time of all runs of the ops, and the share of each workload."""
    found = total([OpEstimate(op, times.estimate(op.workload)) for op in ops], correlation_of(times))
    shares: dict[Attention | Gemm | object, tuple[float, Estimate]] = {}
    for one in found.ops:
        share = shares.get(one.op.workload, (0.0, one.estimate))[0]
        shares[one.op.workload] = (share + one.total_us / found.latency_us, one.estimate)
    unmeasured = "; ".join(dict.fromkeys(one.estimate.unmeasured for one in found.ops if one.estimate.unmeasured))
    return Estimate(found.latency_us, found.low_us, found.high_us, unmeasured=unmeasured), shares  # type: ignore[return-value]


def _crashes(broken: Iterable[Broken]) -> int:
    return sum(one.rule.effect == "crashes" for one in broken)


def _judged(option: Padding, now: Iterable[Broken], then: Iterable[Broken]) -> Padding:
    """Returns the option with its crashes. now, then: broken rules without and with padding."""
    crashes = _crashes(then)
    return replace(option, crashes=crashes, repairs=crashes < _crashes(now))


def _fastest(options: Sequence[Padding]) -> Padding | None:
    """Returns the option with the fewest crashes and the largest saving. Of those within half of `NOISE` of it, the one
    that changes fewest dimensions, to the roundest sizes, as kernels differ in what alignment they want beyond 16
    bytes."""
    if not options:
        return None
    fewest = min(one.crashes for one in options)
    most = max(one.saving for one in options if one.crashes == fewest)
    near = [one for one in options if one.crashes == fewest and one.saving >= most - NOISE / 2]
    return min(near, key=lambda one: (len(one.changes), -min(_roundness(c.to) for c in one.changes), -one.saving))


def _roundness(size: int) -> int:
    """Returns the largest power of two up to `_ROUND` that divides a size."""
    return min(_ROUND, size & -size)


def _sorted(options: Iterable[Padding]) -> tuple[Padding, ...]:
    return tuple(sorted(options, key=lambda one: -one.saving))
