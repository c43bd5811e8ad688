"""The fused softmax against float64, in triton's interpreter and on the GPU where there is one.

Tolerances: ‖out − ref‖ / ‖ref‖ of one rounding to the format, as for every provider
    (quantbench.providers.correctness).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import ACTIVE, EXAMPLES, in_interpreter
from quantbench.kernels.softmax import (
    plan_backward,
    plan_forward,
    scaled_causal_softmax,
    scaled_masked_softmax,
    scaled_softmax,
)
from references import relative_error

from quantbench.errors import InputError, UnsupportedError
from quantbench.launch import Tile
from quantbench.providers import correctness

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5}
FORMATS = st.sampled_from([torch.float16, torch.float32])  # the interpreter truncates to bf16
NAN = float("nan")


def scores_of(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator, device=device)).to(dtype)


def mask_of(samples: int, sq: int, sk: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Half of it True, and never a whole row."""
    generator = torch.Generator(device=device).manual_seed(seed)
    mask = torch.rand((samples, 1, sq, sk), generator=generator, device=device) < 0.5
    mask[..., 0] = False
    return mask


def upper(size: int, device: str = "cpu") -> torch.Tensor:
    return correctness.causal_mask(size, size, torch.device(device))


def check(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    scale: float,
    mask: torch.Tensor | None = None,
    device: str = "cpu",
) -> None:
    """Both ways, outputs poisoned first; causal without a mask."""
    causal = mask is None
    size = shape[-1]
    scores = scores_of(shape, dtype, seed=size, device=device)
    grad = scores_of(shape, dtype, seed=size + 1, device=device)
    dropped = upper(size, device) if causal else mask
    # Above the diagonal nothing may be used.
    unused = dropped if causal else torch.zeros_like(mask)
    y, dx = torch.full_like(scores, NAN), torch.full_like(scores, NAN)
    plan_forward(scores.masked_fill(unused, NAN), scale, causal=causal, mask=mask, out=y).run()
    plan_backward(grad.masked_fill(unused, NAN), y, scale, causal=causal, out=dx).run()
    expected = correctness.softmax(scores.double(), scale, dropped)
    gradient = correctness.softmax_backward(y.double(), grad.double(), scale)
    for found, right in ((y, expected), (dx, gradient)):
        assert not (found * unused).any()
        assert relative_error(found, right) < TOLERANCE[dtype]


def check_causal(shape: tuple[int, int, int], *options: Any, **device: str) -> None:
    check((*shape, shape[-1]), *options, **device)


def check_masked(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    scale: float,
    one_mask: bool,
    device: str = "cpu",
) -> None:
    batch, _, sq, sk = shape
    mask = mask_of(1 if one_mask else batch, sq, sk, seed=sk, device=device)
    check(shape, dtype, scale, mask, device)


@in_interpreter
@pytest.mark.slow
@EXAMPLES
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 70)),
    FORMATS,
    st.sampled_from([0.125, 1.0]),
)
def test_causal_on_any_shape(shape: tuple[int, int, int], dtype: torch.dtype, scale: float) -> None:
    check_causal(shape, dtype, scale)


@in_interpreter
@EXAMPLES
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 150)),
    FORMATS,
    st.sampled_from([0.125, 1.0]),
    st.booleans(),
)
def test_masked_on_any_shape(
    shape: tuple[int, int, int, int], dtype: torch.dtype, scale: float, one_mask: bool
) -> None:
    check_masked(shape, dtype, scale, one_mask)


# One vector more and less than a power of two; the longest row that there is.
@in_interpreter
@pytest.mark.parametrize("cols", [2040, 2048, 2056, 4097, 16384])
def test_long_rows(cols: int) -> None:
    check_masked((1, 1, 2, cols), torch.float16, 0.5, one_mask=False)


@in_interpreter
def test_a_row_masked_whole_is_uniform_as_in_megatron() -> None:
    mask = mask_of(1, 4, 40)
    mask[0, 0, 2] = True
    y = scaled_masked_softmax(scores_of((1, 2, 4, 40), torch.float32), mask, 1.0)
    assert torch.equal(y[:, :, 2], torch.full((1, 2, 40), 1 / 40))


@in_interpreter
def test_masked_scores_count_as_minus_10000() -> None:
    scores = torch.full((1, 1, 1, 2), -10_000.0)  # as low as what the mask puts there
    y = scaled_masked_softmax(scores, torch.tensor([[[[True, False]]]]), 1.0)
    assert torch.equal(y, torch.full_like(y, 0.5))


@in_interpreter
def test_large_scores_neither_overflow_nor_vanish() -> None:
    scores = torch.tensor([[[[60_000.0, 59_999.0, -60_000.0]]]]).expand(1, 1, 3, 3).contiguous()
    y = scaled_softmax(scores, 1.0)
    assert relative_error(y, correctness.softmax(scores.double(), 1.0, None)) < 1e-5


