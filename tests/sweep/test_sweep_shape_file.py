"""Files of transformer shapes: their format, the plan they make, the table that compares them, and
a sweep of one.
"""

import json
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
from commands import run, run_json

from quantbench.analysis.curves import axes_of
from quantbench.analysis.summary import Point
from quantbench.cli.sweep_options import SweepArguments, sweep_options
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.measurement import Grade
from quantbench.report.page import write_report
from quantbench.report.shape_comparison import (
    compare_shapes,
    comparison_section,
    comparison_sentence,
)
from quantbench.store.folder import read_run
from quantbench.sweep.options import SweepOptions, options_from_json, options_to_json, plan_sweep
from quantbench.sweep.shape_file import Gain, NamedShape, read_shape_file, write_shape_file
from quantbench.workload import TransformerShape
from quantbench.workload.parameters import parameters

H100 = lookup("h100-sxm5-80gb")
BASE = TransformerShape(
    hidden=96,
    heads=4,
    kv_heads=2,
    ffn=200,
    gated=True,
    seq=64,
    vocab=250,
    layers=3,
    dtype="fp32",
    attention="flash",
)
SHAPES = (
    NamedShape("as it is", BASE),
    NamedShape("wider", replace(BASE, hidden=128, head_dim=32, layers=2), Gain(0.1, 0.05, 0.15)),
    NamedShape("vocab 250 → 256", replace(BASE, vocab=256), Gain(0.02, 0.01, 0.03)),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.json"
    write_shape_file(path, SHAPES)
    return path


def test_what_is_written_is_read(file: Path) -> None:
    assert read_shape_file(file) == SHAPES
    options = SweepOptions((), models=SHAPES)
    assert options_from_json(json.loads(json.dumps(options_to_json(options)))) == options


def test_the_file_of_the_docs_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "advising.md").read_text(encoding="utf-8")
    path = tmp_path / "own.json"
    path.write_text(page.split("```json\n")[1].split("```")[0], encoding="utf-8")
    assert [one.shape.ffn for one in read_shape_file(path)] == [11008, 11264]


def edited(file: Path, change: Any) -> Path:
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (lambda d: d.update(format="other"), "of format 'other'"),
        (lambda d: d.update(version=2), "of version 2"),
        (lambda d: d.update(shapes=[]), "shapes: []"),
        (lambda d: d.update(shapes=d["shapes"] * 40), "shapes: ["),
        (lambda d: d["shapes"].append(d["shapes"][0]), "name 'as it is' twice"),
        (lambda d: d["shapes"].append(7), "shape 4: 7"),
        (lambda d: d["shapes"][1].update(name="two\nlines"), "two"),
        (lambda d: d["shapes"][1].pop("shape"), "shape 2: None"),
        (lambda d: d["shapes"][1]["shape"].update(heads="4"), "heads = '4'"),
        (lambda d: d["shapes"][1]["shape"].update(heads=3), "kv_heads = 2"),
        (lambda d: d["shapes"][1]["shape"].update(wings=2), "field 'wings'"),
        (lambda d: d["shapes"][1]["predicted"].update(low="x"), "low = 'x'"),
    ],
)
def test_anything_else_is_refused(file: Path, change: Any, value: str) -> None:
    with pytest.raises(InputError) as error:
        read_shape_file(edited(file, change))
    assert value in error.value.value


def test_every_op_of_every_shape_is_planned_once() -> None:
    options = SweepOptions((), models=SHAPES, providers=("torch.mm", "torch.flash"))
    axes, plan = plan_sweep(options, H100)
    assert [(axis.dim, axis.values) for axis in axes] == [("shape", (1, 2, 3))]
    assert {p.workload for p in plan.points} == {
        op.workload for one in SHAPES for op in one.shape.ops()
    }
    places = {
        (place.axes["shape"], place.op): place.count for p in plan.points for place in p.places
    }
    wanted = {(n, op.label): op.count for n, one in enumerate(SHAPES, 1) for op in one.shape.ops()}
    assert places == wanted
    # A budget that is too short for all keeps the first shape whole.
    _, short = plan_sweep(replace(options, budget_s=0.6 * plan.estimate_s), H100)
    assert 0 < len(short.points) < len(plan.points)
    first = {place.op for p in short.points for place in p.places if place.axes["shape"] == 1}
    assert first == {op.label for op in BASE.ops()}


def test_the_command_line_takes_the_file_and_nothing_that_contradicts_it(file: Path) -> None:
    given = SweepArguments(shapes=file, provider=["torch.mm"], budget="none")
    assert sweep_options(given, "cuda").models == SHAPES
    for other in ({"dtype": "bf16"}, {"ops": "qkv"}, {"direction": "both"}, {"hidden": "512"}):
        with pytest.raises(
            InputError, match=r"sweep: --shapes .* with --.*; expected shapes as the file describes"
        ):
            sweep_options(replace(given, **other), "cuda")
    with pytest.raises(InputError, match=r"--refine with --shapes"):
        SweepOptions((), models=SHAPES, refine=True)
    with pytest.raises(InputError, match=r"--shapes with --dim n"):
        SweepOptions(("n=64",), models=SHAPES)


def points(
    us_per_mflop: dict[int, float], half_width: float = 0.01, provider: str = "torch.mm"
) -> list[Point]:
    """Every op of SHAPES at a rate of its shape's own; where the first shape has the same work, at
    the first's.
    """
    found = []
    seen: dict[Any, float] = {}
    for number, one in enumerate(SHAPES, 1):
        for op in one.shape.ops():
            us = seen.setdefault(op.workload, us_per_mflop[number] * op.workload.flops / 1e6)
            low, high = us * exp(-half_width), us * exp(half_width)
            found.append(
                Point(
                    str(hash(op.workload)), {"shape": number}, op.label, op.count, provider, op.workload, None, us, low,
                    high, 1.0, 1.0, None, Grade("A", ()), 10, 0.01, None,
                )
            )  # fmt: skip
    return found


