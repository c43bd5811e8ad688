"""`quantbench profile export --format`, and that docs/exporting.md can be followed."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from known_profile import ATTENTIONS, GEMMS, gemm_row, known_profile, known_tables, rows_of, table
from made_runs import record, run, write
from typer.testing import CliRunner

from quantbench.cli.app import app
from quantbench.cli.options import percentage
from quantbench.cli.profile import degrees
from quantbench.cli.profile import profile as command
from quantbench.device import lookup
from quantbench.errors import InputError, QuantbenchError
from quantbench.latency.attention import AttentionModel
from quantbench.profile.exporters import FORMATS
from quantbench.workload import Attention, Gemm

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "exporting.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.S | re.M)
COMMANDS = [
    line for language, block in _BLOCKS if not language for line in block.splitlines() if line
]
SNIPPETS = [block for language, block in _BLOCKS if language == "python"]
_NEEDS = {"aiconfigurator": ("yaml", "pyarrow"), "parquet": ("pyarrow",)}
_MADE_RUN = "results/a100-sxm4-80gb/aic-0.12.0-gemm-sglang-0.5.10"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's commands run: with a profile that has rows off the powers of two, too."""
    rows = [gemm_row(*shape, us) for shape, us in GEMMS.items()]
    rows += [
        gemm_row(m, 2048, 2048, 10.0 + m / 20)
        for m in (*(2**p for p in range(14)), *range(96, 4000, 96))
    ]
    known_profile({**known_tables(), "gemm": table("gemm", rows)}).save(tmp_path / "profile.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(words: str) -> str:
    done = CliRunner().invoke(command, shlex.split(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def skip_without_its_packages(words: list[str]) -> None:
    name = words[words.index("--format") + 1] if "--format" in words else ""
    for package in _NEEDS.get(name, ()):
        if find_spec(package) is None:
            pytest.skip(f"{name} needs {package}, which comes with quantbench[tables]")


@pytest.mark.slow
@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("quantbench profile ")])
def test_each_command_of_the_page_runs(line: str, folder: Path) -> None:
    words = line.replace(_MADE_RUN, "profile.json").partition(" profile ")[2]
    skip_without_its_packages(shlex.split(words))
    assert invoke(words)


@pytest.mark.slow
def test_the_import_on_the_page_makes_a_run_of_200_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("aiconfigurator_core") is None:
        pytest.skip("needs quantbench[tables]")
    monkeypatch.chdir(tmp_path)
    line = next(line for line in COMMANDS if line.startswith("quantbench import "))
    done = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    made = tmp_path / f"{_MADE_RUN}-200-rows-seed-0"
    assert (made / "run.json").is_file()
    assert len((made / "records.jsonl").read_text(encoding="utf-8").splitlines()) == 200


def test_the_page_has_all_its_commands() -> None:
    assert len(COMMANDS) == 17
    assert len(SNIPPETS) == 2


def test_the_page_names_every_format() -> None:
    assert all(f"--format {name} " in PAGE for name in FORMATS)


def test_a_gpu_s_name_gives_modelled_rows_with_their_intervals(tmp_path: Path) -> None:
    grid = tmp_path / "grid.csv"
    grid.write_text("m,n,k\n128,4096,4096\n129,4096,4096\n", encoding="utf-8")
    invoke(f"export --gpu h100 --format csv --grid {grid} -o {tmp_path / 'out'}")
    rows = rows_of(tmp_path / "out" / "gemm.csv")
    assert [(row["m"], row["origin"]) for row in rows] == [("128", "modelled"), ("129", "modelled")]
    for row in rows:
        low, middle, high = (float(row[name]) for name in ("low_us", "latency_us", "high_us"))
        assert 0 < low < middle < high
        assert 0 < float(row["held_out_median_pct"]) < float(row["held_out_p95_pct"]) < 50
        assert (row["device"], row["library"]) == ("h100-sxm5-80gb", "vllm")
    assert "shapes of vllm" in (tmp_path / "out" / "notes.txt").read_text(encoding="utf-8")


def test_both_exports_have_the_same_times_of_experts(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs quantbench[tables]")
    for name in ("csv", "aiconfigurator"):
        words = f"export --gpu h100 --format {name} --model mixtral-8x7b --tp 1"
        assert "bf16 experts of vllm" in invoke(f"{words} -o {tmp_path / name}")
    rows = rows_of(tmp_path / "csv" / "moe.csv")
    assert {row["library"] for row in rows} == {"vllm"}
    (path,) = (tmp_path / "aiconfigurator").rglob("moe_perf.parquet")
    theirs = parquet.read_table(path).to_pydict()
    assert theirs["moe_dtype"][0] == "bfloat16"
    ms = theirs["latency"][: len(rows)]
    assert ms == pytest.approx([float(row["latency_us"]) / 1e3 for row in rows])
    notes = (tmp_path / "aiconfigurator" / "notes.txt").read_text(encoding="utf-8")
    assert (
        "fp8_block products that were not measured are modelled (fitted to 8,000 shapes of sglang"
        in notes
    )
    assert "nccl, custom_allreduce" in notes.partition("errors not known")[0].splitlines()[-1]


def test_modelled_prompts_include_the_write_to_the_cache(tmp_path: Path) -> None:
    invoke(f"export --gpu h100 --format csv --model llama-3-8b --tp 1 -o {tmp_path}")
    names = ("batch", "heads", "seq_q", "seq_k", "head_dim", "kv_heads")
    model = AttentionModel.best(lookup("h100"))
    for row in rows_of(tmp_path / "attention.csv")[::40]:
        causal = row["causal"] == "True"
        work = Attention(*(int(row[name]) for name in names), causal=causal)
        (found,) = model.predict([work], cache_write=causal)
        assert float(row["latency_us"]) == pytest.approx(found.latency_us, rel=1e-3)


def test_modelled_rows_are_of_the_library_asked_for_and_hold_edges(tmp_path: Path) -> None:
    words = f"export --gpu a100 --format csv --model gpt2-xl -o {tmp_path}"
    invoke(words)
    sizes = {int(row["m"]) for row in rows_of(tmp_path / "gemm.csv")}
    assert any(m & (m - 1) for m in sizes)  # rows beside edges, between the powers of two
    said = invoke(f"{words} --library trtllm")
    assert "shapes of sglang, as no model of trtllm's is shipped" in said


def test_other_tables_in_the_folder_are_named(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "moe.csv").touch()
    for _ in range(2):
        said = invoke("export profile.json --format csv -o out")
        assert "other files in out are not of this export: moe.csv\n" in said
    said = invoke("export --gpu h100 --format csv --dtype fp8 --model gpt2-xl --tp 1 -o fp8")
    assert "other files" not in said
    assert "attention is of bf16, not of fp8" in said


def test_the_page_s_figures_were_generated() -> None:
    section = PAGE.split("<!-- blindspots:begin -->")[1].split("<!-- blindspots:end -->")[0]
    assert section.count("\n| ") == 5
    assert "rows chosen |" in section
    assert "rows chosen, modelled, not measured |" in section


@pytest.mark.parametrize(
    ("package", "name"),
    [("aiconfigurator_core", "aiconfigurator"), ("llm_analysis", "llm-analysis")],
)
def test_the_page_s_python_runs(package: str, name: str, folder: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    snippet = next(text for text in SNIPPETS if package in text)
    target = next(
        w[w.index("-o") + 1]
        for w in map(shlex.split, COMMANDS)
        if f"--format {name}" in " ".join(w)
    )
    invoke(f"export profile.json --format {name} -o {target}")
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1].split()
    assert all(float(word) > 0 for word in last)
    if name == "aiconfigurator":
        assert float(last[0]) == pytest.approx(GEMMS[129, 4096, 4096] / 1e3, rel=1e-12)
        ours_us = ATTENTIONS[1, 32, 8, 1024, 1024, 128, True]
        assert 0 <= float(last[1]) - ours_us / 1e3 < 0.02  # the engine adds a constant time


def test_other_documents_are_named_rightly() -> None:
    for path in re.findall(r"`((?:tests|docs|quantbench)/[\w./*-]+)`", PAGE):
        assert list(ROOT.glob(path)), path


def test_what_was_written_is_said_in_json(folder: Path) -> None:
    found = json.loads(invoke("export profile.json --format csv -o out --json"))
    assert found["format"] == "csv"
    assert found["rows"]["attention"] == 6
    assert [Path(path).name for path in found["paths"]] == [
        "gemm.csv",
        "softmax.csv",
        "attention.csv",
        "collective.csv",
        "notes.txt",
    ]
    assert all((folder / path).is_file() for path in found["paths"])


def test_people_are_told_what_is_left_out_and_what_is_modelled(folder: Path) -> None:
    said = invoke("export profile.json --format vidur --model llama-3-8b -o out")
    assert "rows left out: a collective that Vidur has no file for" in said
    assert "are a pass over memory each, modelled" in said
    assert "use: " in said


@pytest.mark.slow
def test_folders_of_runs_are_taken_as_they_are(tmp_path: Path) -> None:
    times = {128: 36.9, 129: 63.3, 256: 65.5}
    made = run(
        [record(Gemm(m, 4096, 4096, layout="nt"), [us], {"m": m}) for m, us in times.items()]
    )
    where = write(tmp_path / "results", made)
    # The run's folder, or the device's with all of its runs.
    invoke(f"export {where.parent} --format csv --no-fit -o {tmp_path / 'out'}")
    rows = rows_of(tmp_path / "out" / "gemm.csv")
    assert {int(row["m"]): float(row["latency_us"]) for row in rows} == times


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "profile.json --format astra-sim",
            "--format = 'astra-sim'; expected one of aiconfigurator, vidur",
        ),
        (
            "profile.json --format vidur",
            "no --model (a row is of one model there); expected one of llama-2-7b",
        ),
        (
            "profile.json --format vidur --model llama-3-8b --tp two",
            "--tp: 'two'; expected integers from",
        ),
        (
            "profile.json --format csv --provider cublas",
            "--provider cublas: no row has this provider; expected one of",
        ),
        (
            "profile.json --format aiconfigurator --layout tt",
            "--layout = 'tt'; expected one of nn, nt, tn",
        ),
        (
            "profile.json --format aiconfigurator --layout tn",
            "--layout tn: no matrix product has this layout; expected one of nt",
        ),
        ("profile.json --format csv --tp 2", "--tp 2 without effect; expected --model or --config"),
        (
            "profile.json --format csv --grid g --model gpt2-xl",
            "--grid g with --model or --config; expected one",
        ),
        (
            "profile.json --format aiconfigurator --dtype int8 --tp 1 --model llama-3-8b,",
            "nothing that it has a table for",
        ),
        (
            "profile.json --format csv --dtype bfloat16",
            "--dtype = 'bfloat16'; expected one of fp16, bf16",
        ),
        (
            "profile.json --format llm-analysis --dtype fp8",
            "has no peak for fp8; expected another --dtype",
        ),
        (
            "profile.json --format llm-analysis --dtype int8",
            "products of int8, where llm-analysis means 16 bits",
        ),
        (
            "profile.json --format calculon --dtype int8",
            "products of int8; expected --dtype fp16, bf16, fp32, fp8",
        ),
        ("profile.json --gpu h100 --format csv", "runs and --gpu; expected one"),
        ("--format csv", "neither runs nor --gpu; expected one of them"),
        ("--gpu h100", "without --format"),
        (
            "profile.json run --format csv",
            "profile.json beside other paths; expected one profile, or folders of runs",
        ),
        ("nowhere --format csv", "nowhere"),
        ("profile.json --format csv -o b.csv", "--output b.csv; expected the name of a folder"),
        ("my.csv --format csv", "my.csv; expected a profile (.json) or a run's folder"),
    ],
)
def test_wrong_use_is_one_clear_line(words: str, said: str, folder: Path) -> None:
    Path("my.csv").write_text("m,n,k\n")
    with pytest.raises(QuantbenchError) as caught:
        invoke(f"export -o out {words}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_percentages_and_degrees() -> None:
    assert percentage("--precision", "2.5 %", above=True) == 0.025
    assert degrees("8,1,8") == (1, 8)
    for wrong in ("", "0", "1,,2", "1.5"):
        with pytest.raises(InputError, match="--tp"):
            degrees(wrong)
    for wrong in ("5", "x%", "0%", "100%", "nan%"):
        with pytest.raises(InputError, match="--precision"):
            percentage("--precision", wrong, above=True)
