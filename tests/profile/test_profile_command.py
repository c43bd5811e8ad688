"""`quantbench profile` as it is typed."""

import json
import shutil
from pathlib import Path

import made_profiles as made
import made_runs
import pytest
from typer.testing import CliRunner, Result

from quantbench.cli.app import app
from quantbench.errors import QuantbenchError
from quantbench.profile import Profile


def typed(*words: str) -> Result:
    return CliRunner().invoke(app, ["profile", *words], catch_exceptions=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported from a run on disk."""
    folder = tmp_path_factory.mktemp("profile")
    run = made_runs.write(folder, made.run(made.gemm_records() + made.other_records()))
    found = typed("export", str(run), "-o", str(folder / "profile.json"), "--no-fit")
    assert found.exit_code == 0
    assert "rows: 22 of gemm, 3 of softmax, 3 of attention, 3 of collective" in found.stdout
    assert f"next: quantbench profile show {folder / 'profile.json'}" in found.stdout
    return folder / "profile.json"


def test_a_device_s_folder_without_runs_exports_its_profile(file: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "a100-sxm4-80gb"
    shelf.mkdir()
    shutil.copy(file, shelf)
    found = typed("export", str(shelf), "--format", "csv", "-o", str(tmp_path / "out"))
    assert found.exit_code == 0
    assert "22 gemm" in found.stdout


def test_export_says_what_it_wrote(file: Path, tmp_path: Path) -> None:
    run = file.parent / "a100-sxm4-80gb" / "run"
    found = typed("export", str(run), "-o", str(tmp_path / "other.json"), "--no-fit", "--json")
    answer = json.loads(found.stdout)
    assert (answer["device"], answer["profile"]) == ("a100-sxm4-80gb", str(tmp_path / "other.json"))
    assert (tmp_path / "other.json").read_bytes() == file.read_bytes()


def test_show(file: Path) -> None:
    text = typed("show", str(file)).stdout
    for words in (
        "a100-sxm4-80gb: 108 SMs (sm_80)",
        "simulated run run, cold cache, 31 of 31 records",
        "gemm bf16 nt",
        "m 1024 to 4096, n 4096 to 12288",
        "model of sglang's bf16 products: fitted to 8,000 rows; 90 % of shapes within ±",
        "between measured products: 90 % within ±",
        "NOT TESTED:",
    ):
        assert words in text
    answer = json.loads(typed("show", str(file), "--json").stdout)
    assert answer["tables"][0] == {
        "kind": "gemm",
        "format": "bf16 nt",
        "provider": "torch.linear",
        "rows": 22,
    }


def test_query(file: Path) -> None:
    words = [
        "--gemm",
        "2048,6144,2048",
        "--gemm",
        "2048,6240,2080",
        "--gemm",
        "1,1,1",
        "--softmax",
        "64,512,512",
    ]
    words += ["--attention", "1,32,512,128"]
    text = typed("query", str(file), *words).stdout
    assert "outside the measured range (m 1024 to 4096" in text
    answers = json.loads(typed("query", str(file), *words, "--json").stdout)["answers"]
    sources = ["measured", "interpolated", "modelled", "measured", "measured"]
    assert [a["source"] for a in answers] == sources
    assert [a["shape"] for a in answers[2:]] == [[1, 1, 1], [64, 512, 512], [1, 32, 512, 128]]
    profile = Profile.load(file)
    assert answers[1]["latency_us"] == profile.gemm(2048, 6240, 2080).latency_us
    assert answers[0]["format"] == profile.gemm(2048, 6144, 2048).format == "bf16 nt torch.linear"
    assert answers[3]["format"].startswith("bf16 causal forward ")
    assert "bf16 nt torch.linear" in text


def test_runs_without_a_measured_point_make_no_profile(tmp_path: Path) -> None:
    run = made_runs.write(tmp_path, made.run([]))
    with pytest.raises(
        QuantbenchError, match="profile export: no measured point in run; expected at least one"
    ):
        typed("export", str(run), "-o", str(tmp_path / "profile.json"))
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "profile query: no shape; expected --gemm, --softmax, --attention or --collective"),
        (("--gemm", "1,2"), "--gemm: '1,2'; expected m,n,k or m,n,k,batch"),
        (("--gemm", "1,2,x"), "--gemm: '1,2,x'; expected m,n,k or m,n,k,batch"),
        (("--softmax", "1"), "--softmax: '1'; expected batch,rows,cols"),
        (("--gemm", "0,1,1"), "profile.gemm: m = 0; expected whole numbers from 1 to 2147483647"),
        (
            ("--gemm", "1,1,1", "--dtype", "bf8"),
            "profile.gemm: dtype = 'bf8'; expected one of fp16, bf16",
        ),
    ],
)
def test_wrong_use_is_one_line(file: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(QuantbenchError) as error:
        typed("query", str(file), *words)
    assert str(error.value).startswith(message)


def test_plan_takes_its_times_from_a_profile(file: Path) -> None:
    words = [
        "plan",
        "--model",
        "llama-2-7b",
        "--gpus",
        "8",
        "--gbs",
        "64",
        "--tp",
        "1",
        "--pp",
        "1",
        "--explain",
        "--profile",
    ]
    found = CliRunner().invoke(app, [*words, str(file)])
    assert "times: profile of a100-sxm4-80gb: 22 gemm" in found.stdout
    words += [str(file), "--gpu", "h100-sxm5-80gb"]
    with pytest.raises(QuantbenchError, match=r"--profile: .* is of a100-sxm4-80gb"):
        CliRunner().invoke(app, words, catch_exceptions=False)
