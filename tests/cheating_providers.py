"""Providers that look faster than they are, each in its own way. `test_cheats` shows that none gets
a grade above D.
"""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import torch
from references import results

from quantbench.device.spec import DeviceSpec
from quantbench.providers.inputs import TORCH_DTYPES, Inputs
from quantbench.workload import Attention, Gemm, Workload


class Honest:
    """Computes what it should; those below replace `compute`, or more. A task of its own: one per
    point is enough.
    """

    id = "tests.cheating_providers:Honest"
    calls = 0

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        return None

    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        task = type(self)()
        task.work = workload
        task.allocate(Inputs(device, "normal", seed))
        return task

    def allocate(self, inputs: Inputs) -> None:
        assert isinstance(self.work, Gemm)
        self.a, self.b = inputs.operands(self.work)
        self.out = torch.empty(self.work.m, self.work.n, dtype=TORCH_DTYPES[self.work.dtype])

    def run(self) -> None:
        self.calls += 1
        self.compute()

    def compute(self) -> None:
        torch.mm(self.a, self.b, out=self.out)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (self.a, self.b)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return (self.out,)

    def launch(self) -> None:
        return None

    work: Workload
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor


# --- wrong at some sizes or after some calls ------------------------------------------------------------------------


class HalfAboveK320(Honest):
    """Right on small shapes; of larger ones it leaves out half of the columns."""

    def compute(self) -> None:
        if self.a.shape[1] <= 320:
            super().compute()
            return
        half = self.out.shape[1] // 2
        self.out[:, :half] = self.a @ self.b[:, :half]
        self.out[:, half:] = 0


class WrongAfterTwoCalls(Honest):
    def compute(self) -> None:
        if self.calls <= 2:
            super().compute()


class WrongAfterFiveCalls(Honest):
    """Right while it may be checked before timing and warmed up."""

    def compute(self) -> None:
        if self.calls <= 5:
            super().compute()


class HalfTheReduction(Honest):
    """Claims twice the flops that it does."""

    def compute(self) -> None:
        half = self.a.shape[1] // 2
        torch.mm(self.a[:, :half], self.b[:half], out=self.out)


# --- results kept from earlier --------------------------------------------------------------------------------------


class CachesByPointer(Honest):
    """One result for each pair of addresses."""

    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.known: dict[tuple[int, int], torch.Tensor] = {}

    def compute(self) -> None:
        key = self.a.data_ptr(), self.b.data_ptr()
        if key not in self.known:
            self.known[key] = self.a @ self.b
        self.out.copy_(self.known[key])


class CachesByCorners(Honest):
    """Computes anew only when some numbers that it looks at have changed: a check on new inputs
    passes.
    """

    seen: ClassVar[tuple[float, ...]] = ()

    def compute(self) -> None:
        corners = tuple(float(t[i, j]) for t in (self.a, self.b) for i in (0, -1) for j in (0, -1))
        if corners != self.seen or self.out[0, 0].isnan():
            super().compute()
            self.seen = corners  # type: ignore[misc]


class FollowsSigns(Honest):
    """Remembers a column of a and a row of b; negates the rows and columns of its result whose sign
    changed there. Then it does a third of the work for show."""

    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.column = torch.zeros(len(self.a))
        self.row = torch.zeros(self.b.shape[1])

    def compute(self) -> None:
        column = self.a[:, 0].clone()
        row = self.b[0].clone()
        new_inputs = (column != self.column).float().mean() > 0.5
        if not new_inputs and not self.out[0, 0].isnan():
            self.out[column.sign() != self.column.sign()] *= -1
            self.out[:, row.sign() != self.row.sign()] *= -1
            third = self.a.shape[1] // 3
            self.shown = self.a[:, :third] @ self.b[:third]
        else:
            super().compute()
        self.column, self.row = column, row


