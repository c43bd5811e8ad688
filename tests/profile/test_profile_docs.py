"""docs/profiles.md: its commands and its Python run, in order, beside a made run; its links and the
shelf exist.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import made_profiles as made
import made_runs
import pytest

from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile import Profile
from quantbench.profile.schema import schema
from tools.accuracy.tables import SHIPPED_GPUS
from tools.shelf import PUBLISHED_GPUS, Source, shelf_profile

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.S | re.M)


@pytest.mark.slow
def test_its_commands_and_its_python_run(tmp_path: Path) -> None:
    made_runs.write(tmp_path / "results", made.run(made.gemm_records() + made.other_records()))
    file = tmp_path / "results" / "a100-sxm4-80gb" / "profile.json"
    for language, block in BLOCKS:
        if language == "python":
            (tmp_path / "profile.json").write_bytes(file.read_bytes())
            commands = [["-c", block]]
        else:
            lines = block.strip().splitlines()
            assert all(line.startswith("quantbench ") for line in lines)
            commands = [["-m", *shlex.split(line)] for line in lines]
        for words in commands:
            subprocess.run([sys.executable, *words], cwd=tmp_path, check=True)
    assert len(BLOCKS) > 1
    assert file.exists()


def test_a_shelf_profile_is_made_of_runs_and_holds_none_of_their_rows() -> None:
    made_of = made.run(made.gemm_records(), "a-run", source="a-package 1.2: gemm_perf.parquet")
    source = Source(("bf16",), "a-package 1.2", "quantbench import it")
    profile = shelf_profile("a100-sxm4-80gb", [made_of], source)
    assert all(len(rows) == 0 for rows in profile.tables.values())
    assert "the measured rows stay in a-package 1.2" in profile.provenance.note
    assert (profile.provenance.runs[0].records, profile.provenance.runs[0].rows) == (22, 0)
    assert profile.gemm(4096, 4096, 4096).source == "modelled"  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("slug", [*SHIPPED_GPUS, *PUBLISHED_GPUS])
def test_the_shelf_holds_models_and_findings_and_no_rows(slug: str, tmp_path: Path) -> None:
    file = ROOT / "results" / slug / "profile.json"
    profile = Profile.load(file)
    jsonschema.validate(json.loads(file.read_text(encoding="utf-8")), schema())
    assert profile.device.name == slug
    assert all(len(table) == 0 for table in profile.tables.values())
    assert "the measured rows stay in" in profile.provenance.note
    assert all(run.origin == "imported" and run.records > 300 for run in profile.provenance.runs)
    if slug in SHIPPED_GPUS:  # the others' sizes are scattered: few of them are on a curve
        assert profile.cliffs
        assert {finding.verdict for finding in profile.findings} > {"NOT TESTED"}
    # Whoever fits the shipped models to other rows writes the shelf anew.
    assert profile.models.softmax == SoftmaxModel.best(profile.device), "make shelf"
    for model in profile.models.gemm:
        shipped = GemmModel.best(slug, dtype=model.dtype)
        for name in ("table", "sha256", "package", "rows_fitted"):
            assert model.provenance[name] == shipped.provenance[name], "make shelf"
    profile.save(tmp_path / "profile.json")
    assert (tmp_path / "profile.json").read_bytes() == file.read_bytes()
