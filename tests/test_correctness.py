"""Wrong results must be caught: by fakes that are wrong in each way a kernel can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, MeasurementError
from quantbench.launch import Launch
from quantbench.providers import catalog
from quantbench.providers.base import Task, Tolerance
from quantbench.providers.correctness import check, compare, poison, relative_error
from quantbench.providers.stand_ins import stand_in
from quantbench.workload import Attention, Gemm, Softmax, Workload

CPU = DeviceSpec(
    name="cpu-x", kind="cpu", sm_count=1, sm_clock_mhz=3000, l2_bytes=2**25, smem_per_sm_bytes=0,
    memory_bytes=2**33, memory_gb_per_s=20, peak_tflops={"fp32": 0.1},
)  # fmt: skip

Damage = Callable[[torch.Tensor], None]


class FakeTask:
    """Copies the right result out and damages it."""

    def __init__(self, right: torch.Tensor, damage: Damage, *, allocates: bool = False) -> None:
        self.right = right
        self.damage = damage
        self.allocates = allocates
        self.results: tuple[torch.Tensor, ...] = () if allocates else (torch.zeros_like(right),)
        self.runs = 0

    def run(self) -> None:
        self.runs += 1
        if self.allocates:
            self.results = (torch.empty_like(self.right),)
        (out,) = self.results
        out.copy_(self.right)
        self.damage(out)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.results

    def reference(self) -> tuple[torch.Tensor, ...]:
        return (self.right.double(),)

    def launch(self) -> Launch | None:
        return None


class Stale(FakeTask):
    """Writes its whole result the first time and leaves out one element ever after."""

    def run(self) -> None:
        kept = self.results[0][-1, -1].clone()
        self.results[0].copy_(self.right)
        self.results[0][-1, -1] = kept


class FakeProvider:
    """Runs anything, as it is told."""

    id = "fake.kernel"
    kind = "gemm"

    def __init__(
        self, damage: Damage = lambda out: None, *, dtype: torch.dtype = torch.bfloat16, task: Task | None = None
    ) -> None:
        self.damage = damage
        self.dtype = dtype
        self.task = task
        self.prepared: list[tuple[Workload, str, int]] = []
        self.refuses: Callable[[Workload], bool] = lambda workload: False

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        return "it does not" if self.refuses(workload) else None

    def prepare(self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0) -> Task:
        self.prepared.append((workload, distribution, seed))
        if self.task is not None:
            return self.task
        generator = torch.Generator().manual_seed(seed)
        right = torch.randn(64, 64, generator=generator).mul(50).to(self.dtype)
        return FakeTask(right, self.damage)

    def tolerance(self, workload: Workload) -> Tolerance:
        return Tolerance(5e-3, "bf16") if self.dtype.is_floating_point else Tolerance(0.0, "integers are exact")


WORK = Gemm(64, 64, 32)


def test_a_right_result_passes() -> None:
    check(FakeProvider(), WORK, CPU)
    check(FakeProvider(dtype=torch.int32), WORK, CPU)


def wrong_tile(out: torch.Tensor) -> None:
    out[32:, 32:] = 0


def wrong_scale(out: torch.Tensor) -> None:
    out.mul_(1.01)


def swapped(out: torch.Tensor) -> None:
    out.copy_(out.t().clone())


def one_nan(out: torch.Tensor) -> None:
    out[5, 7] = torch.nan


def one_infinity(out: torch.Tensor) -> None:
    out[5, 7] = torch.inf


def all_nan(out: torch.Tensor) -> None:
    out.fill_(torch.nan)


@pytest.mark.parametrize(
    ("damage", "value"),
    [
        (wrong_tile, r"relative error 0\.(49|5)\d*"),
        (wrong_scale, r"relative error 0\.01\d*"),
        (swapped, r"relative error 1\.\d+"),
        (torch.Tensor.zero_, "relative error 1"),
        (one_nan, "1 of 4096 elements not written or not a number"),
        (one_infinity, "1 of 4096 elements not written or not a number"),
        (all_nan, "4096 of 4096 elements not written or not a number"),
    ],
)
def test_a_wrong_result_is_caught(damage: Damage, value: str) -> None:
    with pytest.raises(MeasurementError, match=rf"^check fake\.kernel on gemm 64×64×32 bf16 nn: {value}; expected "):
        check(FakeProvider(damage), WORK, CPU)


def test_the_message_names_provider_workload_error_and_bound() -> None:
    with pytest.raises(MeasurementError) as caught:
        check(FakeProvider(torch.Tensor.zero_), WORK, CPU)
    assert str(caught.value) == (
        "check fake.kernel on gemm 64×64×32 bf16 nn: relative error 1; expected at most 0.005 (bf16)"
    )


def off_by_one(out: torch.Tensor) -> None:
    out[0, 0] += 1


def leaves_poison(out: torch.Tensor) -> None:
    out[0, :3] = torch.iinfo(out.dtype).max


def test_integers_must_be_exact() -> None:
    with pytest.raises(MeasurementError, match=r"relative error .*; expected at most 0 \(integers are exact\)"):
        check(FakeProvider(off_by_one, dtype=torch.int32), WORK, CPU)
    with pytest.raises(MeasurementError, match="3 of 4096 elements not written"):
        check(FakeProvider(leaves_poison, dtype=torch.int32), WORK, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_an_element_that_nobody_writes_is_caught(dtype: torch.dtype) -> None:
    right = torch.randn(64, 64).mul(50).to(dtype)
    task = Stale(right, lambda out: None)
    task.results[0].copy_(right)  # left from before, and right: only the poison shows that it is not written
    with pytest.raises(MeasurementError, match="1 of 4096 elements not written"):
        check(FakeProvider(dtype=dtype, task=task), WORK, CPU)


def test_operations_that_allocate_are_run_before_they_are_poisoned() -> None:
    task = FakeTask(torch.randn(8, 8), lambda out: None, allocates=True)
    check(FakeProvider(task=task), WORK, CPU)
    assert task.runs == 2
    kept = FakeTask(torch.randn(8, 8), lambda out: None)
    check(FakeProvider(task=kept), WORK, CPU)
    assert kept.runs == 1


def test_shapes_and_counts_are_compared() -> None:
    task = FakeTask(torch.randn(8, 8), lambda out: None)
    task.reference = lambda: (torch.randn(8, 9),)  # type: ignore[method-assign]
    with pytest.raises(MeasurementError, match=r"a result of shape \(8, 8\); expected \(8, 9\)"):
        check(FakeProvider(task=task), WORK, CPU)
    task.reference = lambda: ()  # type: ignore[method-assign]
    with pytest.raises(MeasurementError, match="1 outputs; expected 0, one per reference"):
        check(FakeProvider(task=task), WORK, CPU)


def test_one_of_several_outputs_is_named() -> None:
    task = FakeTask(torch.randn(8, 8), torch.Tensor.zero_)
    good = torch.randn(2, 2)
    task.outputs = lambda: (good, task.results[0])  # type: ignore[method-assign]
    task.reference = lambda: (good.double(), task.right.double())  # type: ignore[method-assign]
    task.run = lambda: (good.copy_(torch.ones(2, 2)), task.results[0].zero_())  # type: ignore[assignment,method-assign]
    task.reference = lambda: (torch.ones(2, 2).double(), task.right.double())  # type: ignore[method-assign]
    with pytest.raises(
        MeasurementError, match=r"^check fake\.kernel on gemm 64×64×32 bf16 nn, output 1: relative error 1;"
    ):
        check(FakeProvider(task=task), WORK, CPU)


def test_inputs_are_normal_and_not_those_that_are_timed() -> None:
    provider = FakeProvider()
    check(provider, WORK, CPU, seed=7)
    ((_, distribution, seed),) = provider.prepared
    assert distribution == "normal"
    assert seed != 7


def test_a_large_workload_is_checked_on_a_smaller_one() -> None:
    provider = FakeProvider()
    large = Gemm(16384, 4100, 9999, layout="tn")
    check(provider, large, CPU)
    ((checked, _, _),) = provider.prepared
    assert checked == stand_in(large, "cpu") != large


def test_a_stand_in_that_the_provider_refuses_is_not_used() -> None:
    provider = FakeProvider()
    large = Gemm(16384, 4100, 9999)
    provider.refuses = lambda workload: workload != large
    check(provider, large, CPU)
    ((checked, _, _),) = provider.prepared
    assert checked == large


@pytest.mark.parametrize(
    ("provider_id", "workload"),
    [
        ("torch.mm", Gemm(5000, 4097, 8200, layout="nt")),
        ("torch.mm", Gemm(5000, 4097, 8200, batch=12, dtype="fp16", layout="tn")),
        ("torch.mm", Gemm(5000, 4096, 8200, dtype="int8")),
        ("torch.addmm", Gemm(5000, 4097, 8200, dtype="fp32")),
        ("torch.eager", Softmax(192, 4096, 4096, mask="full", mask_batch=4)),
        ("torch.eager", Softmax(192, 4096, 4096, dtype="fp16", direction="backward")),
        ("torch.flash", Attention(8, 64, 8192, 8192, 128, kv_heads=8, direction="backward")),
        ("torch.math", Attention(8, 64, 8192, 8192, 128, dtype="fp32")),
    ],
)
def test_torchs_providers_pass(provider_id: str, workload: Workload) -> None:
    check(catalog.make(provider_id), workload, CPU)


@given(
    m=st.integers(1, 20_000), n=st.integers(1, 20_000), k=st.integers(1, 70_000), batch=st.integers(1, 500),
    layout=st.sampled_from(["nn", "nt", "tn"]), kind=st.sampled_from(["cpu", "cuda"]),
)  # fmt: skip
def test_stand_ins_of_products_keep_what_is_ragged(m: int, n: int, k: int, batch: int, layout: str, kind: str) -> None:
    gemm = Gemm(m, n, k, batch=batch, layout=layout)
    small = stand_in(gemm, kind)
    assert isinstance(small, Gemm)
    assert replace(small, m=m, n=n, k=k, batch=batch) == gemm
    for size, smaller in [(m, small.m), (n, small.n), (k, small.k)]:
        assert smaller <= size
        assert (size - smaller) % 128 == 0
        assert smaller < (320 if kind == "cpu" else 1280)
    assert small.batch == min(batch, 3)


@given(
    heads=st.integers(1, 128), samples=st.integers(1, 32), rows=st.integers(1, 9000), cols=st.integers(1, 9000),
    mask=st.sampled_from(["causal", "full", "none"]),
)  # fmt: skip
def test_stand_ins_of_softmax_keep_masks_and_divisors(
    heads: int, samples: int, rows: int, cols: int, mask: str
) -> None:
    cols = rows if mask == "causal" else cols
    softmax = Softmax(heads * samples, rows, cols, mask=mask, mask_batch=samples, scale=0.5)
    small = stand_in(softmax, "cpu")
    assert isinstance(small, Softmax)
    assert (small.mask, small.dtype, small.scale, small.direction) == (mask, "bf16", 0.5, "forward")
    assert (softmax.batch - small.batch) % 16 == 0
    assert small.batch % small.mask_batch == 0
    assert 1 < small.mask_batch <= samples or small.mask_batch == samples == 1
    assert (rows - small.rows) % 64 == (cols - small.cols) % 64 == 0
    assert small.batch * small.rows * small.cols <= 64 * 192 * 192


@given(
    groups=st.integers(1, 16), kv_heads=st.integers(1, 64), batch=st.integers(1, 64), seq=st.integers(1, 70_000),
    head_dim=st.sampled_from([40, 64, 80, 128, 256]),
)  # fmt: skip
def test_stand_ins_of_attention_keep_heads_in_proportion(
    groups: int, kv_heads: int, batch: int, seq: int, head_dim: int
) -> None:
    attention = Attention(batch, groups * kv_heads, seq, seq, head_dim, kv_heads=kv_heads)
    small = stand_in(attention, "cpu")
    assert isinstance(small, Attention)
    assert small.heads == groups * small.kv_heads
    assert (small.head_dim, small.causal, small.dtype) == (head_dim, True, "bf16")
    assert small.seq_q == small.seq_k <= min(seq, 191)
    assert (seq - small.seq_q) % 64 == 0


def test_a_small_workload_stands_for_itself() -> None:
    for workload in (Gemm(100, 100, 100), Softmax(16, 128, 128), Attention(2, 8, 100, 100, 64, kv_heads=2)):
        assert stand_in(workload, "cpu") == workload


def test_poison_by_format() -> None:
    half, integer = torch.zeros(3, dtype=torch.float16), torch.zeros(3, dtype=torch.int32)
    graded = torch.zeros(3, requires_grad=True)
    poison((half, integer, graded))
    assert half.isnan().all()
    assert graded.isnan().all()
    assert integer.tolist() == [2**31 - 1] * 3


def test_the_error_of_a_zero_reference_is_absolute() -> None:
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_error(torch.full((4,), 0.5), torch.zeros(4)) == 1


def test_nan_in_the_reference_never_passes() -> None:
    with pytest.raises(MeasurementError, match="relative error nan"):
        compare("check", torch.ones(2), torch.tensor([1.0, torch.nan]), Tolerance(1.0, "anything"))


@pytest.mark.parametrize(("name", "what"), [("os:path", "a module"), ("os:getcwd", "a builtin_function_or_method")])
def test_a_name_that_means_no_class_is_no_provider(name: str, what: str) -> None:
    with pytest.raises(InputError, match=f"{name}.*{what}.*class with unsupported, prepare, tolerance"):
        catalog.make(name)


def test_a_class_of_something_else_is_no_provider() -> None:
    with pytest.raises(InputError, match=r"pathlib:Path.*without unsupported, prepare, tolerance"):
        catalog.make("pathlib:Path")