class FollowsAFewRows(Honest):
    """Remembers eight columns of a and eight rows of b; recomputes the rows and columns of its
    result that changed there, and all of it if more than half did."""

    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.columns = torch.zeros(len(self.a), 8)
        self.rows = torch.zeros(8, self.b.shape[1])

    def compute(self) -> None:
        columns = self.a[:, :: self.a.shape[1] // 8].clone()
        rows = self.b[:: len(self.b) // 8].clone()
        in_a = (columns != self.columns).any(1)
        in_b = (rows != self.rows).any(0)
        if self.out[0, 0].isnan() or in_a.sum() > len(in_a) / 2:
            super().compute()
        else:
            self.out[in_a] = self.a[in_a] @ self.b
            self.out[:, in_b] = self.a @ self.b[:, in_b]
        self.columns, self.rows = columns, rows


class ReturnsThePrevious(Honest):
    """Hands out the result of the call before, and computes this one for the next."""

    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.next = torch.zeros_like(self.out)

    def compute(self) -> None:
        self.out.copy_(self.next)
        torch.mm(self.a, self.b, out=self.next)


class PreparedAhead(Honest):
    """The product is computed when the task is made."""

    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.ready = self.a @ self.b

    def compute(self) -> None:
        self.out.copy_(self.ready)


# --- work that is not done while the clock runs ---------------------------------------------------------------------


class WritesNothing(Honest):
    def compute(self) -> None:
        pass


class InAThread(Honest):
    """Returns at once; a thread computes a little later."""

    def compute(self) -> None:
        def later() -> None:
            time.sleep(0.5)
            torch.mm(self.a, self.b, out=self.out)

        threading.Thread(target=later, daemon=True).start()


class LazyTensor(torch.Tensor):
    """Computes itself when it is first used."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunctionSubclass():
            for arg in args:
                if isinstance(arg, LazyTensor):
                    torch.mm(*arg.factors, out=arg.view(arg.shape))  # type: ignore[attr-defined]
            return function(*args, **(kwargs or {}))


class WhenItIsRead(Honest):
    """The output computes itself when somebody reads it."""

    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.out = self.out.as_subclass(LazyTensor)
        self.out.factors = (self.a, self.b)  # type: ignore[attr-defined]

    def compute(self) -> None:
        pass


class WhenItIsPoisoned(Honest):
    """Computes only when the output holds poison, as a check leaves it."""

    def compute(self) -> None:
        if self.out[0, 0].isnan():
            super().compute()


class WhenItIsChecked(Honest):
    """Computes only when the harness's checks are on the stack."""

    def compute(self) -> None:
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name in ("before_timing", "after_sampling"):
                super().compute()
                return
            frame = frame.f_back  # type: ignore[assignment]


class OnAllCores(Honest):
    """Right, on more cores than the one that is timed."""

    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(time.sleep, 0).result()

    def compute(self) -> None:
        self.pool.submit(super().compute).result()


# --- tensors that are not what they should be -----------------------------------------------------------------------


class ZeroesItsInputs(Honest):
    """Makes the work trivial: the product of zeros is zero."""

    def compute(self) -> None:
        self.a.zero_()
        self.out.zero_()


class SpoilsItsInputs(Honest):
    """Right, and leaves one input changed."""

    def compute(self) -> None:
        super().compute()
        self.b[0].mul_(0.5)


class SparseInputs(Honest):
    """Counts on the zeros that it makes its inputs of."""

    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.a[:, 16:] = 0

    def compute(self) -> None:
        torch.mm(self.a[:, :16], self.b[:16], out=self.out)


class ViewOfAnInput(Honest):
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return (self.a[: self.out.shape[0], : self.out.shape[1]],)


class SmallerOutput(Honest):
    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.out = self.out[::2].clone()

    def compute(self) -> None:
        torch.mm(self.a[::2], self.b, out=self.out)


class HalfPrecisionOutput(Honest):
    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.out = self.out.half()

    def compute(self) -> None:
        self.out.copy_(self.a @ self.b)


class ColumnMajorOutput(Honest):
    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.out = self.out.t().contiguous().t()


class OneRowRepeated(Honest):
    """An output of stride 0: one row in memory."""

    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.row = torch.empty(1, self.out.shape[1])
        self.out = self.row.expand_as(self.out)

    def compute(self) -> None:
        torch.mm(self.a[:1], self.b, out=self.row)


class OtherLayout(Honest):
    """Inputs stored as is fastest, not as the workload asks."""

    def allocate(self, inputs: Inputs) -> None:
        super().allocate(inputs)
        self.a = self.a.t().contiguous().t()


# --- results that are a little wrong --------------------------------------------------------------------------------


class WritesHalf(Honest):
    def compute(self) -> None:
        half = len(self.out) // 2
        torch.mm(self.a[:half], self.b, out=self.out[:half])


class Bf16Arithmetic(Honest):
    """bf16 for fp32."""

    def compute(self) -> None:
        self.out.copy_(self.a.bfloat16() @ self.b.bfloat16())


class Tf32Arithmetic(Honest):
    """Operands cut to 11 bits for fp32."""

    def compute(self) -> None:
        a, b = ((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (self.a, self.b))
        torch.mm(a, b, out=self.out)


class Fp16Sums(Honest):
    """fp16 products whose sum is kept in fp16."""

    def compute(self) -> None:
        self.out.zero_()
        for k in range(0, self.a.shape[1], 8):
            self.out += self.a[:, k : k + 8] @ self.b[k : k + 8]


# --- softmax and attention ------------------------------------------------------------------------------------------


class HonestReference(Honest):
    """Grouped products, permutations, softmax and attention from their definitions; `damage` spoils
    the results.
    """

    def allocate(self, inputs: Inputs) -> None:
        self.given = inputs.operands(self.work)
        self.results: tuple[torch.Tensor, ...] = ()

    def compute(self) -> None:
        self.results = tuple(r.to(self.given[0].dtype) for r in results(self.work, self.given))
        self.damage()

    def damage(self) -> None:
        pass

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.given

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.results


class OneHeadMissing(HonestReference):
    def damage(self) -> None:
        self.results[-1][0, 1] = 0


class SmallestExpertMissing(HonestReference):
    def damage(self) -> None:
        self.results[0][-3:] = 0


class KeysMissing(HonestReference):
    """Looks at half of the keys."""

    def compute(self) -> None:
        assert isinstance(self.work, Attention)
        q, k, v = self.given[:3]
        half = k.shape[2] // 2
        o = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :half], v[:, :, :half])
        self.results = (o,)


class KeepsTheFirstResult(HonestReference):
    def compute(self) -> None:
        if not self.results:
            super().compute()


# --- the harness itself ---------------------------------------------------------------------------------------------


class HidesItsInputs(Honest):
    """As tasks were before they had inputs(): nothing can be checked."""

    inputs = None  # type: ignore[assignment]
