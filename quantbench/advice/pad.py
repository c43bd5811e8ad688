"""Decides whether padding a dimension of a GEMM or of a transformer saves time, and prices the copies and the memory.

Entry points: `padding_verdict`, which returns a `PaddingVerdict` of `Padding` objects with their `Change`s; `compare`,
for times that are known; `capacity` of experts; the constants `NOISE` and `SIDES`. Used by the command `pad`, by
`tools.accuracy.padding` and by users' Python code.

Weights, the vocabulary, ffn and head_dim are padded once, when the model is built; they cost memory and arithmetic.
Tokens are padded at run time, and so is any side of a GEMM that the caller names: its tensor is copied in every call,
at the memory's bandwidth. Padded rows and columns compute nothing of use: the saving is that of the same useful work.

Decision. Padding is advised if the expected saving, copies included, is at least `NOISE`, and called sure if the 90 %
interval of the saving lies above 0. The interval is that of the ratio of two independent errors of the model's own
intervals: they hold the measurement noise and the choice of kernel, which a shape and its padded shape do not share.
`python -m tools.accuracy.padding` computes how many measured savings it covers, and what the decisions lose against the
better of both shapes (docs/padding.md).

>>> from quantbench.device import lookup
>>> from quantbench.workload import Gemm
>>> verdict = padding_verdict(Gemm(4096, 50257, 1600, layout="nt"), lookup("a100-sxm4-80gb"))
>>> verdict.best.words
'n 50257 → 50304'
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, lcm

from quantbench.advice.cost import Shares, ratio_factor
from quantbench.alignment_rules import Broken, broken_by_shape, broken_rules, side_names
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.estimate import Estimate
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.libraries import resolve_library
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import OpEstimate, OpTimes, RememberedTimes, copy_us, correlation_of, total
from quantbench.planner.calibration import shipped
from quantbench.quantization import cdiv
from quantbench.workload import Gemm, MoE, Op, TransformerShape
from quantbench.workload.dtypes import DTYPES, element_bytes
from quantbench.workload.kinds import Compute

SIDES = ("m", "n", "k")
#: smallest expected saving, as a share of the time, for which padding is advised: by as much does the saving of a pair
#: differ between two measurements (docs/padding.md, "differs by": median of the tables)
NOISE = 0.02
# Options whose savings differ by less than this share are alike.
_ALIKE = 0.005
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
    """Whether to pad a GEMM or the dimensions of a transformer, and how.

    now: time as it is: of the GEMM, or of a step of the transformer on one GPU.
    options: the fastest way for each dimension alone; for a GEMM also for all sides together, if that differs. Those
        that repair most come first, then those that save most.
    broken: rules of number formats and libraries that it breaks.
    note: source of the times.
    """

    subject: Gemm | TransformerShape
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


@dataclass(frozen=True)
class _Variant:
    """A GEMM or a step, as it is or padded: the runs of each workload, and what padding costs beside their time."""

    changes: tuple[Change, ...]
    runs: Mapping[Compute, int]
    broken: tuple[Broken, ...]
    copies: tuple[int, ...] = ()
    more_bytes: int = 0


def padding_verdict(
    subject: Gemm | TransformerShape,
    device: DeviceSpec,
    *,
    library: str = "",
    at_run_time: Sequence[str] = ("m",),
    backward: bool = True,
    times: OpTimes | None = None,
) -> PaddingVerdict:
    """Decides whether to pad a GEMM a[m, k] · b[k, n] on m, n and k, or vocab, ffn, head_dim and tokens of a
    transformer.

    library: whose kernels run; "" for the GPU's default (`libraries.default_library`), with the rules of every library
        for a transformer, which may be trained with one and served with another.
    at_run_time: sides of a GEMM that are padded in every call: m and k copy a, n copies the result. The others are
        padded once.
    backward: whether a training step of a transformer is priced, or a forward pass only.
    times: source of times (default: the models of the device and library).

    Raises InputError for an unknown side or library, or a dtype without a peak on the device.
    """
    who = "padding_verdict"
    for side in at_run_time:
        require_choice(who, "at_run_time", side, SIDES)
    if device.peak(subject.dtype) is None:
        raise InputError(who, f"{subject.dtype} on {device.name}", f"one of {device.dtypes}")
    # Other ops of a model may have another dtype, and so another default library.
    asked, library = library, resolve_library(device.name, subject.dtype, library, who)
    if isinstance(subject, Gemm):
        softmax, variants = "", list(_of_gemm(subject, library, at_run_time))
    else:
        softmax, variants = subject.softmax, list(_of_shape(subject, asked, backward=backward))
    share = shipped().unaligned_share
    known = RememberedTimes(times or ModelTimes(device, library=asked), softmax=softmax, unaligned_share=share)
    known.ask(work for variant in variants for work in variant.runs)
    base, *padded = variants
    now, below = _summed(base.runs, known)
    options = []
    for one in padded:
        then, above = _summed(one.runs, known)
        found = compare(one.changes, below, above, now, then, one.copies, one.more_bytes, known)
        crashes = _crashes(one.broken)
        options.append(replace(found, crashes=crashes, repairs=crashes < _crashes(base.broken)))
    groups: dict[tuple[str, ...], list[Padding]] = defaultdict(list)
    for option in options:
        groups[tuple(change.dimension for change in option.changes)].append(option)
    shown = [_fastest(group) for names, group in groups.items() if len(names) == 1]
    if isinstance(subject, Gemm) and options:
        shown.append(_fastest(options))
    order = sorted(dict.fromkeys(shown), key=lambda one: (one.crashes, -one.saving))
    return PaddingVerdict(subject, device, library, now, tuple(order), base.broken, known.note)


def _of_gemm(gemm: Gemm, library: str, at_run_time: Sequence[str]) -> Iterator[_Variant]:
    """Yields the GEMM as it is, and padded on every combination of sides."""
    for m, n, k in product(*(_padded_sizes(getattr(gemm, side)) for side in SIDES)):
        padded = replace(gemm, m=m, n=n, k=k)
        pairs = ((side, getattr(gemm, side), getattr(padded, side)) for side in SIDES)
        changes = tuple(Change(side, size, to, side in at_run_time) for side, size, to in pairs if size != to)
        yield _Variant(
            changes, {padded: 1}, broken_rules(padded, library=library),
            _gemm_copies(gemm, padded, {one.dimension for one in changes if one.at_run_time}),
            padded.min_bytes - gemm.min_bytes,
        )  # fmt: skip


def _of_shape(shape: TransformerShape, library: str, *, backward: bool) -> Iterator[_Variant]:
    """Yields the transformer as it is, and with each dimension padded alone."""
    backward = backward and not shape.experts  # whose gradients have no model

    def variant(changes: tuple[Change, ...], other: TransformerShape, more_bytes: int = 0) -> _Variant:
        broken = broken_by_shape(other, library=library, backward=backward)
        return _Variant(changes, _runs(other.modelled_ops(backward=backward)), broken, more_bytes=more_bytes)

    base = variant((), shape)
    yield base
    widths = ("vocab", "moe_ffn") if shape.experts else ("vocab", "ffn")
    sizes = {name: _padded_sizes(getattr(shape, name), shape.tp)[1:] for name in widths}
    sizes["head_dim"] = sorted({one.to for one in base.broken if one.name == "head_dim"})
    for name, candidates in sizes.items():
        for to in candidates:
            other: TransformerShape = replace(shape, **{name: to})  # type: ignore[arg-type]
            more = (other.parameters_per_gpu - shape.parameters_per_gpu) * DTYPES[shape.dtype].b_bytes
            yield variant((Change(name, getattr(shape, name), to, False),), other, round(more))
    for to in sorted({*_padded_sizes(shape.tokens, shape.tp)[1:], *_whole_experts(shape)}):
        # The hidden states (backward: their gradients) are copied once into padded tensors.
        copy = (shape.tokens + to) * shape.hidden * element_bytes(shape.attention_dtype)
        left = tuple(one for one in base.broken if not _repaired(one, to, shape.tp))
        ops = _with_tokens(shape.modelled_ops(backward=backward), to)
        change = Change("tokens", shape.tokens, to, True)
        yield _Variant((change,), _runs(ops), left, (copy, copy) if backward else (copy,))


def _repaired(broken: Broken, tokens: int, tp: int) -> bool:
    """Returns whether a number of tokens satisfies a broken rule about them."""
    size = {"tokens": tokens, "tokens / tp": tokens // tp}.get(broken.name)
    return size is not None and broken.rule.allowed(size) == size


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


def _gemm_copies(gemm: Gemm, padded: Gemm, changed: Collection[str]) -> tuple[int, ...]:
    """Returns the bytes read and written by each copy that pads the sides in `changed` at run time."""
    kind, copies = DTYPES[gemm.dtype], []
    if "m" in changed or "k" in changed:
        read_k = gemm.k if "k" in changed else padded.k  # a side that is padded once comes padded
        read_m = gemm.m if "m" in changed else padded.m
        copies.append(round(gemm.batch * (read_m * read_k + padded.m * padded.k) * kind.a_bytes))
    if "n" in changed:
        copies.append(2 * gemm.batch * gemm.m * gemm.n * element_bytes(gemm.output_dtype))
    return tuple(copies)


def _whole_experts(shape: TransformerShape) -> list[int]:
    """Returns the next number of tokens that gives every expert whole blocks of _ROUND rows, if balanced."""
    if not shape.experts:
        return []
    step = lcm(_ROUND * shape.experts, shape.top_k * shape.ep) // (shape.top_k * shape.ep)
    to = cdiv(shape.tokens, step) * step
    return [to] if to != shape.tokens else []


def capacity(shape: TransformerShape) -> tuple[int, float]:
    """Returns a capacity per expert, whole blocks of _ROUND rows above the mean, and the share of rows beyond it."""
    layer = shape.experts_of(shape.tokens)
    rows = cdiv(ceil(layer.rows_per_expert), _ROUND) * _ROUND
    beyond = sum(max(0, own - rows) for own in layer.tokens_per_expert)
    return rows, beyond / sum(layer.tokens_per_expert)


def _with_tokens(ops: Iterable[Op], to: int) -> tuple[Op, ...]:
    """Returns the ops with their sides named `tokens` set to `to`."""
    out = []
    for op in ops:
        changes: dict[str, int] = {side: to for side, name in side_names(op).items() if name == "tokens"}
        if isinstance(op.workload, MoE):
            changes = {"tokens": to * op.workload.ep}
        out.append(replace(op, workload=replace(op.workload, **changes)))  # type: ignore[arg-type]
    return tuple(out)


def _runs(ops: Iterable[Op]) -> Mapping[Compute, int]:
    runs: Counter[Compute] = Counter()
    for op in ops:
        runs[op.workload] += op.count
    return runs


def _summed(runs: Mapping[Compute, int], times: RememberedTimes) -> tuple[Estimate, Shares]:
    """Returns the time of all runs, and the share of each workload."""
    found = total(
        [OpEstimate(Op("", "", work, n), times.estimate(work)) for work, n in runs.items()], correlation_of(times)
    )
    shares = {one.op.workload: (one.total_us / found.latency_us, one.estimate) for one in found.ops}
    reasons = dict.fromkeys(one.estimate.unmeasured for one in found.ops if one.estimate.unmeasured)
    return Estimate(found.latency_us, found.low_us, found.high_us, unmeasured="; ".join(reasons)), shares


def _crashes(broken: Iterable[Broken]) -> int:
    return sum(one.rule.effect == "crashes" for one in broken)


def _fastest(options: Sequence[Padding]) -> Padding:
    """Returns the option with the fewest crashes and the largest saving. Of those within `_ALIKE` of it, the one
    that changes fewest dimensions, to the roundest sizes, as kernels differ in what alignment they want beyond 16
    bytes."""
    fewest = min(one.crashes for one in options)
    most = max(one.saving for one in options if one.crashes == fewest)
    near = [one for one in options if one.crashes == fewest and one.saving >= most - _ALIKE]
    # A size's roundness: the largest power of two up to _ROUND that divides it.
    return min(
        near, key=lambda one: (len(one.changes), -min(min(_ROUND, c.to & -c.to) for c in one.changes), -one.saving)
    )
