"""Libraries: which one is the default and why, and what is said of those without a shipped
model.
"""

import doctest

import pytest

from quantbench.device import lookup
from quantbench.device.registry import same_chip
from quantbench.errors import InputError
from quantbench.latency import libraries
from quantbench.latency.gemm.model import FOLDER, GemmModel, file_name
from quantbench.latency.libraries import (
    LIBRARIES,
    SYSTEMS,
    default_library,
    libraries_of,
    library_words,
)
from quantbench.workload.dtypes import GEMM_DTYPES

H100 = "h100-sxm5-80gb"


def test_examples() -> None:
    assert doctest.testmod(libraries).failed == 0


def test_every_gpu_with_tables_can_run_what_they_hold() -> None:
    pairs = [
        (slug, dtype) for slug in SYSTEMS for dtype in GEMM_DTYPES if libraries_of(slug, dtype)
    ]
    assert len(pairs) == 31
    for slug, dtype in pairs:
        assert lookup(slug).peak(dtype) is not None
        assert set(libraries_of(slug, dtype)) <= set(LIBRARIES)
        assert default_library(slug, dtype) == libraries_of(slug, dtype)[0]


def test_one_library_of_every_gpu_and_dtype_is_shipped() -> None:
    measured = [
        (slug, dtype) for slug in SYSTEMS for dtype in GEMM_DTYPES if libraries_of(slug, dtype)
    ]
    shipped = {file.name for file in FOLDER.glob("*.gemm")}
    for slug, dtype in measured:
        library = default_library(slug, dtype)
        assert shipped & {file_name(one, dtype, library) for one in same_chip(slug)}


def test_times_of_the_host_are_no_default() -> None:
    assert default_library(H100, "fp8") == "vllm"
    assert libraries_of(H100, "fp8_block") == ("sglang", "trtllm", "vllm")
    assert "vllm's, which holds the host's work" in library_words(H100, "fp8_block", "", "predict")


@pytest.mark.parametrize(
    ("dtype", "asked", "words"),
    [
        ("fp8", "trtllm", "library = trtllm (as asked)"),
        ("bf16", "torch", "library = vllm (its bf16 products are torch's)"),
        ("fp16", "", "library = vllm (the default: the largest table of 3)"),  # predicted as bf16
        ("fp8", "triton", "library = triton (as asked; nobody measured its fp8 products there)"),
        ("int8", "", "library = torch (the default; nobody measured its int8 products there)"),
    ],
)
def test_words_say_whose_products_and_why(dtype: str, asked: str, words: str) -> None:
    assert library_words(H100, dtype, asked, "predict") == words


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"GemmModel.best: library = 'cublas'; expected one of torch, triton, vllm"
    ):
        GemmModel.best(H100, dtype="fp8", library="cublas")


def test_a_library_without_a_shipped_model_gets_the_prior_which_says_what_to_do() -> None:
    found = GemmModel.best(H100, dtype="fp8", library="sglang")
    assert (found.rows, found.library) == (0, "sglang")
    assert found.note.startswith(
        f"no model of sglang's fp8 products on {H100} is shipped: quantbench import"
    )
    assert "--profile" in found.note
