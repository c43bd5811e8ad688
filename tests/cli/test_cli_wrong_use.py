"""Words as somebody new might type them: one line says what is wrong with them, before anything is
computed.
"""

import os
import re
import shlex
import sys
import tracemalloc
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import TextIO
from unittest.mock import Mock

import pytest
from commands import refused, run

from quantbench.__main__ import main
from quantbench.latency.gemm.inputs import LARGEST_SIDE

SHELF = Path(__file__).resolve().parents[2] / "results"
SHELF_A100 = str(SHELF / "a100-sxm4-80gb")
PROFILE = str(SHELF / "a100-sxm4-80gb" / "profile.json")
TABLE = str(Path(__file__).resolve().parents[1] / "data" / "bloom_tables.csv")
PLAN = "plan --model bloom-176b --gpus 384 --gpu a100-sxm4-80gb --gbs 2048"
CSV = "--gpu a100-sxm4-80gb --map m=M,n=N,k=K,latency=t:ms --dtype bf16"
EXPERTS = "predict --gpu h100 --model deepseek-v3"
QUERY = f"profile query {PROFILE}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("check empty.csv", "read run: empty.csv is a file"),
        (f"profile export {PROFILE}", f"read run: {PROFILE} is a file"),
        (f"profile export {SHELF_A100}", f"read run: {SHELF_A100} holds no run"),
        (f"{QUERY} --gemm ²,1,1", "--gemm: '²,1,1'"),
        (f"{QUERY} --gemm {'9' * 5000},1,1", "--gemm: '999"),
        (f"{QUERY} --gemm 1,1,1 --direction up", "profile query: --direction = 'up'"),
        (
            f"{QUERY} --gemm 1,1,1 --direction backward",
            "profile query: --direction backward without effect",
        ),
        (f"{QUERY} --softmax 1,1,1 --layout nn", "profile query: --layout nn without effect"),
        (f"{QUERY} --gemm 1,1,1 --library aiter", "profile.gemm: provider = 'aiter'"),
        (
            f"profile export {PROFILE} --format csv --provider me",
            "profile export: --provider me: no row has this provider",
        ),
        (
            f"profile export {PROFILE} --format calculon --tp 4",
            "profile export: --tp 4 without effect",
        ),
        (
            f"profile export {PROFILE} --provider torch",
            "profile export: a planner's option without --format",
        ),
        (f"{PLAN} --tp ²", "--tp: '²'"),
        (f"{PLAN} --zero 9", "--zero: '9'"),
        (f"{PLAN} --link-gb-per-s inf", "plan: --link-gb-per-s inf"),
        (f"{PLAN} --rows {TABLE}", "plan --rows: --model bloom-176b"),
        (f"{PLAN} --check", "plan --check: no --tp"),
        ("plan --fit a.csv --check", "plan: --check with --fit"),
        ("plan --rows a.csv --check", "plan: --check with --rows"),
        ("predict --gpu a100 --dim m=64 --gated", "predict: --gated with --dim m"),
        ("predict --gpu a100 --dim m=64 --attention flash", "predict: --attention flash with"),
        ("predict --gpu a100 --dim hidden=1024 -m 64", "predict: --m 64 with --dim hidden"),
        ("predict --gpu a100 --dim hidden=2147483647", "predict: ffn = 8589934588"),
        ("predict --gpu a100 --dim hidden=1024 --ops ,", "--ops: ','"),
        (
            "predict --gpu v100s-pcie-32gb --dim hidden --dtype bf16",
            "predict: --dtype bf16 on v100s",
        ),
        (f"{EXPERTS} --dim tokens=4096 --seq 2048", "predict: --seq 2048 with tokens"),
        (f"{EXPERTS} --dim tokens=4096 --ops experts_up", "predict: --ops experts_up"),
        (f"{EXPERTS} --dim ep=3,5,7", "predict: experts = 256 with ep = 3"),
        (f"import csv empty.csv {CSV}", "import csv: empty.csv has no column 'M'"),
        (
            "sweep --dim n=64 --provider torch,no.module:Class",
            "provider: 'no.module:Class' (no module named 'no')",
        ),
        ("sweep --dim n=64 --provider os:", "provider: 'os:'"),
        ("sweep --dim n=1:4294967296:1000000000", "--dim n: '1:4294967296:1000000000'"),
        ("sweep --dim n --provider cublas", "provider: 'cublas'"),
        ("sweep --dim n --cache warm", "TimingOptions: cache = 'warm'"),
        ("sweep --dim hidden --dtype fp13", "--dtype: dtype = 'fp13'"),
        ("sweep --seq 128", "sweep: no --dim beside --seq"),
        ("sweep --dim n=64 --dropout", "sweep: --dropout with --dim n"),
        ("sweep --dim n=64 --results empty.csv", "--results: empty.csv (File exists)"),
        ("sweep --dim m=64 --dry-run --resume run", "sweep: --dry-run with --resume run"),
        ("sweep --resume run --tp 8", "sweep: --resume run with --tp 8"),
        (
            f"explore --gpu a100 --profile {PROFILE}",
            f"explore: --gpu a100 and --profile {PROFILE}",
        ),
        ("explore --model ''", "explore: --model ''"),
        ("check --experiment k-8 --budget 5", "--budget: '5'"),
        ("check --experiment k-8 --results empty.csv", "--results: empty.csv (File exists)"),
        ("check run --budget 8m", "check: --budget 8m with a run"),
    ],
)
def test_wrong_use_is_one_line(words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    error = refused(words)
    assert f"{error.operation}: {error.value}".startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.csv"]


@pytest.mark.parametrize(
    "words",
    [
        "advise --model gpt2-xl",
        "plan --model bloom-176b --gpus 8 --gbs 8",
        "predict --dim m=512",
        "sweep --dim m=512 --dry-run",
        "import csv empty.csv --map m=M,n=N,k=K,latency=t:ms --dtype bf16",
        "import aiconfigurator --system b60",
        "import megatron-log empty.csv",
    ],
)
def test_every_command_knows_gpus_by_the_same_names(words: str) -> None:
    error = refused(f"{words} --gpu rtx-6000")
    assert error.value == "'rtx-6000'"
    assert "one of rtx-6000-ada-48gb, rtx-pro-6000-96gb" in error.expected


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("", "no --dim"),
        ("-n 64 -k 64", "no --dim beside --n, --k"),
        ("--dim n=1:2 -n 5", "--dim n=1:2 and --n 5"),
        ("--dim n --dim n", "--dim n twice"),
        ("--dim n --dim hidden", "--dim n --dim hidden"),
        ("--dim n --hidden 64", "--hidden 64 with --dim n"),
        ("--dim hidden --model gpt2-xl --config x", "--model gpt2-xl and --config x"),
        ("--dim hidden=4096 --tp 3", "hidden = 4096 with tp = 3"),
        (
            "--dim hidden=4096 --head-dim 96 --ops attention",
            "hidden = 4096 with head_dim = 96",
        ),
    ],
)
@pytest.mark.parametrize("command", ["predict", "sweep --dry-run"])
def test_wrong_axes_are_said_in_the_name_of_the_command(
    command: str, words: str, value: str
) -> None:
    error = refused(f"{command} --gpu a100 {words}")
    assert (error.operation, error.value) == (command.split()[0], value)


