"""Every command that reads a file, given the wrong kind of path: one line, exit code 2, no reading
and no waiting.
"""

import gzip
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
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


Refuse = Callable[[str, object], None]


@pytest.fixture
def require_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Refuse:
    """A check that the command line ends with one line and exit code 2."""
    monkeypatch.chdir(tmp_path)

    def require(words: str, path: object) -> None:
        capsys.readouterr()
        code = call(words, path, monkeypatch)
        said = capsys.readouterr().err
        (line,) = said.splitlines()
        assert code == 2, said
        assert line.startswith("quantbench: ")
        assert line.isprintable()

    return require


def directory(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def file_of(folder: Path, content: bytes) -> Path:
    (folder / "junk").write_bytes(content)
    return folder / "junk"


def huge_file(folder: Path) -> Path:
    with (folder / "huge").open("wb") as file:
        file.truncate(2**40)  # sparse: it takes no room
    return folder / "huge"


KINDS: dict[str, Callable[[Path], object]] = {
    "missing": lambda folder: folder / "nothing",
    "directory": directory,
    "pipe": pipe,
    "device": lambda folder: "/dev/zero",
    "long name": lambda folder: folder / ("a" * 300),
    "NUL byte": lambda folder: folder / "a\0b",
    "empty file": lambda folder: file_of(folder, b""),
    "junk": lambda folder: file_of(folder, bytes(range(256)) * 64),
    "escapes": lambda folder: folder / "a\x1b[31m\nb[/v2]",
    "huge file": huge_file,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", COMMANDS)
def test_a_wrong_path_is_one_line(
    words: str, kind: str, tmp_path: Path, require_refused: Refuse
) -> None:
    path = KINDS[kind](tmp_path)
    before = sorted(tmp_path.rglob("*"))
    require_refused(words, path)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is left behind


@pytest.mark.parametrize("kind", ["long name", "NUL byte"])
@pytest.mark.parametrize("words", WRITERS)
def test_a_name_that_cannot_be_written_is_one_line(
    words: str, kind: str, tmp_path: Path, require_refused: Refuse
) -> None:
    require_refused(words, KINDS[kind](tmp_path))


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


@pytest.mark.parametrize("kind", ["pipe", "device", "huge file", "junk"])
@pytest.mark.parametrize(("words", "file"), INSIDE)
def test_a_folder_whose_file_is_none_is_one_line(
    words: str, file: str, kind: str, tmp_path: Path, require_refused: Refuse
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / file).symlink_to(KINDS[kind](tmp_path))
    require_refused(words, "run")


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
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, require_refused: Refuse
) -> None:
    inside = tmp_path / "locked" / "run"
    inside.mkdir(parents=True)
    (inside / "run.json").write_text("{}", encoding="utf-8")
    call(words, inside, monkeypatch)  # imports what it needs: where nobody else may read
    monkeypatch.chdir("/")
    with without_rights(tmp_path / "locked"):
        require_refused(words, inside)


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
