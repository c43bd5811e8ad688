"""Checks the results of a task before and after it is timed, and changes its inputs in between.

A sweep's worker wraps each timed task in an `Audit`. The inputs change between samples, and the
outputs are overwritten before each check, so a result that was kept from an earlier run is found.
The shapes, dtypes, strides and memory of inputs and outputs are checked too. A provider runs in the
harness's own process and could change the harness itself. No check finds that.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from quantbench.errors import MeasurementError
from quantbench.measurement import Check
from quantbench.providers import correctness
from quantbench.providers.inputs import Inputs, input_templates, output_templates
from quantbench.workload import Attention, Gemm, GroupedGemm, Workload

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.providers.base import Provider, Task

# Changing some elements of an operand moves the result by this many times the tolerance, so that a
# result from before the change fails the check. The number of changed elements follows from this
# ratio: the relative change of the result is √(2 · fraction of changed elements).
_CHANGE_OVER_TOLERANCE = 4.0
# Distinct positions are drawn for this many changes of an operand. Each change uses a random
# stretch of the drawn positions.
_CHANGES_DRAWN = 16
# Maximum number of changed attention rows that the check recomputes. Several are needed, because a
# change moves the result less in some rows than in others.
_MAX_CHECKED_CHANGED_ROWS = 16
# Integer type with the size of an element, by that size in bytes. Elements are changed as integers,
# so that the same kernels serve all dtypes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Maximum number of copies of the task that are checked, in addition to the first task. The samples
# run the task and all copies in turn. A provider that is wrong in half of the copies escapes with
# probability 1/256.
_COPIES_CHECKED = 8
# SM clock cycles (about 5 ms) for which the stream is blocked before the outputs are poisoned.
_HOLD_CYCLES = 10_000_000


def check(provider: Provider, workload: Workload, device: DeviceSpec) -> Check | None:
    """Runs a workload on new inputs and checks its results, without timing.

    Returns None if the provider's task has no method `inputs`, so that nothing can be checked.

    Raises MeasurementError for a wrong result. Errors of the provider are passed on.
    """
    audit = Audit(provider, workload, device, "normal")
    audit.add(provider.prepare(workload, device))
    audit.before_timing()
    return audit.checked


class Audit:
    """Fills the inputs of the tasks of one point and checks their results.

    A point may be timed on several copies of its task, which the samples run in turn. To poison an
    output is to overwrite it with NaN. The audit has four steps:

    1. Before timing, the inputs are filled with new random numbers, the outputs are poisoned, the
       task runs once, and its outputs are checked. On CUDA the stream is blocked for a while before
       the outputs are poisoned. A provider that computes on another stream without waiting for this
       one then writes its results too early, and the poison overwrites them.
    2. Before every timed sample, random elements of the operands change. A result that was kept
       from an earlier run is then wrong. A provider could find the changed elements only by reading
       the whole operand.
    3. After the last sample, its outputs are checked against the current inputs. The inputs
       themselves must be as the harness wrote them. Some of the copies are checked too.
    4. Then the inputs get new random numbers, the outputs are poisoned, and the same sampler takes
       one more sample. Its outputs are checked in the same way.

    The seeds come from the operating system, so a provider cannot know the numbers.

    distribution: distribution of the timed inputs (see `inputs.Inputs`).
    elapsed_s: time in s that the checks have taken so far.

    A wrong result raises MeasurementError with an operation `check …`.
    """

    def __init__(
        self, provider: Provider, workload: Workload, device: DeviceSpec, distribution: str
    ) -> None:
        self.workload = workload
        self.elapsed_s = 0.0
        self._who = f"check {provider.id} on {workload}"
        self._device = device
        self._distribution = distribution
        self._random = random.Random(secrets.randbits(64))
        self._worst = 0.0
        self._watched: list[_Watched] = []

    def add(self, task: Task) -> Callable[[], None]:
        """Adds a task, or a copy of the first task, and returns the function to time.

        The function also calls `task.outputs`. If a provider computes its outputs only on demand,
        the computation is then timed.
        """
        if callable(getattr(task, "inputs", None)):
            watched = _Watched(self._who, self.workload, task)
            self._watched.append(watched)
            if len(self._watched) > 1:  # a copy is warmed up and timed like the first task
                watched.fill(self._inputs(self._distribution))

        def run() -> None:
            task.run()
            task.outputs()

        return run

    @property
    def checked(self) -> Check | None:
        """Worst relative error so far and its bound; None if the task has no method `inputs`."""
        if not self._watched:
            return None
        return Check(self._worst, correctness.tolerance(self.workload).relative_norm)

    def before_timing(self) -> None:
        """Checks the first task before timing (step 1).

        The inputs have the timed distribution. If this is `zeros`, the check runs on normal inputs,
        and the inputs are then zeroed for timing.
        """
        if not self._watched:
            return
        with self._spend():
            watched = self._watched[0]
            zeros = self._distribution == "zeros"
            watched.fill(self._inputs("normal" if zeros else self._distribution))
            if watched.on_cuda or len(watched.task.outputs()) == 0:
                watched.task.run()  # loads the task's kernels and allocates its outputs
            # The first change of inputs loads kernels. This must not happen while the stream is
            # blocked.
            self.before_sample()
            if watched.on_cuda:
                torch.cuda.synchronize()
                torch.cuda._sleep(_HOLD_CYCLES)
            watched.poison()
            watched.task.run()
            self._verify(watched, "before timing")
            if zeros:
                watched.refill(self._inputs("zeros"))

    def before_sample(self) -> None:
        """Changes random elements of the operands before a timed sample (step 2).

        The operands of the first task and of one random copy change. The changes are queued on the
        stream on which the samples run.
        """
        for watched in self._watched[:1]:
            watched.change(self._random)
        if len(self._watched) > 1:
            self._random.choice(self._watched[1:]).change(self._random)

    def after_sampling(self, sample: Callable[[], object]) -> None:
        """Runs the checks after the last sample (steps 3 and 4).

        sample: function that takes one more sample with the same sampler.
        """
        if not self._watched:
            return
        with self._spend():
            first, *copies = self._watched
            picked = [first, *self._random.sample(copies, min(_COPIES_CHECKED, len(copies)))]
            for each in picked:
                self._verify(each, "after timing")
            for each in picked:
                each.refill(self._inputs("normal"))
                each.poison()
            sample()
            for each in picked:
                self._verify(each, "after timing, on new inputs")

    def _verify(self, watched: _Watched, when: str) -> None:
        """Checks one task, and keeps the error if it is the worst so far."""
        self._worst = max(self._worst, watched.verify(when, self._inputs("normal").generator))

    def _inputs(self, distribution: str) -> Inputs:
        """Returns a generator of new random inputs, with a secret seed."""
        return Inputs(self._device, distribution, secrets.randbits(62))

    @contextmanager
    def _spend(self) -> Iterator[None]:
        """Adds the time of the block to `elapsed_s`."""
        start_s = perf_counter()
        try:
            yield
        finally:
            self.elapsed_s += perf_counter() - start_s


class _Watched:
    """One task, with a record of the numbers that the harness wrote into its inputs.

    A row of an input is a row of a, a column of b, or the last dimension of any other input.

    _changes: generator of the changes between samples, by the index of the input.
    _fingerprints: fingerprint of each input, by the index of the input: a random vector, and the
        dot product of this vector with each row. A fingerprint shows whether anyone but the harness
        has changed the input.
    """

    def __init__(self, who: str, workload: Workload, task: Task) -> None:
        self.task = task
        self._who = who
        self._workload = workload
        self._inputs = task.inputs()
        expected = input_templates(workload)
        _require_alike(who, "input", self._inputs, expected, strides=True)
        self.on_cuda = self._inputs[0].is_cuda
        # These inputs change between samples: both operands of a GEMM, the scores of a softmax, the
        # queries of attention, or the tokens of a permutation. In a backward pass, only the
        # gradient changes.
        backward = getattr(workload, "direction", "forward") == "backward"
        last = len(self._inputs) - 1
        self._changing: tuple[int, ...] = (0,)
        self._refilled = range(last + 1)
        if isinstance(workload, Gemm | GroupedGemm):
            self._changing = (0, 1)
        elif backward:
            self._changing = (last,)
            self._refilled = range(last, last + 1)
        self._changes: dict[int, _Changes] = {}
        self._fingerprints: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fill(self, inputs: Inputs) -> None:
        """Writes new numbers into all inputs, before the first run."""
        for tensor in self._inputs:
            inputs.fill(tensor)
        self._remember(range(len(self._inputs)), inputs)

    def refill(self, inputs: Inputs) -> None:
        """Writes new numbers into all inputs that may change after the first run.

        In a backward pass, only the gradient may change.
        """
        for number in self._refilled:
            inputs.fill(self._inputs[number])
        self._remember(self._refilled, inputs)

    def change(self, chance: random.Random) -> None:
        """Changes random elements of every input that changes between samples."""
        for changes in self._changes.values():
            changes.make(chance)

    def poison(self) -> None:
        """Fills the outputs with NaN, so that elements which the next run leaves out are found.

        Integer outputs are filled with the largest number of their dtype.
        """
        with torch.no_grad():
            for output in self.task.outputs():
                if output.dtype.is_floating_point:
                    output.fill_(torch.nan)
                else:
                    output.fill_(torch.iinfo(output.dtype).max)

    def verify(self, when: str, generator: torch.Generator) -> float:
        """Checks the outputs of the last run, and that only the harness changed the inputs.

        Returns the relative error of the outputs, and undoes the changes between samples.

        when: time of the check in words, for error messages.
        generator: source of the random vectors and rows of the check.
        """
        who = f"{self._who} {when}"
        outputs = self.task.outputs()
        strides = isinstance(self._workload, Gemm | GroupedGemm)
        _require_alike(who, "output", outputs, output_templates(self._workload), strides=strides)
        _require_apart(who, self._inputs, outputs)
        if self.on_cuda:
            # The outputs are copied at once, in the order of this stream. Results that another
            # stream writes later are then not in the copies, and the check fails. If there is no
            # memory for copies, the checks read the outputs themselves, a little later.
            with suppress(torch.OutOfMemoryError):
                outputs = tuple(output.detach().clone() for output in outputs)
        required_rows: list[tuple[int, ...]] = []
        if isinstance(self._workload, Attention):
            for changes in self._changes.values():
                required_rows += changes.last_rows()
        error = correctness.check(
            who, self._workload, self._inputs, outputs, generator, required_rows=required_rows
        )
        for number, (vector, remembered) in self._fingerprints.items():
            as_written = number not in self._changes or self._changes[number].undo()
            # The dot products are computed anew. 1e-5 allows for fp32 sums in another order.
            found = self._fingerprint(number, vector)
            same = bool(((found - remembered).abs() <= 1e-5 * remembered.abs().max()).all())
            if not (as_written and same):
                raise MeasurementError(
                    who, f"input {number} was changed", "inputs left as the harness wrote them"
                )
        return error

    def _remember(self, numbers: Sequence[int], inputs: Inputs) -> None:
        """Takes the fingerprints of some inputs, and draws their next changes.

        numbers: indices of the inputs.
        inputs: source of the changes.
        """
        for number in numbers:
            rows = self._rows(number)
            if number in self._changing:
                bound = correctness.tolerance(self._workload).relative_norm
                share = (_CHANGE_OVER_TOLERANCE * bound) ** 2 / 2
                count = max(rows.shape[-1], ceil(share * rows.numel()))
                self._changes[number] = _Changes(
                    self._inputs[number].detach(), min(count, rows.numel()), inputs
                )
            device = rows.device
            generator = torch.Generator(device=device).manual_seed(secrets.randbits(62))
            # The absolute values are 1 to 2, so that every element has a weight in the sum.
            vector = torch.rand(rows.shape[-1], generator=generator, device=device) + 1
            vector *= torch.randint(2, vector.shape, generator=generator, device=device) * 2 - 1
            self._fingerprints[number] = vector, self._fingerprint(number, vector)

    def _fingerprint(self, number: int, vector: torch.Tensor) -> torch.Tensor:
        """Returns the dot product of each row of an input with a vector."""
        rows = self._rows(number)
        matrices = rows.reshape(-1, *rows.shape[-2:]) if rows.dim() > 1 else rows[None, None]
        compute = correctness.fast_format()
        vectors = vector.to(compute)[:, None].expand(len(matrices), -1, -1)
        return correctness.project(matrices, compute, right=vectors).right.reshape(rows.shape[:-1])

    def _rows(self, number: int) -> torch.Tensor:
        """Returns an input with its rows in the last dimension."""
        tensor = self._inputs[number].detach()
        if isinstance(self._workload, Gemm | GroupedGemm) and number == 1:
            return tensor.mT
        return tensor


class _Changes:
    """Changes random elements of one operand. A change queues one kernel, for every dtype.

    operand: the tensor to change, contiguous or transposed in its last two dimensions.
    count: number of elements that one change replaces.
    inputs: source of the positions and of the new numbers.

    _positions: distinct indices into the operand's memory, in random order (positions,).
    _numbers: new numbers, as bits (positions,).
    _first: original numbers of the operand at `_positions`, as bits (positions,).
    _made: for each change so far, its start index in `_positions` and its start index in
        `_numbers`.
    """

    def __init__(self, operand: torch.Tensor, count: int, inputs: Inputs) -> None:
        self._shape = operand.shape
        bits = _BITS[operand.element_size()]
        stored = operand if operand.is_contiguous() else operand.mT
        self._elements = stored.view(-1).view(bits)
        where = operand.device
        chance = inputs.generator
        drawn = torch.randint(
            operand.numel(), (count * _CHANGES_DRAWN,), generator=chance, device=where
        ).unique()
        self._positions = drawn[torch.randperm(len(drawn), generator=chance, device=where)]
        self._count = min(count, len(drawn))
        numbers = torch.empty(len(drawn), dtype=operand.dtype, device=where)
        inputs.fill(numbers)
        self._numbers = numbers.view(bits)
        self._first = self._elements[self._positions]
        self._made: list[tuple[int, int]] = []

    def make(self, chance: random.Random) -> None:
        """Replaces `count` elements at random positions by random numbers.

        chance: source of the randomness.
        """
        low = chance.randrange(len(self._positions) - self._count + 1)
        new = chance.randrange(len(self._positions) - self._count + 1)
        self._made.append((low, new))
        positions = self._positions[low : low + self._count]
        self._elements.index_copy_(0, positions, self._numbers[new : new + self._count])

    def undo(self) -> bool:
        """Writes the original numbers back.

        Returns whether, before that, the operand had at all positions the numbers that the harness
        had written.
        """
        expected = self._first.clone()
        for low, new in self._made:
            expected[low : low + self._count] = self._numbers[new : new + self._count]
        found = self._elements[self._positions]
        self._elements.index_copy_(0, self._positions, self._first)
        self._made.clear()
        return torch.equal(found, expected)

    def last_rows(self) -> list[tuple[int, ...]]:
        """Returns rows of a contiguous operand that the last change touched.

        At most _MAX_CHECKED_CHANGED_ROWS are returned.

        A row is given by the indices of all dimensions but the last.
        """
        if not self._made:
            return []
        low = self._made[-1][0]
        positions = self._positions[low : low + min(_MAX_CHECKED_CHANGED_ROWS, self._count)]
        *rows, _ = torch.unravel_index(positions, self._shape)
        return [tuple(row) for row in torch.stack(rows, dim=1).tolist()]


def _require_alike(
    who: str,
    what: str,
    tensors: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    *,
    strides: bool,
) -> None:
    """Raises MeasurementError unless the tensors have the expected shapes, dtypes and strides.

    who: operation for error messages.
    what: `input` or `output`, for error messages.
    strides: whether the strides must equal those of the tensors in `expected`. If False, any
        strides are allowed with which no two elements share memory.
    """
    if len(tensors) != len(expected):
        raise MeasurementError(who, f"{len(tensors)} {what}s", f"{len(expected)}")
    for number, (tensor, wanted) in enumerate(zip(tensors, expected, strict=True)):
        if type(tensor) is not torch.Tensor:
            raise MeasurementError(
                who, f"{what} {number} is a {type(tensor).__name__}", "a plain torch.Tensor"
            )
        found = _describe(tensor)
        need = _describe(wanted)
        if found != need:
            raise MeasurementError(who, f"{what} {number} is {found}", need)
        if strides:
            right = _steps(tensor) == _steps(wanted)
            words = f"strides {tuple(wanted.stride())}"
        else:
            right = _dense(tensor)
            words = "strides of a tensor without overlap"
        if not right:
            found = f"{what} {number} has strides {tuple(tensor.stride())}"
            raise MeasurementError(who, found, words)


def _describe(tensor: torch.Tensor) -> str:
    """Describes a tensor for error messages: `128×64 bfloat16`."""
    return f"{'×'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"


def _steps(tensor: torch.Tensor) -> list[int]:
    """Returns the strides of the dimensions that have more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _dense(tensor: torch.Tensor) -> bool:
    """Returns whether no two elements of a tensor share memory."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return False
        reach = max(reach, stride * size)
    return True


def _require_apart(
    who: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Raises MeasurementError if two tensors share memory."""
    spans = [(*_span(tensor), f"input {number}") for number, tensor in enumerate(inputs)]
    spans += [(*_span(tensor), f"output {number}") for number, tensor in enumerate(outputs)]
    spans.sort()
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end:
            raise MeasurementError(
                who, f"{first} and {second} share memory", "tensors of their own"
            )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address of the first byte of a tensor and the address after its last byte."""
    reach = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        reach += (size - 1) * stride
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()
