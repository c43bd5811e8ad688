"""The steps of `make evidence`: every sweep can be planned on the GPU it is for, and a step can be taken up again."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantbench.cli.app import app
from quantbench.evidence import run as evidence
from quantbench.evidence.steps import STEPS, PlannedSweep, random_shapes

ROOT = Path(__file__).resolve().parent.parent
SWEEPS = [sweep for step in STEPS.values() for sweep in step]


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_each_sweep_can_be_planned_for_an_h200(sweep: PlannedSweep) -> None:
    words = ["sweep", *sweep.words, "--dry-run", "--gpu", "h200-sxm-141gb", "--budget", "none", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.exception
    assert len(json.loads(done.stdout)["points"]) >= 4


def test_a_step_fits_its_time() -> None:
    for step, sweeps in STEPS.items():
        assert sum(sweep.share for sweep in sweeps) <= (0.8 if step == 1 else 1.0) + 1e-9
    names = [sweep.name for sweep in SWEEPS]
    assert len(names) == len(set(names))


def test_random_shapes_are_the_same_each_time_and_within_their_ranges() -> None:
    shapes = random_shapes("cuda")
    assert shapes == random_shapes("cuda")
    assert len(set(shapes)) > 0.95 * len(shapes)
    assert all(1 <= m <= 16384 and 56 <= n <= 16448 and 56 <= k <= 16448 for m, n, k in shapes)
    assert all(n % 8 == 0 and k % 8 == 0 for _, n, k in shapes)


def test_a_step_is_taken_up_where_it_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    words = ("--dim", "n=32,64", "-m", "32", "-k", "32", "--dtype", "fp32")
    two = (PlannedSweep("one", words, words, 0.5), PlannedSweep("broken", words, ("--dim", "size"), 0.5))
    monkeypatch.setitem(evidence.STEPS, 2, two)
    evidence.main(step=2, results=Path("results"), seconds=60)
    (folder,) = Path("results").glob("*/evidence")
    first = json.loads((folder / "state.json").read_text())
    assert first["one"]["how_ended"] == "complete"
    assert first["broken"] == {"how_ended": "failed", "run": None}

    monkeypatch.setitem(evidence.STEPS, 2, (two[0], PlannedSweep("broken", words, words, 0.5)))
    evidence.main(step=2, results=Path("results"), seconds=60)
    second = json.loads((folder / "state.json").read_text())
    assert second["one"] == first["one"]  # not measured again
    assert second["broken"]["how_ended"] == "complete"
    with tarfile.open(folder / "evidence-step2.tar.gz") as archive:
        names = archive.getnames()
    assert f"{folder.parent.name}/evidence/state.json" in names
    assert sum(name.endswith("records.jsonl") for name in names) == 2
