"""CSV and Parquet exports, and the way back through our own importer."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from known_profile import gemm_row, known_profile, rows_of, table

from quantbench.errors import InputError, StoreError, UnsupportedError
from quantbench.importers import csv_table
from quantbench.latency.gemm.training import FEWEST_ROWS
from quantbench.profile.exporters import FORMATS, export_profile
from quantbench.profile.exporters.options import ExportOptions
from quantbench.profile.file import from_parquet
from quantbench.profile.fit import models_of
from quantbench.workload import Collective


def test_csv_comes_back_exactly_through_the_command_that_the_export_prints(tmp_path: Path) -> None:
    profile = known_profile()
    made = export_profile(profile, "csv", tmp_path)
    assert made.rows == {kind: len(table) for kind, table in profile.tables.items() if len(table)}
    for line in made.use:
        words = shlex.split(line)
        assert words[:3] == ["quantbench", "import", "csv"]
        path, mapped = Path(words[3]), csv_table.parse_map(words[words.index("--map") + 1])
        found = csv_table.read_rows(path, mapped)
        table = profile.tables[path.stem]
        assert [row.workload for row in found.rows] == table.workloads()
        assert [row.latency_us for row in found.rows] == table["latency_us"].tolist()
        assert [row.provider for row in found.rows] == table["provider"].tolist()
        assert all(
            isinstance(row.workload, Collective) == (path.stem == "collective")
            for row in found.rows
        )


def test_a_processor_has_no_command_to_come_back_with_and_needs_rows(tmp_path: Path) -> None:
    profile = known_profile()
    cpu = replace(profile, device=replace(profile.device, name="cpu-x", kind="cpu"))
    assert export_profile(cpu, "csv", tmp_path).use == []
    with pytest.raises(UnsupportedError, match="expected a GPU, for rows that are modelled"):
        export_profile(replace(cpu, tables={}), "csv", tmp_path)


def test_parquet_holds_the_tables_bit_by_bit(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow, which comes with quantbench[tables]")
    profile = known_profile()
    made = export_profile(profile, "parquet", tmp_path)
    for kind in made.rows:
        found = from_parquet(kind, (tmp_path / f"{kind}.parquet").read_bytes(), kind)
        assert list(found.rows()) == list(profile.tables[kind].rows())


def test_sizes_that_were_not_measured_are_modelled_beside_measured_rows(tmp_path: Path) -> None:
    profile = known_profile()
    rows = [row for row in profile.tables["gemm"].rows() if row["layout"] == "nt"]
    known = rows[0]
    grid = tmp_path / "grid.csv"
    grid.write_text(f"m,n,k\n{known['m']},{known['n']},{known['k']}\n{known['m']},4096,4352\n")
    options = ExportOptions(grid=grid, dtype=known["dtype"])
    export_profile(profile, "csv", tmp_path / "out", options)
    written = rows_of(tmp_path / "out" / "gemm.csv")
    assert len(written) == len(profile.tables["gemm"]) + 1
    (modelled,) = (row for row in written if row["origin"] == "modelled")
    assert (modelled["n"], modelled["k"]) == ("4096", "4352")
    assert float(modelled["low_us"]) < float(modelled["latency_us"]) < float(modelled["high_us"])


def test_rows_of_one_layout_place_the_modelled_rows(tmp_path: Path) -> None:
    """Rows of another layout, dtype or batch at the same shapes change no modelled size."""
    options = ExportOptions(model="llama-3-8b", dtype="bf16", tensor_parallel=(1,))
    modelled = []
    for other in ({}, {"layout": "nn"}, {"dtype": "fp16"}, {"batch": 2}):
        rows = [gemm_row(m, 4096, 4096, 150.0 + m / 8) for m in (100, 1000)]
        rows += [{**row, **other} for row in rows if other]
        export_profile(known_profile({"gemm": table("gemm", rows)}), "csv", tmp_path, options)
        written = rows_of(tmp_path / "gemm.csv")
        modelled.append([row for row in written if row["origin"] == "modelled"])
    assert len(modelled[0]) > 100
    assert modelled == modelled[:1] * 4


@pytest.mark.parametrize(
    ("count", "library", "said"),
    [
        (FEWEST_ROWS - 1, "sglang", "shapes of sglang; "),
        (FEWEST_ROWS, "", "rows of this profile, of provider imported; 90 % of shapes within ±"),
    ],
)
def test_the_model_beside_own_rows_is_named_with_its_accuracy(
    count: int, library: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "grid.csv").write_text("m,n,k\n8192,8192,8192\n")
    rows = [
        gemm_row(64 * m, 4096, 4096, 50.0 + 9 * m, provider="imported") for m in range(1, count + 1)
    ]
    profile = known_profile({"gemm": table("gemm", rows)})
    fitted = models_of(profile.device, dict(profile.tables), fit=True, seed=0)
    options = ExportOptions(grid=tmp_path / "grid.csv")
    made = export_profile(replace(profile, models=fitted), "csv", tmp_path, options)
    assert any(said in note for note in made.notes)
    row = rows_of(tmp_path / "gemm.csv")[-1]
    assert (row["origin"], row["library"]) == ("modelled", library)
    assert bool(row["held_out_median_pct"]) == bool(library)


def test_an_unknown_format_names_the_others(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        export_profile(known_profile(), "astra-sim", tmp_path)
    assert (
        str(caught.value)
        == f"profile export: --format = 'astra-sim'; expected one of {', '.join(FORMATS)}"
    )


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(StoreError, match="out is a file; expected a folder to write into"):
        export_profile(known_profile(), "csv", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
