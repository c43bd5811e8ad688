"""Random inputs: distributions, formats, storage, and the same numbers again from the same seed."""

from __future__ import annotations

import pytest
import torch
from made_devices import CPU

from quantbench.errors import InputError
from quantbench.providers import inputs as inputs_module
from quantbench.providers.inputs import TORCH_DTYPES, Inputs, quantum
from quantbench.workload import Attention, Gemm, Softmax


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32", "fp8", "int8"])
@pytest.mark.parametrize("distribution", ["normal", "uniform", "integers", "zeros"])
def test_formats_and_seeds(dtype: str, distribution: str) -> None:
    first, again = (Inputs(CPU, distribution, seed=3).tensor(33, 70, dtype=dtype) for _ in range(2))
    other = Inputs(CPU, distribution, seed=4).tensor(33, 70, dtype=dtype)
    assert first.dtype == TORCH_DTYPES[dtype]
    assert first.shape == (33, 70)
    assert torch.equal(first.float(), again.float())
    assert torch.equal(first.float(), other.float()) == (distribution == "zeros")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp8", "int8"])
def test_what_is_stored_stands_for_a_normal_number(dtype: str) -> None:
    real = Inputs(CPU, "normal").tensor(300, 300, dtype=dtype).double() * quantum(dtype, "normal")
    assert abs(real.mean().item()) < 0.01
    assert real.std().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp8", "int8"])
def test_what_is_stored_stands_for_a_uniform_number(dtype: str) -> None:
    real = Inputs(CPU, "uniform").tensor(300, 300, dtype=dtype).double() * quantum(dtype, "uniform")
    assert real.abs().max().item() <= 1
    assert real.std().item() == pytest.approx(3**-0.5, abs=0.01)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp8", "int8"])
def test_integers_are_exact_in_every_format(dtype: str) -> None:
    values = Inputs(CPU, "integers").tensor(40, 40, dtype=dtype).float()
    assert sorted(set(values.flatten().tolist())) == [-4, -3, -2, -1, 0, 1, 2, 3, 4]
    assert quantum(dtype, "integers") == 1


def test_narrow_formats_fill_their_range_and_stay_in_it() -> None:
    fp8 = Inputs(CPU, "uniform").tensor(300, 300, dtype="fp8").float()
    assert fp8.isfinite().all()
    assert fp8.abs().max().item() == 448
    int8 = Inputs(CPU, "uniform").tensor(300, 300, dtype="int8")
    assert (int8.min().item(), int8.max().item()) == (-127, 127)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers are drawn, one entry a call."""
    counts: list[int] = []
    fill = Inputs._fill

    def counted(self: Inputs, out: torch.Tensor) -> torch.Tensor:
        counts.append(out.numel())
        return fill(self, out)

    monkeypatch.setattr(Inputs, "_fill", counted)
    return counts


def test_narrow_formats_are_drawn_in_chunks(
    drawn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs_module, "_CHUNK_ELEMENTS", 100)
    values = Inputs(CPU, "normal").tensor(25, 10, dtype="int8")
    assert drawn == [100, 100, 50]
    assert all(part.float().std().item() > 10 for part in values.flatten().split(100))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp8", "int8"])
@pytest.mark.parametrize("distribution", ["normal", "uniform", "integers"])
def test_a_large_tensor_is_made_of_pieces(dtype: str, distribution: str, drawn: list[int]) -> None:
    """Few numbers are drawn, none is left out, the distribution is that of the drawn ones, and rows
    are not alike.
    """
    tensors = []
    for seed in (3, 3, 4):
        tensor = torch.zeros(601, 601, dtype=TORCH_DTYPES[dtype])
        made = Inputs(CPU, distribution, seed)
        made.fill(tensor)
        made.fill(torch.zeros(601, 601, dtype=TORCH_DTYPES[dtype]))
        tensors.append(tensor.double())
    assert drawn == [2**16] * 3
    first, again, other = tensors
    assert torch.equal(first, again)
    assert (first == other).double().mean() < 0.3
    assert (first.flatten()[-64:] != 0).any()
    assert len(first.unique(dim=0)) == 601
    small = Inputs(CPU, distribution).tensor(250, 250, dtype=dtype).double()
    assert first.std().item() == pytest.approx(small.std().item(), rel=0.02)
    assert abs(first.mean().item()) < 0.02 * first.std().item()
    correlations = torch.corrcoef(first) - torch.eye(601)
    assert correlations.square().mean().sqrt().item() == pytest.approx(
        601**-0.5, rel=0.1
    )  # as of independent rows


def test_a_large_mask_is_half_true_and_drops_no_whole_row() -> None:
    _, mask = Inputs(CPU).operands(Softmax(batch=1, rows=300, cols=700, mask="full"))
    assert mask.float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert not mask[..., 0].any()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_operands_are_stored_as_the_layout_says(layout: str, batch: int) -> None:
    a, b = Inputs(CPU).gemm_operands(Gemm(m=5, n=7, k=11, batch=batch, layout=layout))
    leading = (3,) if batch == 3 else ()
    assert a.shape == (*leading, 5, 11)
    assert b.shape == (*leading, 11, 7)
    assert a.stride()[-2:] == ((11, 1) if layout[0] == "n" else (1, 5))
    assert b.stride()[-2:] == ((7, 1) if layout[1] == "n" else (1, 11))


def test_scores_and_masks_by_sample_and_head() -> None:
    work = Softmax(batch=6, rows=9, cols=17, mask="full", mask_batch=2)
    x, mask = Inputs(CPU).operands(work)
    assert x.shape == (2, 3, 9, 17)
    assert (mask.shape, mask.dtype) == ((2, 1, 9, 17), torch.bool)
    assert not mask.all(-1).any()
    assert 0.3 < mask.float().mean().item() < 0.7


def test_grouped_heads() -> None:
    q, k, v = Inputs(CPU).operands(Attention(2, 8, 10, 12, 16, kv_heads=2, causal=False))
    assert (q.shape, k.shape, v.shape) == ((2, 8, 10, 16), (2, 2, 12, 16), (2, 2, 12, 16))
    assert not torch.equal(k, v)


def test_an_unknown_distribution() -> None:
    with pytest.raises(
        InputError,
        match=r"^inputs: distribution = 'gauss'; expected normal, uniform, integers or zeros$",
    ):
        Inputs(CPU, "gauss")
