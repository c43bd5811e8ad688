"""Every command that reads a file, given the wrong kind of path: one line, exit code 2, no reading
and no waiting.
"""

from __future__ import annotations

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

PLAN = "plan --gpus 8 --gbs 64 --gpu a100-sxm4-80gb"
NOBODY = 65534

#: words of every command that reads a file; PATH stands for the file or folder
COMMANDS = (
    "sweep --shapes PATH",
    "sweep --dim hidden --config PATH",
    "sweep --resume PATH",
    "predict --gpu a100-sxm4-80gb --dim hidden=1024 --config PATH",
    "advise --gpu a100-sxm4-80gb --config PATH",
    "explore --config PATH",
    "explore --profile PATH",
    "advise --hidden 1024 --heads 8 --profile PATH",
    f"{PLAN} --config PATH",
    f"{PLAN} --model bloom-176b --profile PATH",
    f"{PLAN} --model bloom-176b --site PATH",
    "plan --gpu a100-sxm4-80gb --fit PATH",
    f"{PLAN} --rows PATH",
    "check PATH",
    "compare PATH .",
    "report PATH",
    "merge PATH -o merged",
    "profile export PATH",
    "profile export PATH --format csv",
    "profile show PATH",
    "profile query PATH --gemm 64,64,64",
    "profile blindspots PATH",
    "import csv PATH --gpu a100 --map m=M,n=N,k=K,latency=t:ms --dtype bf16",
    "import megatron-log PATH --gpu a100-sxm4-80gb",
    "import aiconfigurator --system a100_sxm --root PATH",
)  # fmt: skip
#: and of those that write one
WRITERS = (
    "sweep --dim n=64 --results PATH",
    "profile export . -o PATH",
)  # fmt: skip


def call(words: str, path: object, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The exit code of the command line, as a shell would start it. A hang ends after a minute."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"quantbench {words} waits for ever")

    typed = [word.replace("PATH", str(path)) for word in words.split()]
    monkeypatch.setattr(sys, "argv", ["quantbench", *typed])
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
    words: str, path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    code = call(words, path, monkeypatch)
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
@pytest.mark.parametrize("words", COMMANDS)
def test_a_wrong_path_is_one_line(
    words: str,
    kind: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = kind(tmp_path)  # type: ignore[operator]
    before = sorted(tmp_path.rglob("*"))
    require_refused(words, path, monkeypatch, capsys)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is left behind


@pytest.mark.parametrize("kind", [long_name, nul_byte], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("words", WRITERS)
def test_a_name_that_cannot_be_written_is_one_line(
    words: str,
    kind: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = kind(tmp_path)  # type: ignore[operator]
    require_refused(words, path, monkeypatch, capsys)


#: what makes a folder a run, or a profile with tables beside it, as far as the names of its files
#: go
INSIDE = (
    ("check PATH", "run.json"),
    ("report PATH", "run.json"),
    ("merge PATH -o merged", "run.json"),
    ("sweep --resume PATH", "run.json"),
    ("profile export PATH", "run.json"),
    ("advise --gpu a100 --config PATH", "config.json"),
    ("profile show PATH", "profile.json"),
)


@pytest.mark.parametrize("kind", [pipe, device, huge_file, junk], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("words", "file"), INSIDE)
def test_a_folder_whose_file_is_none_is_one_line(
    words: str,
    file: str,
    kind: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / file).symlink_to(kind(tmp_path))  # type: ignore[operator]
    require_refused(words, "run", monkeypatch, capsys)


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
@pytest.mark.parametrize("words", COMMANDS)
def test_a_folder_that_may_not_be_entered_is_one_line(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = tmp_path / "locked" / "run"
    inside.mkdir(parents=True)
    (inside / "run.json").write_text("{}", encoding="utf-8")
    call(
        words, inside, monkeypatch
    )  # imports what it needs: that may lie where nobody else may read
    capsys.readouterr()
    monkeypatch.chdir("/")
    with without_rights(tmp_path / "locked"):
        require_refused(words, inside, monkeypatch, capsys)


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
