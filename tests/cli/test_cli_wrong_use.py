"""Words as somebody new might type them: one line says what is wrong with them, before anything is
computed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from quantbench.__main__ import main
from quantbench.cli.app import app
from quantbench.errors import QuantbenchError
from quantbench.latency.gemm.inputs import LARGEST_SIDE

SHELF = Path(__file__).resolve().parents[2] / "results"
SHELF_A100 = str(SHELF / "a100-sxm4-80gb")
PROFILE = str(SHELF / "a100-sxm4-80gb" / "profile.json")
TABLE = str(Path(__file__).resolve().parents[1] / "data" / "bloom_tables.csv")
PLAN = (
    "plan",
    "--model",
    "bloom-176b",
    "--gpus",
    "384",
    "--gpu",
    "a100-sxm4-80gb",
    "--gbs",
    "2048",
)
CSV = ("--gpu", "a100-sxm4-80gb", "--map", "m=M,n=N,k=K,latency=t:ms", "--dtype", "bf16")
EXPERTS = ("predict", "--gpu", "h100", "--model", "deepseek-v3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("check", "empty.csv"),
            "read run: empty.csv is a file; expected a folder with run.json in it",
        ),
        (
            ("profile", "export", PROFILE),
            f"read run: {PROFILE} is a file; expected folders of runs, or --format",
        ),
        (
            ("profile", "export", SHELF_A100),
            f"read run: {SHELF_A100} holds no run; expected a run's folder",
        ),
        (
            ("profile", "query", PROFILE, "--gemm", "²,1,1"),
            "--gemm: '²,1,1'; expected m,n,k or m,n,k,batch",
        ),
        (("profile", "query", PROFILE, "--gemm", "9" * 5000 + ",1,1"), "--gemm: '999"),
        (
            ("profile", "query", PROFILE, "--gemm", "1,1,1", "--direction", "up"),
            "profile query: --direction = 'up'; expected one of forward, backward",
        ),
        (
            ("profile", "export", PROFILE, "--format", "csv", "--provider", "me"),
            "profile export: --provider me: no row has this provider; expected a profile with rows",
        ),
        (
            ("profile", "export", PROFILE, "--format", "csv", "--dtype", "fp8"),
            "profile export: --dtype with --format csv; expected its options: none: it has all rows",
        ),
        (
            ("profile", "export", PROFILE, "--format", "calculon", "--tp", "4"),
            "profile export: --tp with --format calculon; expected its options: --provider, --dtype, --layout",
        ),
        (
            ("profile", "query", PROFILE, "--gemm", "1,1,1", "--direction", "backward"),
            "profile query: --direction backward without effect; expected --softmax or --attention",
        ),
        (
            ("profile", "query", PROFILE, "--softmax", "1,1,1", "--layout", "nn"),
            "profile query: --layout nn without effect; expected --gemm",
        ),
        (
            ("profile", "query", PROFILE, "--gemm", "1,1,1", "--library", "aiter"),
            "profile.gemm: provider = 'aiter'; expected one of sglang",
        ),
        ((*PLAN, "--tp", "²"), "--tp: '²'; expected integers from 1 to 2,147,483,647, comma"),
        ((*PLAN, "--zero", "9"), "--zero: '9'; expected integers from 0 to 3, comma separated"),
        (
            (*PLAN, "--link-gb-per-s", "inf"),
            "plan: --link-gb-per-s inf; expected a rate that is finite",
        ),
        (
            (*PLAN, "--rows", TABLE),
            "plan --rows: --model bloom-176b; expected models as the rows name them",
        ),
        ((*PLAN, "--check"), "plan --check: no --tp; expected one value of --tp"),
        (("plan", "--fit", "a.csv", "--check"), "plan: --check with --fit; expected one of them"),
        (
            ("profile", "export", PROFILE, "--provider", "torch"),
            "profile export: a planner's option without --format",
        ),
        (
            ("predict", "--gpu", "a100", "--dim", "m=64", "--gated"),
            "predict: --gated with --dim m; expected sizes of a",
        ),
        (
            ("sweep", "--dim", "m=64", "--dry-run", "--resume", "run"),
            "sweep: --dry-run with --resume run; expected one",
        ),
        (
            ("import", "csv", "empty.csv", *CSV),
            "import csv: empty.csv has no column 'M'; expected a CSV file",
        ),
        (
            ("sweep", "--dim", "n=64", "--provider", "torch, no.module:Class"),
            "provider: 'no.module:Class' (no module named 'no'); expected a class that can be imported",
        ),
        (
            ("sweep", "--dim", "n=64", "--provider", "os:"),
            "provider: 'os:'; expected package.module:Class",
        ),
        (
            ("sweep", "--dim", "n=1:4294967296:1000000000"),
            "--dim n: '1:4294967296:1000000000'; expected start:stop[:step] or an integer, all from 1 to 2,147,483,647",
        ),
        (
            ("predict", "--gpu", "a100", "--dim", "n=64", "--model", "llama-3-8b"),
            "predict: --model llama-3-8b with --dim n; expected sizes of a plain product: m, n, k, batch",
        ),
        (
            ("predict", "--gpu", "a100", "--dim", "hidden=1024", "-m", "64"),
            "predict: --m 64 with --dim hidden; expected sizes of a model",
        ),
        (
            ("predict", "--gpu", "a100", "--dim", "hidden=2147483647"),
            "predict: ffn = 8589934588; expected",
        ),
        (
            (*EXPERTS, "--dim", "tokens=4096", "--seq", "2048"),
            "predict: --seq 2048 with tokens; expected tokens, or",
        ),
        (
            (*EXPERTS, "--dim", "tokens=4096", "--ops", "experts_up"),
            "predict: --ops experts_up; expected experts: ",
        ),
        (
            (*EXPERTS, "--dim", "ep=3,5,7"),
            "predict: experts = 256 with ep = 3; expected experts divisible by ep",
        ),
        (
            ("explore", "--gpu", "a100", "--profile", PROFILE),
            f"explore: --gpu a100 and --profile {PROFILE}; expected one of them",
        ),
        (("explore", "--model", ""), "explore: --model ''; expected the name of a preset"),
        (
            ("predict", "--gpu", "a100", "--dim", "hidden=1024", "--ops", ","),
            "--ops: ','; expected names of ops",
        ),
        (
            ("sweep", "--resume", "run", "--provider", "triton"),
            "sweep: --resume run with --provider triton; expected the run's own options: --resume, with --budget",
        ),
        (
            ("sweep", "--resume", "run", "--tp", "8"),
            "sweep: --resume run with --tp 8; expected the run's own options",
        ),
        (
            ("check", "--experiment", "k-8", "--budget", "5"),
            "--budget: '5'; expected a time such as 90s",
        ),
        (
            ("check", "--experiment", "k-8", "--results", "empty.csv"),
            "--results: empty.csv (File exists); expected",
        ),
        (
            ("check", "run", "--budget", "8m"),
            "check: --budget 8m with a run; expected --budget with --experiment",
        ),
        (
            ("check", "run", "--results", "x"),
            "check: --results x with a run; expected --results with --experiment",
        ),
        (
            ("sweep", "--dim", "n=64", "--no-causal"),
            "sweep: --no-causal with --dim n; expected sizes of a plain",
        ),
        (
            ("sweep", "--dim", "n=64", "--dropout"),
            "sweep: --dropout with --dim n; expected sizes of a plain",
        ),
        (
            ("sweep", "--dim", "n=64", "--results", "empty.csv"),
            "--results: empty.csv (File exists); expected a folder",
        ),
    ],
)
def test_wrong_use_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    with pytest.raises(QuantbenchError) as caught:
        CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert str(caught.value).startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.csv"]


@pytest.mark.parametrize(
    "words",
    [
        ("advise", "--model", "gpt2-xl"),
        ("plan", "--model", "bloom-176b", "--gpus", "8", "--gbs", "8"),
        ("predict", "--dim", "m=512"),
        ("sweep", "--dim", "m=512", "--dry-run"),
        ("import", "csv", "empty.csv", "--map", "m=M,n=N,k=K,latency=t:ms", "--dtype", "bf16"),
        ("import", "aiconfigurator", "--system", "b60"),
        ("import", "megatron-log", "empty.csv"),
    ],
    ids=" ".join,
)
def test_every_command_knows_gpus_by_the_same_names(words: tuple[str, ...]) -> None:
    with pytest.raises(QuantbenchError) as caught:
        CliRunner().invoke(app, [*words, "--gpu", "rtx-6000"], catch_exceptions=False)
    candidates = "rtx-6000-ada-48gb, rtx-pro-6000-96gb, rtx-pro-6000-server-96gb"
    assert str(caught.value).startswith(
        f"device: 'rtx-6000'; expected one of {candidates} (`quantbench devices`"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no --dim; expected at least one of --dim hidden, --dim heads"),
        (
            ("-n", "64", "-k", "64"),
            "no --dim beside --n, --k; expected at least one of --dim m, --dim n, --dim k",
        ),
        (("--dim", "n=1:2", "-n", "5"), "--dim n=1:2 and --n 5; expected the values of n once"),
        (("--dim", "n", "--dim", "n"), "--dim n twice; expected each dimension once"),
        (
            ("--dim", "n", "--dim", "hidden"),
            "--dim n --dim hidden; expected dimensions of a model, or m, n, k, batch",
        ),
        (
            ("--dim", "n", "--hidden", "64"),
            "--hidden 64 with --dim n; expected sizes of a plain product",
        ),
        (
            ("--dim", "hidden", "--model", "gpt2-xl", "--config", "x"),
            "--model gpt2-xl and --config x; expected one",
        ),
        (
            ("--dim", "hidden=4096", "--tp", "3"),
            "hidden = 4096 with tp = 3; expected hidden divisible by tp",
        ),
        (
            ("--dim", "hidden=4096", "--head-dim", "96", "--ops", "attention"),
            "hidden = 4096 with head_dim = 96; expected",
        ),
    ],
)
@pytest.mark.parametrize(
    "command", [("predict",), ("sweep", "--dry-run")], ids=lambda command: command[0]
)
def test_wrong_axes_are_said_in_the_name_of_the_command(
    command: tuple[str, ...],
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QuantbenchError) as caught:
        CliRunner().invoke(app, [*command, "--gpu", "a100", *words], catch_exceptions=False)
    assert str(caught.value).startswith(f"{command[0]}: {said}")


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "--gpu", "a100", "--dim", "n=4194304", "-m", "64", "-k", "32"),
        ("profile", "query", PROFILE, "--gemm", "64,4194304,32"),
    ],
    ids=lambda words: words[0],
)
def test_products_beyond_the_models_are_refused_alike(words: tuple[str, ...]) -> None:
    with pytest.raises(QuantbenchError) as caught:
        CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert str(caught.value) == (
        f"product 64×4194304×32: n = 4194304; expected at most {LARGEST_SIDE}: no time is predicted of larger products"
    )


def test_sizes_that_a_prediction_leaves_out_are_said_in_its_name() -> None:
    words = ["predict", "--gpu", "a100", "--dim", "hidden=4096,4100", "--tp", "8"]
    said = CliRunner().invoke(app, words).output
    assert "left out at 1 size, the first: predict: hidden = 4100 with tp = 8" in said


def test_a_loose_name_of_a_gpu_is_enough_for_a_prediction() -> None:
    said = CliRunner().invoke(app, ["predict", "--gpu", "a100", "--dim", "hidden=1024"]).output
    assert said.startswith("a100-sxm4-80gb: predicted")


def test_the_sweep_that_measures_a_prediction_is_said_in_full() -> None:
    words = ["--dim", "n=64:128:64", "--m", "64", "--k", "96", "--layout", "tn", "--dtype", "fp16"]
    said = CliRunner().invoke(app, ["predict", "--gpu", "a100", *words]).output
    assert f"measure it: quantbench sweep {' '.join(words)}\n" in said


@pytest.mark.parametrize(
    "words",
    [
        ("--hidden", "14400", "--heads", "96", "--tp", "8"),
        ("--model", "llama-3-8b", "--tp", "2", "--attention", "flash", "--top", "0"),
    ],
)
def test_the_sweep_that_advice_ends_with_can_be_planned(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    said = (
        CliRunner()
        .invoke(app, ["advise", "--gpu", "a100", *words, "-o", str(tmp_path / "shapes.json")])
        .output
    )
    following = said.splitlines()[-1].partition(": quantbench ")[2].split()
    planned = (
        CliRunner()
        .invoke(app, [*following, "--gpu", "a100", "--dry-run"], catch_exceptions=False)
        .output
    )
    assert "points, about" in planned
    if "llama-3-8b" in words:
        assert "×14336×" in planned or "×7168×" in planned


def test_a_rate_too_low_to_read_is_said_to_be_so() -> None:
    said = (
        CliRunner()
        .invoke(app, ["predict", "--gpu", "a100", "--dim", "n=1", "-m", "1", "-k", "1"])
        .output
    )
    assert " <0.001 " in said
    assert "e-0" not in said


def test_an_answer_is_in_the_unit_that_reads_best() -> None:
    said = (
        CliRunner().invoke(app, ["profile", "query", PROFILE, "--gemm", "65536,65536,65536"]).output
    )
    assert re.search(r" 2\.[0-9]+ s +2\.[0-9]+ s to 2\.[0-9]+ s ", said)
    assert "e+0" not in said


@pytest.mark.slow
def test_a_closed_pipe_is_no_finding() -> None:
    """Exit code 1 says that something was found; `| head -1` must not. Nor may a gate that nobody
    read have passed.
    """
    words = [
        "advise",
        "--hidden",
        "14400",
        "--heads",
        "96",
        "--tp",
        "8",
        "--gpu",
        "a100-sxm4-80gb",
        "--top",
        "0",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "quantbench", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert (process.wait(), said) == (141, b"")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("foo",), "quantbench: command line: no such command 'foo'"),
        (("sweep", "--foo"), "quantbench: sweep: no such option: --foo"),
        (("plan", "--gpus", "x"), "quantbench: plan: invalid value for '--gpus': 'x'"),
        (("plan", "--gpus", "0"), "quantbench: plan: invalid value for '--gpus'"),
        (("advise", "--hidden", "4k"), "quantbench: advise: invalid value for '--hidden': '4k'"),
        (("import", "csv"), "quantbench: import csv: missing argument"),
        (
            ("predict", "--gpu", "a100", "--dim", "n=1\x1b[31m"),
            "quantbench: --dim n: '1\\x1b[31m'; expected",
        ),
        (
            ("check", "a\0b"),
            "quantbench: command line: 'a\\x00b' with a NUL byte; expected words without one",
        ),
    ],
)
def test_what_the_parser_refuses_is_one_line_too(
    words: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["quantbench", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(said)


def test_a_system_error_is_one_line_and_a_bug_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["quantbench", "devices"])
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    for error, said in (
        (
            PermissionError(13, "Permission denied", "/x"),
            "quantbench: read or write: /x (Permission denied); expected",
        ),
        (OSError("no number: a bug"), None),
        (KeyError("a bug"), None),
    ):
        monkeypatch.setattr("quantbench.device.current", Mock(side_effect=error))
        with pytest.raises(type(error) if said is None else SystemExit):
            main()
        assert capsys.readouterr().err.startswith(said or "")


def quantbench(
    *words: str, stdout: object = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "quantbench", *words],
        stdout=stdout, stderr=subprocess.PIPE, env={**os.environ, **environment}, check=False,
    )  # type: ignore[call-overload,no-any-return]  # fmt: skip


@pytest.mark.slow
def test_an_output_without_room_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = quantbench("predict", "--gpu", "a100", "--dim", "n=64", stdout=full)
    assert done.returncode == 2
    assert done.stderr.decode() == (
        "quantbench: write output: standard output (No space left on device); expected an output with room in it\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_without_unicode_gets_what_is_nearest(encoding: str) -> None:
    done = quantbench("predict", "--gpu", "a100", "--dim", "n=64,128", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (" us " if encoding == "ascii" else " µs ") in done.stdout.decode(encoding)
    done = quantbench("report", "/proc/\u0431", PYTHONIOENCODING=encoding)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert b"/proc/\\u0431" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--dim", "hidden=1:2000000000:1"),
            "(2,000,000,000 values); expected at most 100,000 values",
        ),
        (
            ("--dim", "hidden=1:99999:1,1:2000000000:1"),
            "(2,000,099,999 values); expected at most 100,000 values",
        ),
        (
            ("--dim", "m=1:100000:1", "--dim", "n=1:100000:1"),
            "10,000,000,000 places in the grid of m, n; expected at most",
        ),
        (
            ("--dim", "n=1,2147483647@edges"),
            "@edges over 268,435,455 sizes from 1 to 2147483647; expected at most",
        ),
        (("--dim", "n=" + "9" * 5000), "expected start:stop[:step] or an integer"),
    ],
)
@pytest.mark.parametrize(
    "command", [("predict",), ("sweep", "--dry-run")], ids=lambda command: command[0]
)
def test_ranges_are_counted_before_they_are_listed(
    command: tuple[str, ...],
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(QuantbenchError) as caught:
            CliRunner().invoke(app, [*command, "--gpu", "a100", *words], catch_exceptions=False)
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said in str(caught.value)
    assert most_bytes < 2**27


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own:NoRun", "a class without unsupported, prepare"),
        ("own:WithArguments", "expected a class that is made without arguments"),
        ("own:function", "(a function); expected a class with unsupported"),
        ("own:Missing", "module 'own' has no attribute 'Missing'"),
        ("broken:X", "boom [/b]"),
    ],
)
def test_a_provider_that_is_none_is_refused_before_a_run_is_made(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    methods = "".join(
        f"    {method} = print\n" for method in ("unsupported", "prepare", "tolerance")
    )
    own = f"class NoRun: pass\ndef function(): pass\nclass WithArguments:\n    def __init__(self, x): pass\n{methods}"
    (tmp_path / "own.py").write_text(own, encoding="utf-8")
    (tmp_path / "broken.py").write_text("raise ValueError('boom [/b]')\n", encoding="utf-8")
    with pytest.raises(QuantbenchError) as caught:
        CliRunner().invoke(
            app, ["sweep", "--dim", "n=64", "--provider", name], catch_exceptions=False
        )
    assert said in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "results").exists()


def test_training_logs_named_absolutely_and_relatively_are_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = " iteration {}/ 9 | elapsed time per iteration (ms): 1234.5 | global batch size: 64 | lm loss: 1.0E+01 |\n"
    for name in ("one.log", "two.log"):
        (tmp_path / name).write_text("".join(line.format(n) for n in range(1, 4)), encoding="utf-8")
    said = (
        CliRunner()
        .invoke(app, ["import", "megatron-log", "one.log", "two.log", "--gpu", "a100-sxm4-80gb"])
        .output
    )
    folders = said.strip().splitlines()[-1].removeprefix("Next: quantbench report ").split()
    assert len(folders) == 2
    said = (
        CliRunner()
        .invoke(app, ["report", folders[0], str(tmp_path / folders[1])], catch_exceptions=False)
        .output
    )
    assert "import them with --gpus, --seq" in said
    assert said.endswith("report.html\n")


def test_a_table_faster_than_its_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Microseconds taken for nanoseconds: no hardware is that fast, whatever the user says of the
    units.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "times.csv").write_text("M,N,K,t\n4096,4096,4096,500\n", encoding="utf-8")
    words = ["import", "csv", "times.csv", "--gpu", "a100-sxm4-80gb", "--dtype", "bf16"]
    words += ["--map", "m=M,n=N,k=K,latency=t:ns"]
    with pytest.raises(
        QuantbenchError, match=r"median time is 1/[0-9,]+ of what a100-sxm4-80gb should take"
    ):
        CliRunner().invoke(app, words, catch_exceptions=False)
    with pytest.raises(
        QuantbenchError, match=r"all 1 figures are above the peak of a100-sxm4-80gb"
    ):
        CliRunner().invoke(app, [*words, "--units-are-right"], catch_exceptions=False)
    assert not (tmp_path / "results").exists()


def test_brackets_in_a_name_are_no_markup() -> None:
    words = [
        "sweep",
        "--dim",
        "n=64",
        "-m",
        "64",
        "-k",
        "64",
        "--provider",
        "[/b]:X",
        "--gpu",
        "a100",
        "--dry-run",
    ]
    assert (
        "  [/b]:X  gemm 64×64×64 " in CliRunner().invoke(app, words, catch_exceptions=False).output
    )
