"""The references and bounds of the harness: right results pass at every size, and each kind of
error is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_devices import CPU
from references import relative_error, results

from quantbench.errors import InputError, MeasurementError
from quantbench.providers import catalog, correctness
from quantbench.providers.audit import Audit, check
from quantbench.providers.inputs import TORCH_DTYPES, Inputs
from quantbench.workload import Attention, Collective, Gemm, GroupedGemm, Permute, Softmax, Workload
from quantbench.workload.moe import PERMUTATIONS

Tensors = tuple[torch.Tensor, ...]
Damage = Callable[[Tensors], object]


def case(work: Workload, *, distribution: str = "normal") -> tuple[Tensors, Tensors]:
    """Inputs, and right results in the output's format."""
    made = Inputs(CPU, distribution, seed=4)
    given = made.operands(work)
    dtype = TORCH_DTYPES[work.output_dtype if isinstance(work, Gemm | GroupedGemm) else work.dtype]
    return given, tuple(result.to(dtype) for result in results(work, given))


def error_of(work: Workload, given: Tensors, found: Tensors, seed: int = 0) -> float:
    return correctness.check("check", work, given, found, torch.Generator().manual_seed(seed))


EXPERT_FORMATS = (("bf16", "nn"), ("fp16", "nt"), ("fp32", "tn"))
WORKLOADS: list[Workload] = [
    *(Gemm(70, 50, 90, dtype=dtype) for dtype in ("fp16", "bf16", "fp32", "int8")),
    Gemm(70, 48, 96, dtype="fp8", layout="nt"),
    Gemm(1, 1, 1),
    Gemm(1, 300, 2),
    Gemm(300, 1, 1, layout="tn"),
    Gemm(33, 20, 4100, dtype="fp32", layout="tn"),
    Gemm(40, 30, 20, batch=7, layout="nt"),
    *(GroupedGemm((40, 0, 1, 33), 30, 20, dtype, layout) for dtype, layout in EXPERT_FORMATS),
    *(
        Permute(40, 30, 3, dtype, direction)
        for dtype in ("bf16", "fp32")
        for direction in PERMUTATIONS
    ),
    *(
        Softmax(6, 40, 40, mask=mask, mask_batch=2, direction=direction, dtype=dtype, scale=0.4)
        for mask in ("causal", "full", "none")
        for direction in ("forward", "backward")
        for dtype in ("fp16", "fp32")
    ),
    *(
        Attention(2, 4, 70, 70, 24, kv_heads=2, causal=causal, direction=direction, dtype=dtype)
        for causal in (True, False)
        for direction in ("forward", "backward")
        for dtype in ("bf16", "fp32")
    ),
    Attention(1, 2, 30, 70, 24, causal=False, direction="backward", dtype="fp32"),
]