@pytest.mark.parametrize(
    "words",
    [
        "predict --gpu a100 --dim n=4194304 -m 64 -k 32",
        f"{QUERY} --gemm 64,4194304,32",
    ],
)
def test_products_beyond_the_models_are_refused_alike(words: str) -> None:
    error = refused(words)
    assert (error.operation, error.value) == ("product 64×4194304×32", "n = 4194304")
    assert f"at most {LARGEST_SIDE}" in error.expected


def test_sizes_that_a_prediction_leaves_out_are_said_in_its_name() -> None:
    said = run("predict --gpu a100 --dim hidden=4096,4100 --tp 8")
    assert "left out at 1 size, the first: predict: hidden = 4100 with tp = 8" in said


def test_the_sweep_that_measures_a_prediction_is_said_in_full() -> None:
    words = "--dim n=64:128:64 --m 64 --k 96 --layout tn --dtype fp16"
    said = run(f"predict --gpu a100 {words}")
    assert f"measure it: quantbench sweep {words}\n" in said


@pytest.mark.parametrize(
    "words",
    [
        "--hidden 14400 --heads 96 --tp 8",
        "--model llama-3-8b --tp 2 --attention flash --top 0",
    ],
)
def test_the_sweep_that_advice_ends_with_can_be_planned(words: str, tmp_path: Path) -> None:
    said = run(f"advise --gpu a100 {words} -o {tmp_path / 'shapes.json'}")
    following = said.splitlines()[-1].partition(": quantbench ")[2]
    planned = run(f"{following} --gpu a100 --dry-run")
    assert "points, about" in planned
    if "llama-3-8b" in words:
        assert "×14336×" in planned or "×7168×" in planned


def test_an_answer_is_in_the_unit_that_reads_best() -> None:
    said = run(f"profile query {PROFILE} --gemm 65536,65536,65536")
    assert re.search(r" 2\.[0-9]+ s +2\.[0-9]+ s to 2\.[0-9]+ s ", said)
    assert "e+0" not in said


def ended(words: str, stdout: TextIO, monkeypatch: pytest.MonkeyPatch) -> object:
    """Returns the exit code of the program that writes to `stdout`."""
    monkeypatch.setattr(sys, "argv", ["quantbench", *shlex.split(words)])
    monkeypatch.setattr(sys, "stdout", stdout)
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0