def test_shapes_are_compared_at_equal_parameters() -> None:
    made = points({1: 2.0, 2: 1.0, 3: 2.0})
    first, wider, padded = compare_shapes(made, SHAPES)
    layer = sum(op.workload.flops for op in BASE.ops() if op.name != "logits") * 2.0 / 1e6
    logits = sum(op.workload.flops for op in BASE.ops() if op.name == "logits") * 2.0 / 1e6
    assert first.layer_us == pytest.approx(layer)
    assert first.logits_us == pytest.approx(logits)
    assert first.gain == Gain(0.0, 0.0, 0.0)
    times = [
        sum(p.latency_us * p.count for p in made if p.axes["shape"] == number) for number in (1, 2)
    ]
    expected = times[0] / times[1] * parameters(SHAPES[1].shape) / parameters(BASE)
    assert wider.gain.mid == pytest.approx(expected - 1)
    assert wider.gain.low < wider.gain.mid < wider.gain.high
    assert wider.verdict == "outside the predicted interval"
    assert comparison_sentence(compare_shapes(made, SHAPES)).startswith(
        "wider is faster than as it is by +"
    )
    slow = compare_shapes(points({1: 1.0, 2: 9.0, 3: 9.0}), SHAPES)
    assert comparison_sentence(slow) == "none of 2 other shapes is surely faster than as it is"
    # All but the logits is the same work, whose error is the same in both.
    assert -0.05 < padded.gain.mid < 0
    narrow, wide = (log((1 + gain.mid) / (1 + gain.low)) for gain in (padded.gain, wider.gain))
    assert narrow < 0.25 * wide


def test_a_gain_within_the_prediction_says_so() -> None:
    at_par = compare_shapes(points({1: 1.0, 2: 1.0, 3: 1.0}), SHAPES)[1].gain
    rate = (1 + at_par.mid) / 1.1  # so that the second gains the predicted 10 %
    assert compare_shapes(points({1: 1.0, 2: rate, 3: 1.0}), SHAPES)[1].verdict == "as predicted"


def test_missing_ops_are_named_and_never_summed() -> None:
    made = points({1: 2.0, 2: 1.0, 3: 2.0})
    without = [p for p in made if (p.axes["shape"], p.op) != (2, "proj.wgrad")]
    _, wider, padded = compare_shapes(without, SHAPES)
    assert (wider.layer_us, wider.gain, wider.missing) == (None, None, ("proj.wgrad",))
    assert padded.gain is not None
    # What the first lacks is left out of all of them, and the prediction, which is of all ops, is
    # not judged.
    without = [p for p in made if p.op != "attention" or p.axes["shape"] > 1]
    comparison = compare_shapes(without, SHAPES)
    assert [one.left_out for one in comparison] == [("attention",)] * 3
    assert comparison[1].gain is not None
    assert comparison[1].verdict == ""
    assert (
        "torch: attention of the first shape not measured"
        in comparison_section(comparison).lines[-1]
    )


def test_libraries_are_compared_apart_and_the_fastest_kernel_of_one_counts() -> None:
    made = points({1: 2.0, 2: 1.0, 3: 2.0})
    slower = [replace(p, latency_us=3 * p.latency_us, provider="torch.math") for p in made]
    assert compare_shapes([*made, *slower], SHAPES) == compare_shapes(made, SHAPES)
    other = points({1: 1.0, 2: 1.0, 3: 1.0}, provider="mine.kernels:Gemm")
    comparison = compare_shapes([*made, *other], SHAPES)
    assert [one.library for one in comparison] == ["torch"] * 3 + ["mine.kernels:Gemm"] * 3
    assert len(comparison_section(comparison).table.rows) == 6


def test_the_number_of_a_shape_is_no_size_to_look_for_cliffs_along() -> None:
    assert axes_of(points({1: 2.0, 2: 1.0, 3: 2.0})) == ()


def places_in(folder: Path) -> set[tuple[int, str]]:
    points = [one for one in read_run(folder).records if one.role == "point"]
    return {(place.axes["shape"], place.op) for one in points for place in one.places}


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_a_sweep_of_shapes_measures_compares_and_resumes(file: Path, tmp_path: Path) -> None:
    timing = "--precision 50% --cache hot --budget none"
    data = run_json(f"sweep --shapes {file} {timing} --provider torch.mm,torch.math")
    assert data["how_ended"] == "complete"
    assert [one["name"] for one in data["shapes"]] == [one.name for one in SHAPES]
    assert all(one["layer_us"] > 0 and one["logits_us"] > 0 for one in data["shapes"])
    assert data["shapes"][0]["gain"]["mid"] == 0
    assert data["cliffs"] == []
    folder = tmp_path / data["run"]
    places = places_in(folder)
    assert places == {(n, op.label) for n, one in enumerate(SHAPES, 1) for op in one.shape.ops()}
    written = write_report(read_run(folder), tmp_path / "report")
    assert "faster than as it is" in written.lead.sentence
    page = written.page.read_text(encoding="utf-8")
    assert "Shapes side by side" in page
    assert "vocab 250 → 256" in page
    # The run knows its shapes: the file is not needed to finish it.
    file.unlink()
    lines = (folder / "records.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")
    said = run(f"sweep --resume {folder}")
    assert "as it is" in said
    assert "gain: measured tokens per second at equal parameters against the first shape" in said
    assert places_in(folder) == places
