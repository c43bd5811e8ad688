"""Reading measured tables: from files written here, and from the package where it is installed."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError, QuantbenchError, UnsupportedError
from quantbench.importers import aiconfigurator
from quantbench.latency.libraries import DEFAULT_TABLES, SYSTEMS, slug_of, system_of
from tools.accuracy.gemm_tables import read_table
from tools.accuracy.tables import SHIPPED_GPUS, read_packaged

needs_package = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="the extra quantbench[tables] is not installed"
)

CSV = """gemm_dtype,m,n,k,latency,framework
bfloat16,128,256,512,0.020,X
bfloat16,1,256,512,0.010,X
fp8,1,256,512,0.004,X
bfloat16,128,256,512,0.030,X
bfloat16,129,256,512,0,X
"""


def test_csv_is_sorted_merged_and_in_microseconds(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(CSV)
    table = read_table(tmp_path / "t.csv", "a100-sxm4-80gb")
    assert table.m.tolist() == [1, 128]
    assert table.latency_us.tolist() == pytest.approx([10.0, 25.0])  # the repeats' median
    assert (table.gpu, table.dtype, len(table)) == ("a100-sxm4-80gb", "bf16", 2)
    assert read_table(tmp_path / "t.csv", "here", dtype="fp8").latency_us.tolist() == pytest.approx(
        [4.0]
    )


@pytest.mark.parametrize(
    ("text", "dtype", "said"),
    [
        (CSV, "int8", "no row of dtype 'int8'; expected one of bfloat16, fp8"),
        ("m,n,k\n1,2,3\n", "bf16", "t.csv has no column 'latency'"),
        ("m,n,k,latency\n1,2,3,fast\n", "bf16", "t.csv, column latency: .*'fast'"),
        (None, "bf16", r"t.csv \(No such file or directory\)"),
    ],
)
def test_file_errors_name_what_is_wrong(
    tmp_path: Path, text: str | None, dtype: str, said: str
) -> None:
    if text is not None:
        (tmp_path / "t.csv").write_text(text)
    with pytest.raises(QuantbenchError, match=said):
        read_table(tmp_path / "t.csv", "here", dtype=dtype)


def test_every_system_is_of_a_known_card_and_back() -> None:
    for slug, system in SYSTEMS.items():
        assert lookup(slug).registered
        assert system_of(slug) == system_of(system) == system
        assert slug_of(system) == slug
    assert slug_of("b60") is None
    assert set(DEFAULT_TABLES) <= set(SYSTEMS.values())
    assert {system_of(slug) for slug in SHIPPED_GPUS} <= set(DEFAULT_TABLES)


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aiconfigurator, "systems_folder", lambda: None)
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[tables\]'"):
        read_packaged("a100_sxm")


@needs_package
def test_packaged_a100_table() -> None:
    table = read_packaged("a100-sxm4-80gb")
    assert (table.framework, table.version) == ("SGLang", "0.5.10")
    assert len(table) == 35_742
    order = np.lexsort((table.k, table.n, table.m))
    assert (order == np.arange(len(table))).all()
    assert table.latency_us.min() > 1.0
    with pytest.raises(InputError, match=r"--system a1000: no .*; expected one of .*a100_sxm"):
        read_packaged("a1000")


@pytest.mark.slow
@needs_package
@pytest.mark.parametrize("system", sorted(DEFAULT_TABLES))
def test_what_was_measured_stays_below_what_the_registry_says_a_card_can(system: str) -> None:
    table, device = read_packaged(system), lookup(slug_of(system) or system)
    tflops = 2e-6 * table.m * table.n * table.k / table.latency_us
    ceiling = device.ceiling("bf16")
    assert ceiling is not None
    assert 0.75 * ceiling < tflops.max() < ceiling
    moved_bytes = 2.0 * (table.m * table.n + table.n * table.k + table.m * table.k)
    gb_per_s = (moved_bytes / table.latency_us / 1e3)[moved_bytes > 4 * device.l2_bytes]
    assert 0.75 * device.memory_gb_per_s < gb_per_s.max() < device.memory_gb_per_s
