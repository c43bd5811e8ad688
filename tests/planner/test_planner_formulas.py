"""The three calculators against the figures that their makers logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantbench.errors import InputError
from quantbench.planner.formulas import hardware_flops, model_flops, tflops_by_calculator
from quantbench.planner.rows import TableRow, case_of
from quantbench.workload import TransformerShape
from quantbench.workload.parameters import parameters
from quantbench.workload.presets import preset, preset_names, published_parameters
from tools.planner_documents import read_documents

TABLE = Path(__file__).parents[1] / "data" / "bloom_tables.csv"
ROWS = read_documents(TABLE)
TOLERANCE = 5e-4

# Line 340 has its two columns swapped.
SWAPPED = 340


def _timed(calculator: str) -> list[TableRow]:
    found = []
    for row in ROWS:
        if row.sec_per_it is None or row.tflops is None or not row.gpu.startswith("A100"):
            continue
        if row.calculator == calculator:
            found.append(row)
    return found


def _reported(row: TableRow) -> tuple[float, float]:
    assert row.sec_per_it is not None
    assert row.tflops is not None
    return (row.tflops, row.sec_per_it) if row.line == SWAPPED else (row.sec_per_it, row.tflops)


@pytest.mark.parametrize(("calculator", "count"), [("old", 39), ("new", 58)])
def test_every_logged_figure_is_reproduced(calculator: str, count: int) -> None:
    rows = _timed(calculator)
    assert len(rows) == count
    name = {"old": "old", "new": "megatron"}[calculator]
    worst = 0.0
    for row in rows:
        case = case_of(row)
        sec_per_it, tflops = _reported(row)
        assert row.gpus is not None
        computed = tflops_by_calculator(
            case.job.shape,
            gbs=case.job.gbs,
            tp=case.layout.tp,
            sec_per_it=sec_per_it,
            gpus=row.gpus,
        )[name]
        worst = max(worst, abs(computed / tflops - 1))
    assert worst < TOLERANCE


def test_a_wrong_layer_count_would_be_seen() -> None:
    row = next(r for r in ROWS if r.line == 278)
    shape = case_of(TableRow(**{**row.__dict__, "layers": 73}), uneven=False).job.shape
    computed = tflops_by_calculator(shape, gbs=2048, tp=8, sec_per_it=143.31, gpus=384)
    assert abs(computed["megatron"] / 112.49 - 1) > TOLERANCE


def test_v100_rows_by_the_simple_formula() -> None:
    rows = [r for r in ROWS if r.section.startswith("BNB / --use") and r.sec_per_it and r.tflops]
    assert len(rows) == 3
    for row in rows:
        computed = tflops_by_calculator(
            TransformerShape(hidden=11600, heads=80), gbs=2048, tp=4, sec_per_it=row.sec_per_it or 0,
            gpus=row.gpus or 0, size_b=104,
        )  # fmt: skip
        assert computed["simple"] == pytest.approx(row.tflops, rel=2e-3)


def test_without_recomputation_it_is_three_quarters() -> None:
    shape = preset("bloom-176b")
    found = {kind: hardware_flops(shape, 2048, kind) for kind in ("full", "none", "selective")}
    stated = tflops_by_calculator(shape, gbs=2048, tp=4, sec_per_it=100.0, gpus=384)
    assert found["full"] == pytest.approx(stated["megatron"] * 1e12 * 100.0 * 384)
    assert found["none"] == pytest.approx(0.75 * found["full"], rel=1e-12)
    assert found["none"] < found["selective"] < found["full"]


def test_model_flops_agree_with_the_closed_formula_for_a_gpt() -> None:
    shape = TransformerShape(hidden=12288, heads=96, layers=96, vocab=51200)
    full = hardware_flops(shape, 1536, "full")
    # Logits are never recomputed, so that a quarter of them is missing from three quarters of the
    # whole.
    logits = 6 * 51200 * 12288 * 1536 * 2048
    assert model_flops(shape, 1536) == pytest.approx(0.75 * full + 0.25 * logits, rel=1e-12)


def test_calculators_leave_out_shapes_they_do_not_hold_for() -> None:
    for shape in (preset("llama-2-7b"), TransformerShape(hidden=8192, heads=64, ffn=24576)):
        assert list(tflops_by_calculator(shape, gbs=8, tp=1, sec_per_it=1.0, gpus=8)) == ["simple"]
    with pytest.raises(InputError, match="seconds above 0 on at least one GPU"):
        tflops_by_calculator(preset("bloom-176b"), gbs=1, tp=1, sec_per_it=0.0, gpus=8)


def test_the_old_calculator_understates_as_the_tables_say() -> None:
    large = TransformerShape(hidden=14400, heads=96, layers=80, vocab=250880)
    small = TransformerShape(hidden=14400, heads=32, layers=8, vocab=250880)
    found = [tflops_by_calculator(s, gbs=1, tp=8, sec_per_it=1.0, gpus=1) for s in (large, small)]
    ratios = [one["megatron"] / one["old"] for one in found]
    assert ratios == pytest.approx([1.037, 1.159], abs=1e-3)


@pytest.mark.parametrize("name", preset_names())
def test_parameters_of_published_models(name: str) -> None:
    # Some papers round to a whole number, some count position embeddings; both are below 0.6 %.
    assert parameters(preset(name)) == pytest.approx(published_parameters(name), rel=6e-3)


def test_parameters_of_bloom_but_for_the_norm_of_its_embedding() -> None:
    assert parameters(preset("bloom-176b")) + 2 * 14336 == 176_247_271_424
