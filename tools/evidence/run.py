"""Runs one of the three commands that measure a GPU, so that it can be cut off at any moment (docs/evidence.md).

Entry point: `python -m tools.evidence.run a|b|c --copy-to FOLDER`. Each part of `plan` is a process with a time limit.
state.json names a part before it starts; results are packed after every part and every minute. Run again, a command
continues from its folder, or from the packed file where only that is left.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from quantbench.store.folder import find_runs
from quantbench.store.run import read_run_info
from tools.evidence.plan import COMMANDS, ON_CPU, Part, write_shapes
from tools.evidence.side_by_side import write_json

# Time of a sweep besides its budget: loading torch, creating contexts, the table and the plot; compiling our kernels.
_SWEEP_OVERHEAD_S, _COMPILING_S = 15.0, 15.0
# With less time than this, a part measures nothing.
_LEAST_S = 20.0
# A part that is stopped gets this long to write what it has; then it is killed.
_STOP_S = 4.0
# Files larger than this may not be copied out where `--copy-to` is a folder with limits.
_LARGEST_BYTES = 16 * 2**20
_TEST_PROCESSES = 12


def main(
    command: Annotated[str, typer.Argument(help="a, b or c.")],
    copy_to: Annotated[Path | None, typer.Option(help="Folder that the packed results are copied to.")] = None,
    work: Annotated[Path, typer.Option(help="Folder of the unpacked results.")] = Path("build/evidence"),
    seconds: Annotated[float, typer.Option(min=0, help="Limit of the command; 0 for its own.")] = 0,
    only: Annotated[str, typer.Option(help="Run this part alone.")] = "",
    pack_every: Annotated[float, typer.Option(min=1, help="Seconds between two packings.")] = 60,
    on_cpu: Annotated[bool, typer.Option(help="Try the command on the CPU: its sweeps alone, and small.")] = False,
) -> None:
    """Runs the missing parts of a command within its time."""
    start_s = time.monotonic()
    if command not in COMMANDS:
        sys.exit(f"evidence: {command!r}; expected one of {', '.join(COMMANDS)}")
    parts = tuple(part for part in COMMANDS[command] if only in ("", part.name) and (part.is_sweep or not on_cpu))
    if not parts:
        found = f"--only {only}" if only else "--on-cpu, where it has no part"
        sys.exit(f"evidence: {command} {found}; expected one of {', '.join(part.name for part in COMMANDS[command])}")
    device = _device()
    if device["kind"] != "cuda" and not on_cpu:
        sys.exit(f"evidence: the device is {device['name']}; expected a CUDA GPU (or --on-cpu, to try the command)")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    limit_s = seconds or sum(part.seconds for part in COMMANDS[command])
    running = Running(work / command, copy_to, parts, start_s, limit_s, pack_every, on_cpu)
    running.open(device)
    try:
        running.run_parts()
        running.run_parts()  # what failed or was stopped early gets the time that is left
    finally:
        running.pack()
    missing = ", ".join(part.name for part in parts if not running.done(part))
    rest = f"; run it again to finish {missing}" if missing else ", complete"
    print(f"{command}: {time.monotonic() - start_s:.0f} s{rest}")


def _device() -> dict[str, Any]:
    """Asks for the device in another process, so that this one has no context on it."""
    words = [sys.executable, "-m", "quantbench", "devices", "--json"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        sys.exit(f"evidence: quantbench devices: {(found.stderr.strip().splitlines() or ['no answer'])[-1]}")
    device: dict[str, Any] = json.loads(found.stdout)["device"]
    return device


def extract(packed: Path, folder: str) -> None:
    """Extracts a packed file, without links that leave the folder where Python can refuse them."""
    with tarfile.open(packed) as archive:
        # Python 3.11.4 brought the filter; as the standard library's documentation says it.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(folder)


@dataclass
class Running:
    """One start of a command.

    folder: its results, one subfolder per sweep. copy_to: folder for the packed file, None for none. start_s: its start
    on the monotonic clock. limit_s: its time. pack_every_s: time between two packings.
    """

    folder: Path
    copy_to: Path | None
    parts: tuple[Part, ...]
    start_s: float
    limit_s: float
    pack_every_s: float
    on_cpu: bool

    def open(self, device: dict[str, Any]) -> None:
        """Reads the state of earlier starts, from the packed file if the folder is gone."""
        packed = self.copy_to / self.packed_name if self.copy_to else None
        if not self.folder.exists() and packed and packed.exists():
            with tempfile.TemporaryDirectory(dir=_made(self.folder.parent)) as name:
                extract(packed, name)
                os.replace(Path(name) / self.folder.name, self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "state.json"
        self.state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if self.state.setdefault("device", device["name"]) != device["name"]:
            sys.exit(f"evidence: {self.folder} is from {self.state['device']}; expected {device['name']}")
        write_shapes(self.folder)

    @property
    def packed_name(self) -> str:
        """Name of the file with all results of the command."""
        return f"evidence-{self.folder.name}.tar.gz"

    def done(self, part: Part) -> bool:
        """Returns whether nothing of the part is missing."""
        return bool(self.state.get(part.name, {}).get("how_ended") == "complete")

    def run_parts(self) -> None:
        """Runs the parts that are not complete; each also gets the time that those before it left over."""
        scale = min(1.0, self.limit_s / sum(part.seconds for part in self.parts))
        missing = [part for part in self.parts if not self.done(part)]
        for number, part in enumerate(missing):
            left_s = self.limit_s - (time.monotonic() - self.start_s) - _STOP_S
            later_s = scale * sum(later.seconds for later in missing[number + 1 :])
            limit_s = min(left_s, max(scale * part.seconds, left_s - later_s))
            if limit_s < _LEAST_S:
                continue
            self._keep(part, "started")
            began_s = time.monotonic()
            how = self._sweep(part, limit_s) if part.is_sweep else self._other(part, limit_s)
            self._keep(part, how)
            self.pack()
            print(f"{part.name}: {how} after {time.monotonic() - began_s:.0f} s", flush=True)

    def _keep(self, part: Part, how: str) -> None:
        self.state[part.name] = {"how_ended": how}
        write_json(self.folder / "state.json", self.state)

    def _sweep(self, part: Part, limit_s: float) -> str:
        """Starts a sweep, or resumes its run. Returns how it ended."""
        home = self.folder / part.name
        compiling_s = _COMPILING_S if any("triton" in word for word in part.words) else 0.0
        budget_s = max(limit_s - _SWEEP_OVERHEAD_S - compiling_s, 3.0)
        words = [*(part.words[:2] + ON_CPU if self.on_cpu else part.words), "--results", str(home)]
        run = next(find_runs(home), None)
        if run is not None:
            words = [*part.words[:2], "--resume", str(run)]
        code = self._child((*words, "--budget", f"{budget_s:.0f}s"), part, limit_s)
        run = next(find_runs(home), None)
        # Exit code 1: nothing could be measured, and the records say why.
        if run is None or code not in (None, 0, 1):
            return f"failed with exit code {code}"
        how = read_run_info(run).how_ended
        return "interrupted" if how == "running" else how

    def _other(self, part: Part, limit_s: float) -> str:
        words, tests = part.words, part.words[0] == "pytest"
        if tests and "not gpu_timing" in part.words[-1] and find_spec("xdist"):
            words = (*words, "-n", str(_TEST_PROCESSES), "--dist", "worksteal")
        code = self._child(words, part, limit_s)
        if code is None:
            return "stopped at its time limit"
        # pytest's exit code 1: tests failed, and the log says which.
        return "complete" if code == 0 or (tests and code == 1) else f"failed with exit code {code}"

    def _child(self, words: tuple[str, ...], part: Part, limit_s: float) -> int | None:
        """Runs `python -m words…`. Returns its exit code, None if it was stopped at its limit.

        It stays in this process group, so that whatever ends this command ends the child too.
        """
        filled = [sys.executable, "-m", *(word.replace("{folder}", str(self.folder)) for word in words)]
        end_s = time.monotonic() + limit_s
        with (
            (self.folder / f"{part.name}.log").open("ab") as log,
            subprocess.Popen(filled, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as child,
        ):
            try:
                while (left_s := end_s - time.monotonic()) > 0:
                    with suppress(subprocess.TimeoutExpired):
                        return child.wait(min(left_s, self.pack_every_s))
                    self.pack()
                child.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_STOP_S)
                return None
            finally:
                if child.poll() is None:
                    for process in [*psutil.Process(child.pid).children(recursive=True), child]:
                        with suppress(psutil.NoSuchProcess):
                            process.kill()

    def pack(self) -> None:
        """Packs the folder, and copies the packed file; each replaces the last one in one step."""
        packed = self.folder.parent / self.packed_name
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            for file in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                with suppress(FileNotFoundError):  # a sweep removes the folder of a run without records
                    data = file.read_bytes()
                    entry = tarfile.TarInfo(str(file.relative_to(self.folder.parent)))
                    entry.size, entry.mtime = len(data), int(time.time())
                    archive.addfile(entry, io.BytesIO(data))
        for path in (packed, *([self.copy_to / packed.name] if self.copy_to else ())):
            try:
                temporary = _made(path.parent) / f"{packed.name}.tmp"
                temporary.write_bytes(content.getvalue())
                os.replace(temporary, path)
            except OSError as error:  # measuring goes on
                print(f"{path} ({error.strerror}): not packed", flush=True)
        if len(content.getvalue()) > _LARGEST_BYTES:
            print(f"{packed.name} is {len(content.getvalue()) / 2**20:.0f} MiB, which may be too large to copy out")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    typer.run(main)
