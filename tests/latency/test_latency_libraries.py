"""Libraries: which one is the default and why, and what is said of those without a shipped
model.
"""

from itertools import product

import pytest

from quantbench.device import lookup
from quantbench.device.registry import same_chip
from quantbench.errors import InputError
from quantbench.latency.gemm.model import FOLDER, GemmModel, file_name
from quantbench.latency.libraries import (
    LIBRARIES,
    SYSTEMS,
    default_library,
    libraries_of,
    library_words,
)
from quantbench.latency.model_times import ModelTimes
from quantbench.workload import Gemm
from quantbench.workload.dtypes import GEMM_DTYPES

H100 = "h100-sxm5-80gb"


def test_every_gpu_with_tables_can_run_what_they_hold_and_ships_one_library() -> None:
    shipped = {file.name for file in FOLDER.glob("*.gemm")}
    measured = 0
    for slug, dtype in product(SYSTEMS, GEMM_DTYPES):
        libraries = libraries_of(slug, dtype)
        if not libraries:
            continue
        measured += 1
        assert lookup(slug).peak(dtype) is not None
        assert set(libraries) <= set(LIBRARIES)
        assert default_library(slug, dtype) == libraries[0]
        assert shipped & {file_name(one, dtype, libraries[0]) for one in same_chip(slug)}
    assert measured == 31


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
        ("int8", "", "library = torch (the default; nobody measured its int8 products there)"),
    ],
)
def test_words_say_whose_products_and_why(dtype: str, asked: str, words: str) -> None:
    assert library_words(H100, dtype, asked, "predict") == words


def test_a_library_without_a_shipped_model_gets_the_prior_which_says_what_to_do() -> None:
    found = GemmModel.best(H100, dtype="fp8", library="sglang")
    assert (found.rows, found.library) == (0, "sglang")
    assert "is shipped: quantbench import" in found.note
    for library, why in (("sglang", "no model of its public table"), ("aiter", "none measured")):
        (one,) = ModelTimes(lookup(H100), library).estimates([Gemm(4096, 4096, 4096)])
        assert one.unmeasured.startswith(f"bf16 products of {library}: {why}")
    with pytest.raises(InputError, match="library = 'cublas'; expected one of torch"):
        GemmModel.best(H100, dtype="fp8", library="cublas")
