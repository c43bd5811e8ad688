"""`quantbench validate` as it is typed, on a small table of somebody's own."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from quantbench.cli.validate import validate
from quantbench.device import lookup
from quantbench.errors import InputError, StoreError
from quantbench.latency.contests import ideal_us
from tools.accuracy.gemm import SIBLINGS
from tools.accuracy.tables import SHIPPED_GPUS

app = typer.Typer()
app.command()(validate)


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    grid = [(m, n, k) for m in (1, 64, 128, 129, 256, 257, 512) for n in (1024, 2048, 4096) for k in (1024, 2048, 4096)]
    m, n, k = np.array(grid).T
    latency_us = 3 + ideal_us(lookup("a100-sxm4-80gb"), "bf16", m, n, k) / 0.6
    path = tmp_path_factory.mktemp("tables") / "mine.csv"
    lines = [
        "gemm_dtype,m,n,k,latency",
        *(f"bfloat16,{a},{b},{c},{t / 1e3}" for (a, b, c), t in zip(grid, latency_us, strict=True)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_a_table_of_the_users(table: Path) -> None:
    said = run("--table", str(table), "--gpu", "a100-sxm4-80gb", "--rows", "30", "--seeds", "0")
    assert "learning from 30 rows" in said
    assert "errors: median / mean / p95" in said
    assert "spec-sheet roofline" in said
    assert "random" in said


@pytest.mark.slow
def test_json(table: Path) -> None:
    answer = json.loads(run("--table", str(table), "--gpu", "a100-sxm4-80gb", "--rows", "30", "--seeds", "0", "--json"))
    by_model = {entry["model"]: entry for entry in answer["lines"] if entry["protocol"] == "sites"}
    assert by_model["spec-sheet roofline"]["errors"]["median_pct"] > 30
    assert by_model["ours"]["errors"]["median_pct"] < by_model["spec-sheet roofline"]["errors"]["median_pct"]
    assert by_model["ours"]["fit_s"] > 0


def test_errors(table: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--rows 200 of mine.csv; expected at most \d+ for sites"):
        run("--table", str(table), "--gpu", "a100-sxm4-80gb")
    with pytest.raises(InputError, match=r"--seeds: '0,x'; expected integers of at least 0, comma separated"):
        run("--table", str(table), "--gpu", "a100-sxm4-80gb", "--seeds", "0,x")
    with pytest.raises(StoreError, match=r"gone.csv \(No such file or directory\)"):
        run("--table", str(tmp_path / "gone.csv"), "--gpu", "a100-sxm4-80gb")


def test_siblings_have_tables() -> None:
    assert set(SIBLINGS) | set(SIBLINGS.values()) <= set(SHIPPED_GPUS)