def test_a_closed_pipe_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 says that something was found; `| head -1` must not. Nor may a gate that nobody
    read have passed.
    """
    reader, writer = os.pipe()
    os.close(reader)
    said = StringIO()
    said.close = lambda: None  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", said)
    words = "advise --hidden 14400 --heads 96 --tp 8 --gpu a100-sxm4-80gb --top 0"
    with os.fdopen(writer, "w", encoding="utf-8") as pipe:
        assert (ended(words, pipe, monkeypatch), said.getvalue()) == (141, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("foo", "command line: no such command 'foo'"),
        ("sweep --foo", "sweep: no such option: --foo"),
        ("plan --gpus 0", "plan: invalid value for '--gpus'"),
        ("advise --hidden 4k", "advise: invalid value for '--hidden': '4k'"),
        (f"advise --hidden {'9' * 5000}", "advise: invalid value for '--hidden'"),
        ("import csv", "import csv: missing argument"),
        ("predict --gpu a100 --dim n=1\x1b[31m", "--dim n: '1\\x1b[31m'; expected"),
        ("check a\0b", "command line: 'a\\x00b' with a NUL byte"),
    ],
)
def test_what_the_parser_refuses_is_one_line_too(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = StringIO()
    code = ended(words, shown, monkeypatch)
    err = capsys.readouterr().err
    assert (code, shown.getvalue(), len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"quantbench: {said}")


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


def test_an_output_without_room_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        assert ended("predict --gpu a100 --dim n=64", full, monkeypatch) == 2
    assert capsys.readouterr().err.startswith(
        "quantbench: write output: standard output (No space left on device)"
    )


@pytest.mark.parametrize(("encoding", "unit"), [("ascii", " us "), ("latin-1", " µs ")])
def test_an_output_without_unicode_gets_what_is_nearest(
    encoding: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = TextIOWrapper(BytesIO(), encoding)
    assert ended("predict --gpu a100 --dim n=64,128", shown, monkeypatch) == 0
    assert unit in shown.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    said = TextIOWrapper(BytesIO(), encoding)
    monkeypatch.setattr(sys, "stderr", said)
    assert ended("report /proc/\u0431", shown, monkeypatch) == 2
    assert b"/proc/\\u0431" in said.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--dim hidden=1:2000000000:1", "(2,000,000,000 values)"),
        ("--dim hidden=1:99999:1,1:2000000000:1", "(2,000,099,999 values)"),
        (
            "--dim m=1:100000:1 --dim n=1:100000:1",
            "10,000,000,000 places in the grid of m, n",
        ),
        ("--dim n=1,2147483647@edges", "@edges over 134,217,727 sizes from 1 to 2147483647"),
        (f"--dim n={'9' * 5000}", "'999"),
    ],
)
@pytest.mark.parametrize("command", ["predict", "sweep --dry-run"])
def test_ranges_are_counted_before_they_are_listed(command: str, words: str, said: str) -> None:
    tracemalloc.start()
    try:
        error = refused(f"{command} --gpu a100 {words}")
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said in error.value
    assert most_bytes < 2**27


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own:NoRun", "a class without unsupported, prepare"),
        ("own:WithArguments", "and is made without arguments"),
        ("own:function", "(a function); expected a class with unsupported"),
        ("own:Missing", "module 'own' has no attribute 'Missing'"),
        ("own:Flat", "'own:Flat' with tile = (64, 64); expected a quantbench.launch.Tile"),
        ("own.py:NoRun", "expected package.module:Class, as own:NoRun for own.py in this folder"),
        ("own:NoRun@64x64", "expected a tile for one of our kernels"),
        ("broken:X", "(ValueError: boom [/b] (broken.py, line 2))"),
        ("unclosed:X", "'unclosed:X' (SyntaxError: '(' was never closed (unclosed.py, line 1))"),
    ],
)
def test_a_provider_that_is_none_is_refused_before_a_run_is_made(
    name: str, said: str, tmp_path: Path
) -> None:
    methods = "    unsupported = prepare = print\n"
    own = f"class NoRun: pass\ndef function(): pass\nclass WithArguments:\n    def __init__(self, x): pass\n{methods}class Flat:\n    tile = 64, 64\n{methods}"
    (tmp_path / "own.py").write_text(own, encoding="utf-8")
    (tmp_path / "broken.py").write_text("\nraise ValueError('boom [/b]')\n", encoding="utf-8")
    (tmp_path / "unclosed.py").write_text("X = (\n", encoding="utf-8")
    assert said in str(refused(f"sweep --dim n=64 --provider torch --provider {name}"))
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # Brackets in a name are no markup.
        (
            "sweep --dim n=64 -m 64 -k 64 --provider [/b]:X --gpu a100 --dry-run",
            "'[/b]:X'; expected package.module:Class",
        ),
        (
            "advise --hidden 4096 --heads 32 --gpu h100 --experts 8",
            "experts = 8 without top_k or moe_ffn",
        ),
        ("profile export --gpu h100", "--gpu h100 without --format"),
        ("profile export --gpu h100 --format csv --grid no.csv", "--grid: no.csv (No such file"),
    ],
)
def test_errors_name_what_was_typed(words: str, said: str) -> None:
    assert said in str(refused(words))