@in_interpreter
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_through_autograd(causal: bool, expanded: bool) -> None:
    scores = scores_of((2, 2, 20, 20), torch.float32).requires_grad_()
    mask = mask_of(2, 20, 20)
    y = scaled_causal_softmax(scores, 0.3) if causal else scaled_masked_softmax(scores, mask, 0.3)
    grad = scores_of((2, 2, 20, 20), torch.float32, seed=7)
    if expanded:
        grad = grad[:, :1].expand_as(y)
    y.backward(grad)
    exact = scores.detach().double().requires_grad_()
    correctness.softmax(exact, 0.3, upper(20) if causal else mask).backward(grad.double())
    assert scores.grad is not None
    assert exact.grad is not None
    assert relative_error(scores.grad, exact.grad) < 1e-5


@in_interpreter
def test_a_plan_tells_its_launch_and_runs_again() -> None:
    scores = scores_of((2, 3, 50, 50), torch.float16)
    work = plan_forward(scores, 0.5, causal=True)
    assert work.launch.kernel == "softmax_forward"
    assert work.launch.grid == (5, 1, 1)  # 300 rows, 64 to a program
    assert work.launch.tile == Tile(64, 64, num_warps=4)
    work.run()
    first = work.out.clone()
    work.out.fill_(NAN)
    work.run()
    assert torch.equal(work.out, first)
    assert plan_forward(scores, 0.5, tile=Tile(1, 128, num_warps=4)).launch.grid == (300, 1, 1)


SQUARE = scores_of((2, 2, 8, 8), torch.float16)
MASK = mask_of(2, 8, 8)


@in_interpreter
@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: scaled_softmax(SQUARE[0], 1.0), "scores of shape (2, 8, 8)"),
        (lambda: scaled_softmax(SQUARE[:0], 1.0), "scores of shape (0, 2, 8, 8)"),
        (lambda: scaled_softmax(SQUARE.double(), 1.0), "scores in float64"),
        (lambda: scaled_softmax(SQUARE.mT, 1.0), "scores with strides (128, 64, 1, 8)"),
        (lambda: scaled_softmax(SQUARE, NAN), "scale = nan"),
        (lambda: scaled_softmax(torch.zeros(1, 1, 1, 16385), 1.0), "scores of shape (1, 1, 1, 16385)"),
        (lambda: scaled_causal_softmax(SQUARE[:, :, :4].contiguous(), 1.0), "causal with scores of shape (2, 2, 4, 8)"),
        (lambda: scaled_masked_softmax(SQUARE, MASK.to(torch.int8), 1.0), "mask of shape (2, 1, 8, 8) in int8 on cpu"),
        (lambda: scaled_masked_softmax(SQUARE, MASK.mT, 1.0), "mask with strides (64, 64, 1, 8)"),
        (lambda: plan_forward(SQUARE, 1.0, causal=True, mask=MASK), "causal = True with a mask"),
        (lambda: plan_forward(SQUARE, 1.0, out=SQUARE[:1]), "out of shape (1, 2, 8, 8) in float16 on cpu"),
        (lambda: plan_forward(SQUARE, 1.0, tile=Tile(1, 4)), "tile 1x4"),
        (lambda: plan_backward(SQUARE.float(), SQUARE, 1.0), "grad of shape (2, 2, 8, 8) in float32 on cpu"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Callable[[], Any], value: str) -> None:
    with pytest.raises(InputError) as told:
        call()
    assert told.value.value == value


@pytest.mark.skipif(ACTIVE, reason="the interpreter plays the GPU")
def test_a_cpu_tensor_needs_the_interpreter() -> None:
    with pytest.raises(UnsupportedError) as told:
        scaled_causal_softmax(SQUARE, 1.0)
    assert told.value.value == "scores on cpu"


GPU_SHAPES = [
    (1, 1, 1),
    (2, 3, 17),
    (1, 4, 127),
    (2, 2, 130),
    (1, 1, 2048),
    (1, 2, 2052),
    (1, 1, 4099),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_causal_on_the_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_causal(shape, dtype, 0.125, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 7), (3, 2, 64, 128), (2, 2, 33, 2050), (1, 2, 16, 16384)]
)
@pytest.mark.parametrize("one_mask", [True, False])
def test_masked_on_the_gpu(
    shape: tuple[int, int, int, int], dtype: torch.dtype, one_mask: bool
) -> None:
    check_masked(shape, dtype, 0.125, one_mask, device="cuda")


@pytest.mark.gpu
def test_offsets_past_two_to_the_31() -> None:
    scores = torch.zeros((1, 9, 16384, 16384), dtype=torch.float16, device="cuda")  # 2.4e9 scores
    scores[:, -1, -1, 5] = 4.0
    y = scaled_causal_softmax(scores, 1.0)
    expected = correctness.softmax(scores[:, -1:, -1:].double(), 1.0, None)
    assert relative_error(y[:, -1:, -1:], expected) < TOLERANCE[torch.float16]
