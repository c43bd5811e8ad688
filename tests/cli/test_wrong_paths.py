"""Every command that reads a file, given the wrong kind of path: one line, exit code 2, no reading
and no waiting.
"""

from __future__ import annotations

import ast
import gzip
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quantbench import files
from quantbench.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("-m", "64", "-n", "64", "--gpu", "a100-sxm4-80gb")
PLAN = ("plan", "--gpus", "8", "--gbs", "64", "--gpu", "a100-sxm4-80gb")
NOBODY = 65534

#: words of every command that reads a file; PATH stands for the file or folder
COMMANDS = {
    "sweep --shapes": ("sweep", "--shapes", "PATH"),
    "sweep --config": ("sweep", "--dim", "hidden", "--config", "PATH"),
    "sweep --resume": ("sweep", "--resume", "PATH"),
    "predict --config": ("predict", "--gpu", "a100-sxm4-80gb", "--dim", "hidden=1024", "--config", "PATH"),
    "advise --config": ("advise", "--gpu", "a100-sxm4-80gb", "--config", "PATH"),
    "explore --config": ("explore", "--config", "PATH"),
    "explore --profile": ("explore", "--profile", "PATH"),
    "advise --profile": ("advise", "--hidden", "1024", "--heads", "8", "--profile", "PATH"),
    "plan --config": (*PLAN, "--config", "PATH"),
    "plan --profile": (*PLAN, "--model", "bloom-176b", "--profile", "PATH"),
    "plan --site": (*PLAN, "--model", "bloom-176b", "--site", "PATH"),
    "plan --fit": ("plan", "--gpu", "a100-sxm4-80gb", "--fit", "PATH"),
    "plan --rows": (*PLAN, "--rows", "PATH"),
    "plan --rows --check": (*PLAN, "--rows", "PATH", "--check"),
    "check": ("check", "PATH"),
    "compare A": ("compare", "PATH", "."),
    "report": ("report", "PATH"),
    "report two": ("report", "PATH", "PATH"),
    "merge": ("merge", "PATH", "-o", "merged"),
    "profile export": ("profile", "export", "PATH"),
    "profile export --format": ("profile", "export", "PATH", "--format", "csv"),
    "profile show": ("profile", "show", "PATH"),
    "profile query": ("profile", "query", "PATH", "--gemm", "64,64,64"),
    "profile blindspots": ("profile", "blindspots", "PATH"),
    "import csv": ("import", "csv", "PATH", "--gpu", "a100", "--map", "m=M,n=N,k=K,latency=t:ms", "--dtype", "bf16"),
    "import megatron-log": ("import", "megatron-log", "PATH", "--gpu", "a100-sxm4-80gb"),
    "import aiconfigurator": ("import", "aiconfigurator", "--system", "a100_sxm", "--root", "PATH"),
}  # fmt: skip
#: and of those that write one
WRITERS = {
    "sweep --results": ("sweep", "--dim", "n=64", "--results", "PATH"),
    "advise --junit": ("advise", "--gpu", "a100", "--hidden", "1024", "--heads", "8", "--junit", "PATH"),
    "profile export -o": ("profile", "export", ".", "-o", "PATH"),
}  # fmt: skip