@pytest.mark.slow
@pytest.mark.parametrize("work", WORKLOADS, ids=str)
def test_right_results_pass_whole_and_in_chunks(
    work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, found = case(work)
    bound = correctness.tolerance(work).relative_norm
    whole = error_of(work, given, found)
    assert whole <= bound / 2
    monkeypatch.setitem(correctness._CHUNK_ELEMENTS, "cpu", 400)
    assert error_of(work, given, found) == pytest.approx(
        whole, rel=0.2, abs=1e-9
    )  # other vectors, the same rows


@pytest.mark.parametrize("distribution", ["uniform", "integers", "zeros"])
def test_right_results_of_every_distribution_pass(distribution: str) -> None:
    work = Gemm(70, 50, 90)
    error_of(work, *case(work, distribution=distribution))


@given(
    m=st.integers(1, 80),
    n=st.integers(1, 80),
    k=st.integers(1, 200),
    batch=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_right_products_never_fail(m: int, n: int, k: int, batch: int, seed: int) -> None:
    for dtype in ("bf16", "fp32"):
        work = Gemm(m, n, k, batch=batch, dtype=dtype)
        error_of(work, *case(work), seed=seed)


@pytest.mark.parametrize(
    "work", [Gemm(200, 120, 60, dtype="fp32"), Gemm(200, 120, 60, batch=3)], ids=str
)
def test_the_error_is_estimated_without_bias(work: Gemm) -> None:
    """The mean over many draws is ‖out − ref‖ / ‖ref‖."""
    given, (found,) = case(work)
    (reference,) = results(work, given)
    noise = (
        torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) * found.float().std()
    )
    spoiled = (found + 0.3 * correctness.tolerance(work).relative_norm * noise).to(found.dtype)
    estimates = [error_of(work, given, (spoiled,), seed) for seed in range(20)]
    assert sum(estimates) / 20 == pytest.approx(relative_error(spoiled, reference), rel=0.1)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_a_product_is_read_once_or_twice(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check costs O(mn + nk + mk): a is read twice, b and c once, in whatever order they are
    stored.
    """
    work = Gemm(70, 50, 90, layout=layout)
    given, found = case(work)
    read: list[int] = []
    chunks = correctness.row_chunks

    def counted(matrices: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        assert matrices.stride(-1) == 1
        read.append(matrices.numel())
        return chunks(matrices)

    monkeypatch.setattr(correctness, "row_chunks", counted)
    error_of(work, given, found)
    assert sorted(read) == sorted([70 * 90, 70 * 90, 90 * 50, 70 * 50])


@pytest.mark.parametrize("transposed", [False, True])
def test_squares_are_summed_over_all_chunks(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(correctness._CHUNK_ELEMENTS, "cpu", 100)
    stored = torch.randn(3, 30, 20)
    matrices = stored.mT if transposed else stored
    found = correctness.project(matrices, torch.float32, square=True)
    assert found.square.item() == pytest.approx(stored.square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_error_in_the_whole_is_found_from_one_and_a_half_times_the_tolerance_on(
    dtype: str,
) -> None:
    """Products in 16 bits are checked in fp32, which finds as much as float64."""
    work = Gemm(200, 160, 700, dtype=dtype)
    given, (found,) = case(work)
    bound = correctness.tolerance(work).relative_norm
    noise = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    noise *= found.float().norm() / noise.norm()
    for seed in range(10):
        error_of(work, given, ((found.float() + 0.6 * bound * noise).to(found.dtype),), seed)
        with pytest.raises(MeasurementError, match="relative error"):
            error_of(work, given, ((found.float() + 1.5 * bound * noise).to(found.dtype),), seed)


def test_coarse_products_of_the_process_do_not_reach_the_checks() -> None:
    work = Gemm(70, 50, 90, dtype="fp16")
    assert correctness._precision(work) == torch.float32
    assert correctness._precision(replace(work, dtype="fp32")) == torch.float64
    torch.set_float32_matmul_precision("medium")
    try:
        assert correctness._precision(work) == correctness.fast_format() == torch.float64
        assert error_of(work, *case(work)) < 4e-4
    finally:
        torch.set_float32_matmul_precision("highest")


DAMAGE: dict[str, Damage] = {
    "zero tile": lambda found: found[0][..., 96:128, 64:96].zero_(),
    "zero last row": lambda found: found[0][..., -1, :].zero_(),
    "wrong column": lambda found: found[0][..., 7].copy_(found[0][..., 8]),
    "one large element": lambda found: found[0][..., 5, 7].add_(100),
    "scaled": lambda found: found[0].mul_(1.01),
    "a NaN": lambda found: found[0].view(-1)[77].fill_(torch.nan),
    "an infinity": lambda found: found[0].view(-1)[77].fill_(torch.inf),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "work",
    [
        Gemm(512, 400, 64),
        Gemm(512, 400, 64, dtype="fp32", layout="tn"),
        Gemm(200, 160, 64, batch=5, dtype="fp16"),
        GroupedGemm((300, 0, 12, 200), 400, 64, layout="nt"),
        GroupedGemm((300, 0, 12, 200), 400, 128, layout="tn"),
        Permute(256, 400, 2),
        Permute(512, 400, 2, direction="unpermute"),
        Softmax(4, 130, 130, mask="none"),
        Softmax(4, 130, 130, mask="none", direction="backward"),
        Attention(1, 2, 130, 130, 100, dtype="fp16"),
        Attention(1, 2, 130, 130, 100, direction="backward", dtype="fp16"),
    ],
    ids=str,
)
def test_a_wrong_result_is_found(work: Workload, damage: str) -> None:
    lost = damage in ("a NaN", "an infinity")
    words = "1 of .* elements not written or not a number" if lost else "relative error"
    for seed in range(3):
        given, found = case(work)
        DAMAGE[damage](found)
        with pytest.raises(MeasurementError, match=f"^check: {words}"):
            error_of(work, given, found, seed)


@pytest.mark.parametrize(("layout", "expert"), [("nt", 2), ("tn", 2), ("tn", 1)])
def test_an_expert_that_was_left_out_is_found(layout: str, expert: int) -> None:
    """The smallest of them, and the gradient of one without rows, which is zeros."""
    work = GroupedGemm((300, 0, 2, 200), 40, 64, "fp16", layout)
    given, (found,) = case(work)
    (found[expert] if layout == "tn" else found[300:302]).copy_(1e-3 * torch.ones(()))
    with pytest.raises(MeasurementError, match="relative error"):
        error_of(work, given, (found,))


def test_one_wrong_unit_among_integers_is_found() -> None:
    work = Gemm(300, 200, 100, dtype="int8")
    given, (found,) = case(work)
    found[123, 45] += 1
    with pytest.raises(MeasurementError, match=r"expected at most .* \(integers are exact\)"):
        error_of(work, given, (found,))


@pytest.mark.parametrize("output", [1, 2])
def test_each_gradient_of_attention_is_checked(output: int) -> None:
    work = Attention(2, 4, 200, 200, 32, kv_heads=2, direction="backward", dtype="fp32")
    given, found = case(work)
    found[output][1, 1, -3:] = found[output][1, 1, -6:-3].clone()
    with pytest.raises(MeasurementError, match=f"gradient of {'qkv'[output]}|relative error"):
        error_of(work, given, found)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_of_large_attention_every_tile_is_looked_at(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled rows find any wrong tile of 64 rows, and the row that must be seen."""
    monkeypatch.setattr(correctness, "_WHOLE_PAIRS", 0)
    work = Attention(2, 4, 200, 200, 16, kv_heads=2, direction=direction, dtype="fp32")
    given, found = case(work)
    assert error_of(work, given, found) < 1e-5
    for output in range(len(found)):
        spoiled = tuple(tensor.clone() for tensor in found)
        spoiled[output][1, 1, 64:128] = 0
        with pytest.raises(MeasurementError, match="relative error"):
            error_of(work, given, spoiled)
    spoiled = (found[0].clone(), *found[1:])
    spoiled[0][0, 3, 100] *= -1
    generator = torch.Generator().manual_seed(2)
    with pytest.raises(MeasurementError, match="relative error"):
        correctness.check("check", work, given, spoiled, generator, required_rows=[(0, 3, 100)])


@given(
    seed=st.integers(0, 2**32),
    rows=st.floats(0.005, 1),
    columns=st.floats(0.005, 1),
    size=st.floats(0.01, 2),
)
@settings(max_examples=30, deadline=None)
def test_random_corruption_over_twice_the_tolerance_is_found(
    seed: int, rows: float, columns: float, size: float
) -> None:
    """A random part of a right product is disturbed by a random share of its norm."""
    work = Gemm(200, 300, 64, dtype="fp16")
    given, (found,) = case(work)
    generator = torch.Generator().manual_seed(seed)
    where = torch.rand(200, 1, generator=generator) < rows
    where = where & (torch.rand(1, 300, generator=generator) < columns)
    noise = torch.randn(200, 300, generator=generator) * where
    disturbed = (found.float() + size * found.float().std() * noise).half()
    error = relative_error(disturbed, found)
    if error <= 2 * correctness.tolerance(work).relative_norm:
        return
    with pytest.raises(MeasurementError, match="relative error"):
        error_of(work, given, (disturbed,))


def test_tolerances_tell_formats_apart() -> None:
    """Those of fp32 follow k, and lie far below one rounding to tf32."""
    bounds = [
        correctness.tolerance(Gemm(64, 64, k, dtype="fp32")).relative_norm
        for k in (64, 4096, 65536)
    ]
    assert bounds == sorted(bounds)
    assert bounds[-1] < 3e-4 / 15
    with pytest.raises(InputError, match="collective"):
        correctness.tolerance(Collective("all_reduce", 2**20, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("provider_id", "workload"),
    [
        ("torch.mm", Gemm(500, 417, 820, layout="nt")),
        ("torch.grouped_loop", GroupedGemm((90, 0, 3, 64), 41, 82)),
        ("torch.permute", Permute(90, 41, 3)),
        ("torch.eager", Softmax(24, 96, 96, mask="full", mask_batch=4, direction="backward")),
        ("torch.flash", Attention(2, 8, 192, 192, 128, kv_heads=2, direction="backward")),
    ],
    ids=str,
)
def test_torchs_providers_pass(provider_id: str, workload: Workload) -> None:
    found = check(catalog.make(provider_id), workload, CPU)
    assert 0 <= found.relative_error <= found.tolerance


@pytest.mark.slow
def test_gradients_that_cancel_by_chance_are_not_refused() -> None:
    """Most rows of 8 causal queries attend to few keys, so the products of gradients and values are
    small in some.
    """
    work = Attention(64, 8, 8, 8, 64, direction="backward")
    for _ in range(8):
        assert check(catalog.make("torch.flash"), work, CPU) is not None


class Counting:
    """Notes what is asked of a timer's audit."""

    def __init__(self) -> None:
        self.samples = 0

    def sample(self) -> None:
        self.samples += 1


@pytest.mark.parametrize("distribution", ["normal", "zeros"])
def test_the_audit_changes_elements_and_keeps_count(distribution: str) -> None:
    """Elements change between samples; changes by others are found all the same."""
    work = Gemm(30, 20, 40, dtype="fp32", layout="nt")
    provider = catalog.make("torch.mm")
    audit = Audit(provider, work, CPU, distribution)
    task = provider.prepare(work, CPU)
    run = audit.add(task)
    audit.before_timing()
    before = task.inputs()[0].clone()
    for _ in range(25):
        audit.before_sample()
    run()
    changed = before != task.inputs()[0]
    assert changed.any() != (distribution == "zeros")
    assert distribution == "zeros" or (changed.any(1).sum() > 20 and changed.any(0).sum() > 20)
    counting = Counting()
    audit.after_sampling(lambda: (counting.sample(), run()))
    assert counting.samples == 1
    assert audit.checked is not None
    assert audit.elapsed_s > 0
    task.inputs()[1][3, 4] += 1e-3
    run()
    with pytest.raises(MeasurementError, match="input 1 was changed"):
        audit.after_sampling(run)


def test_copies_that_are_timed_in_turn_are_checked() -> None:
    work = Gemm(30, 20, 40, dtype="fp32")
    provider = catalog.make("torch.mm")
    audit = Audit(provider, work, CPU, "normal")
    first, second = (provider.prepare(work, CPU) for _ in range(2))
    run = audit.add(first)
    audit.before_timing()
    copy = audit.add(second)
    run()
    copy()
    second.outputs()[0][3] = 0
    with pytest.raises(MeasurementError, match="after timing: relative error"):
        audit.after_sampling(run)


def test_gqa_gradients_are_summed_over_the_heads_of_a_group() -> None:
    work = Attention(1, 4, 40, 40, 16, kv_heads=1, direction="backward", dtype="fp32")
    given, found = case(work)
    assert error_of(work, given, found) < 1e-6
    ungrouped = replace(work, kv_heads=4)
    with pytest.raises(MeasurementError, match="relative error"):
        error_of(work, given, (found[0], *(g / 4 for g in found[1:])))
    assert ungrouped.flops == work.flops
