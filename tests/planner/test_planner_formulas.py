"""The three calculators against the figures that their makers logged."""

from dataclasses import replace
from pathlib import Path

import pytest

from quantbench.planner.formulas import hardware_flops, model_flops, tflops_by_calculator
from quantbench.planner.rows import TableRow, case_of
from quantbench.workload import TransformerShape
from quantbench.workload.parameters import parameters
from quantbench.workload.presets import preset, preset_names, published
from tools.planner_documents import read_documents

TABLE = Path(__file__).parents[1] / "data" / "bloom_tables.csv"
ROWS = read_documents(TABLE)
TOLERANCE = 5e-4

# Line 340 has its two columns swapped.
SWAPPED = 340


def _timed(calculator: str) -> list[TableRow]:
    """Rows on A100s with a figure of this calculator, time and figure where they belong."""
    found = []
    for row in ROWS:
        if row.sec_per_it is None or row.tflops is None or not row.gpu.startswith("A100"):
            continue
        if row.line == SWAPPED:
            row = replace(row, sec_per_it=row.tflops, tflops=row.sec_per_it)
        if row.calculator == calculator:
            found.append(row)
    return found


def _error(row: TableRow, calculator: str) -> float:
    case = case_of(row)
    shape, gbs, gpus = case.job.shape, case.job.gbs, case.job.gpus
    sec_per_it = row.sec_per_it or 0.0
    if calculator == "old":
        by_name = tflops_by_calculator(
            shape, gbs=gbs, tp=case.layout.tp, sec_per_it=sec_per_it, gpus=gpus
        )
        computed = by_name["old"]
    else:
        computed = hardware_flops(shape, gbs, "full") / (sec_per_it * gpus) / 1e12
    return abs(computed / (row.tflops or 0.0) - 1)


@pytest.mark.parametrize(("calculator", "count"), [("old", 39), ("new", 58)])
def test_every_logged_figure_is_reproduced(calculator: str, count: int) -> None:
    rows = _timed(calculator)
    assert len(rows) == count
    assert max(_error(row, calculator) for row in rows) < TOLERANCE
    # A wrong layer count would be seen.
    layers = case_of(rows[0]).job.shape.layers + 12
    assert _error(replace(rows[0], layers=layers), calculator) > TOLERANCE


def test_v100_rows_by_the_simple_formula() -> None:
    rows = [r for r in ROWS if r.section.startswith("BNB / --use") and r.sec_per_it and r.tflops]
    assert len(rows) == 3
    shape = TransformerShape(hidden=11600, heads=80)
    for row in rows:
        computed = tflops_by_calculator(
            shape, gbs=2048, tp=4, sec_per_it=row.sec_per_it or 0, gpus=row.gpus or 0, size_b=104
        )
        assert computed["simple"] == pytest.approx(row.tflops, rel=2e-3)


def test_without_recomputation_it_is_three_quarters() -> None:
    shape = preset("bloom-176b")
    found = {kind: hardware_flops(shape, 2048, kind) for kind in ("full", "none", "selective")}
    beside = 1 + 2048 / (6 * 14336) + shape.vocab / (16 * 70 * 14336)
    assert found["full"] == pytest.approx(96 * 2048 * 2048 * 70 * 14336**2 * beside)
    assert found["none"] == pytest.approx(0.75 * found["full"], rel=1e-12)
    assert found["none"] < found["selective"] < found["full"]


def test_experts_are_counted_by_their_own_formula() -> None:
    shape = TransformerShape(hidden=2048, heads=16, experts=8, top_k=2, moe_ffn=8192)
    assert hardware_flops(shape, 8, "none") == model_flops(shape, 8)


def test_model_flops_agree_with_the_closed_formula_for_a_gpt() -> None:
    shape = TransformerShape(hidden=12288, heads=96, layers=96, vocab=51200)
    full = hardware_flops(shape, 1536, "full")
    # Logits are never recomputed, so that a quarter of them is missing from three quarters of the
    # whole.
    logits = 6 * 51200 * 12288 * 1536 * 2048
    assert model_flops(shape, 1536) == pytest.approx(0.75 * full + 0.25 * logits, rel=1e-12)


@pytest.mark.parametrize(
    "shape", [preset("llama-2-7b"), TransformerShape(hidden=8192, heads=64, ffn=24576)]
)
def test_calculators_leave_out_shapes_they_do_not_hold_for(shape: TransformerShape) -> None:
    assert list(tflops_by_calculator(shape, gbs=8, tp=1, sec_per_it=1.0, gpus=8)) == ["simple"]


@pytest.mark.parametrize("name", preset_names())
def test_parameters_of_published_models(name: str) -> None:
    # Some papers round to a whole number, some count position embeddings; both are below 0.6 %.
    assert parameters(preset(name)) == pytest.approx(
        published(name)["published_parameters"], rel=6e-3
    )