def call(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The exit code of the command line, as a shell would start it. A hang ends after a minute."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"quantbench {' '.join(words)} waits for ever")

    monkeypatch.setattr(sys, "argv", ["quantbench", *words])
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(60)
    try:
        main()
    except SystemExit as end:
        return end.code
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return 0


def require_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    code = call(words, monkeypatch)
    said = capsys.readouterr().err
    lines = said.splitlines()
    assert (code, len(lines)) == (2, 1), said
    assert lines[0].startswith("quantbench: ")
    assert lines[0].isprintable()
    assert "Traceback" not in said
    return lines[0]


def missing(folder: Path) -> str:
    return str(folder / "nothing")


def directory(folder: Path) -> str:
    (folder / "empty").mkdir()
    return str(folder / "empty")


def pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def device(folder: Path) -> str:
    return "/dev/zero"


def long_name(folder: Path) -> str:
    return str(folder / ("a" * 300))


def nul_byte(folder: Path) -> str:
    return str(folder / "a\0b")


def empty_file(folder: Path) -> str:
    (folder / "empty-file").write_bytes(b"")
    return str(folder / "empty-file")


def junk(folder: Path) -> str:
    (folder / "junk").write_bytes(bytes(range(256)) * 64)
    return str(folder / "junk")


def escapes(folder: Path) -> str:
    return str(folder / "a\x1b[31m\nb[/v2]")


def huge_file(folder: Path) -> str:
    with (folder / "huge").open("wb") as file:
        file.truncate(2**40)  # sparse: it takes no room
    return str(folder / "huge")


KINDS = (
    missing,
    directory,
    pipe,
    device,
    long_name,
    nul_byte,
    empty_file,
    junk,
    escapes,
    huge_file,
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_path_is_one_line(
    name: str,
    kind: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = kind(tmp_path)  # type: ignore[operator]
    before = sorted(tmp_path.rglob("*"))
    require_refused(
        [path if word == "PATH" else word for word in COMMANDS[name]], monkeypatch, capsys
    )
    assert sorted(tmp_path.rglob("*")) == before  # nothing is left behind


@pytest.mark.parametrize("kind", [long_name, nul_byte], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", WRITERS)
def test_a_name_that_cannot_be_written_is_one_line(
    name: str,
    kind: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = kind(tmp_path)  # type: ignore[operator]
    require_refused([word.replace("PATH", path) for word in WRITERS[name]], monkeypatch, capsys)


#: what makes a folder a run, or a profile with tables beside it, as far as the names of its files
#: go
INSIDE = {
    "check": ("check", "run.json"),
    "report": ("report", "run.json"),
    "report of a log": ("report", "training.json"),
    "merge": ("merge", "run.json"),
    "sweep --resume": ("sweep --resume", "run.json"),
    "profile export": ("profile export", "run.json"),
    "advise --config": ("advise --config", "config.json"),
    "profile show": ("profile show", "profile.json"),
}


@pytest.mark.parametrize("kind", [pipe, device, huge_file, junk], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", INSIDE)
def test_a_folder_whose_file_is_none_is_one_line(
    name: str,
    kind: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command, file = INSIDE[name]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / file).symlink_to(kind(tmp_path))  # type: ignore[operator]
    require_refused(
        ["run" if word == "PATH" else word for word in COMMANDS[command]], monkeypatch, capsys
    )


@contextmanager
def without_rights(folder: Path) -> Iterator[None]:
    """Nobody may enter the folder meanwhile; root has to become somebody else for that."""
    if os.geteuid():
        folder.chmod(0)
        yield
        folder.chmod(stat.S_IRWXU)
        return
    folder.chmod(stat.S_IRWXU)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_may_not_be_entered_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = tmp_path / "locked" / "run"
    inside.mkdir(parents=True)
    (inside / "run.json").write_text("{}", encoding="utf-8")
    words = [str(inside) if word == "PATH" else word for word in COMMANDS[name]]
    call(words, monkeypatch)  # imports what it needs: that may lie where nobody else may read
    capsys.readouterr()
    monkeypatch.chdir("/")
    with without_rights(tmp_path / "locked"):
        require_refused(words, monkeypatch, capsys)


def test_an_unpacked_file_has_an_end_too(tmp_path: Path) -> None:
    packed = tmp_path / "t.csv.gz"
    with gzip.open(packed, "wb") as file:
        file.write(bytes(2**20))
    with (
        files.open_unpacked(packed, most_bytes=2**16) as unpacked,
        pytest.raises(OSError, match="unpacked") as caught,
    ):
        unpacked.read()
    assert files.reason(caught.value) == "unpacked, more than the 64.0 KiB that are read"
    with files.open_unpacked(packed, most_bytes=2**20) as unpacked:
        assert unpacked.read() == bytes(2**20)


#: modules whose files come with the package or the system, or are made by the program itself
OWN_FILES = (
    "files.py", "__init__.py", "cluster/ray_sweep.py", "comm/isolation.py", "device/", "latency/",
    "planner/", "providers/identity.py", "report/content.py", "report/page.py",
    "workload/presets.py",
)  # fmt: skip
#: methods of Path that wait for pipes, read devices, or raise for folders that may not be entered
UNGUARDED = ("read_text", "read_bytes", "exists", "is_file", "is_dir", "read_table")


@pytest.mark.slow
def test_files_that_somebody_names_are_opened_in_one_place() -> None:
    package = ROOT / "quantbench"
    found = [
        f"{path.relative_to(package)}:{node.lineno}: {node.func.attr}"
        for path in sorted(package.rglob("*.py"))
        if not str(path.relative_to(package)).startswith(OWN_FILES)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in UNGUARDED
        and not (isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "path")  # os.path never raises
    ]  # fmt: skip
    assert found == []
