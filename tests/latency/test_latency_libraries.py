"""Libraries: which one is the default and why, and models of other libraries, fitted on first use and kept."""

import doctest
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency import libraries
from quantbench.latency.gemm import model as gemm_model
from quantbench.latency.gemm import public
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.libraries import LIBRARIES, SYSTEMS, default_library, libraries_of, library_words
from quantbench.latency.tables import GemmTable
from quantbench.workload.dtypes import GEMM_DTYPES

H100 = "h100-sxm5-80gb"


def test_examples() -> None:
    assert doctest.testmod(libraries).failed == 0


def test_every_gpu_with_tables_can_run_what_they_hold() -> None:
    pairs = [(slug, dtype) for slug in SYSTEMS for dtype in GEMM_DTYPES if libraries_of(slug, dtype)]
    assert len(pairs) == 30
    for slug, dtype in pairs:
        assert lookup(slug).peak(dtype) is not None
        assert set(libraries_of(slug, dtype)) <= set(LIBRARIES)
        assert default_library(slug, dtype) == libraries_of(slug, dtype)[0]


def test_one_library_of_every_gpu_and_dtype_is_shipped() -> None:
    measured = [(slug, dtype) for slug in SYSTEMS for dtype in GEMM_DTYPES if libraries_of(slug, dtype)]
    shipped = {file.name for file in public.FOLDER.glob("*.gemm")}
    assert shipped >= {public.file_name(*pair, default_library(*pair)) for pair in measured}


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
    with pytest.raises(InputError, match=r"GemmModel.best: library = 'cublas'; expected one of torch, triton, vllm"):
        GemmModel.best(H100, dtype="fp8", library="cublas")


@pytest.fixture
def fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[GemmTable]:
    """Tables that models were fitted to. One made table is installed, of sglang's fp8 products on an H100."""
    systems, fitted = tmp_path / "systems", list[GemmTable]()
    folder = systems / "data" / "h100_sxm" / "gemm" / "sglang" / libraries.TABLES["h100_sxm"]["sglang"]
    folder.mkdir(parents=True)
    (folder / "gemm_perf.parquet").write_bytes(b"a table")
    sizes = [np.arange(1, 101, dtype=np.int64)] * 3
    table = GemmTable(*sizes, np.ones(100), "fp8", H100, "sglang")  # type: ignore[call-arg]

    def fit(table: GemmTable, of: Mapping[str, Any], progress: Callable[..., None]) -> GemmModel:
        fitted.append(table)
        return replace(GemmModel.prior(H100, dtype="fp8", library="sglang"), rows=50, note="", provenance=dict(of))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(public, "systems_folder", lambda: systems)
    monkeypatch.setattr(metadata, "version", lambda name: "0.12.0")
    monkeypatch.setattr(public, "read_table", lambda *_, **__: table)
    monkeypatch.setattr(GemmModel, "of_table", fit)
    return fitted


def ask() -> GemmModel:
    gemm_model._model_of_table.cache_clear()  # as in a new process
    return GemmModel.best(H100, dtype="fp8", library="sglang")


def test_another_librarys_model_is_fitted_once_and_kept(
    fits: list[GemmTable], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask()
    assert (found.library, found.rows, found.provenance["framework_version"]) == ("sglang", 50, "0.5.14")
    assert f"fitting sglang's fp8 products on {H100}, once" in capsys.readouterr().err
    assert ask().provenance == found.provenance
    assert len(fits) == 1
    (kept,) = (tmp_path / "cache" / "quantbench" / "models").iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert ask().rows == 50
    assert len(fits) == 2


def test_another_table_is_fitted_anew(fits: list[GemmTable], tmp_path: Path) -> None:
    ask()
    (table,) = (tmp_path / "systems").rglob("*.parquet")
    table.write_bytes(b"another table")
    ask()
    assert len(fits) == 2


def test_a_cache_that_cannot_be_written_is_done_without(
    fits: list[GemmTable], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert ask().rows == 50
    assert "not kept for the next time" in capsys.readouterr().err


def test_without_the_tables_the_prior_says_what_to_install(
    fits: list[GemmTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "systems_folder", lambda: None)
    found = ask()
    assert (found.rows, found.library, fits) == (0, "sglang", [])
    assert found.note.startswith(f"no model of sglang's fp8 products on {H100} is shipped: pip install")
    assert "nobody measured" not in found.note
