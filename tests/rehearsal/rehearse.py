"""Runs the commands of tools.evidence on a device double: kills them at random moments, starts them again, and checks
what they packed.

Entry points: `python tests/rehearsal/rehearse.py` (`make rehearsal`), the whole rehearsal; `rehearse`, one command, and
`false_cliffs`, one sweep, which the test suite runs in short. `device_double` says what is simulated. GPU tests cannot
run on the double: pytest is started and ends at once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import device_double

from quantbench.store.folder import find_runs, read_run
from quantbench.store.record import Failed, record_from_json
from quantbench.sweep.options import options_from_json, plan_sweep
from quantbench.workload import Gemm
from tools.evidence.plan import COMMANDS, RANDOM_SWEEP

ROOT = Path(__file__).resolve().parents[2]
KILLS = {"a": 4, "b": 9, "c": 7}
#: seconds of a start in which the longest sweep cannot be complete
SHORT_S = 27
# Rows of a complete table: sizes of the timers' comparison, shapes of the cost comparison.
_ROWS = {"timer-truth": 12, "timer-nvbench": 12, "cost": 50}


class Rehearsal:
    """One command on the double. folder: an empty folder for its results, its log and what is packed."""

    def __init__(self, folder: Path, command: str, seed: int = 0, only: str = "") -> None:
        self.command, self.work, self.out = command, folder / "work", folder / "out"
        self.parts = [part for part in COMMANDS[command] if only in ("", part.name)]
        self.deaths = folder / "deaths"
        self.deaths.mkdir(parents=True)
        self.asked_deaths = 0
        self._log = folder / "log"
        self._words = [command, "--copy-to", str(self.out), "--work", str(self.work), "--pack-every", "2"]
        self._words += ["--only", only] if only else []
        self._random = random.Random(f"{command} {seed}")
        self._packed: dict[str, bytes] = {}

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Starts the command in a process group of its own."""
        words = [sys.executable, "-m", "tools.evidence.run", *self._words, *more]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                words, cwd=ROOT, env=environment(self.deaths), stdout=log, stderr=log, start_new_session=True
            )

    def finish(self, *more: str) -> dict[str, str]:
        """Starts the command and waits for its end. Returns how each part ended."""
        code = self.start(*more).wait(timeout=900)
        assert code == 0, f"{self.command}: exit code {code}: {self._log.read_text()[-2000:]}"
        state = json.loads((self.work / self.command / "state.json").read_text())
        return {name: entry["how_ended"] for name, entry in state.items() if name != "device"}

    def kill_during(self, part: str, most_wait_s: float, *, death: bool, vanish: bool) -> None:
        """Starts the command and kills it at a random moment, at most `most_wait_s` after `part` began.

        death: a process loses its context. vanish: the disk is lost too, and only what was copied remains.
        """
        if death:
            (self.deaths / str(self.asked_deaths)).touch()
            self.asked_deaths += 1
        state = self.work / self.command / "state.json"
        while True:
            process = self.start()
            while process.poll() is None and (not state.exists() or part not in json.loads(state.read_text())):
                time.sleep(0.05)
            time.sleep(self._random.uniform(0.0, most_wait_s))
            if process.poll() is None:
                break
            # The command was complete before: it begins anew, and is killed earlier.
            assert process.returncode == 0, self._log.read_text()[-2000:]
            shutil.rmtree(self.work)
            shutil.rmtree(self.out)
            self._packed = {}
            most_wait_s /= 2
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.check_packed()
        if vanish:
            shutil.rmtree(self.work)

    def check_packed(self) -> dict[str, bytes]:
        """Reads the packed files; no whole line of an earlier one's records may be missing. Returns them by name."""
        packed = self.out / f"evidence-{self.command}.tar.gz"
        if not packed.exists():
            assert not self._packed, f"{packed} is gone"
            return {}
        found = {}
        with tarfile.open(packed) as archive:
            for entry in archive:
                file = archive.extractfile(entry)
                assert file is not None, f"{packed}: {entry.name} is no file"
                found[entry.name] = file.read()
        for name, before in self._packed.items():
            if name.endswith("records.jsonl"):
                whole = before[: before.rfind(b"\n") + 1]
                assert found.get(name, b"").startswith(whole), f"{name}: records that were packed before are gone"
        self._packed = found
        return found

    def check_complete(self) -> int:
        """Checks the packed result: every point of every sweep once, every table full. Returns the number of points."""
        found = self.check_packed()
        with tempfile.TemporaryDirectory() as name:
            for path, content in found.items():
                (Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
                (Path(name) / path).write_bytes(content)
            home = Path(name) / self.command
            for part in self.parts:
                if part.words[0].startswith("tools."):
                    self._check_table(part.name, json.loads((home / f"{part.name}.json").read_text()))
            return sum(self._check_sweep(home / part.name) for part in self.parts if part.is_sweep)

    def _check_table(self, name: str, table: dict[str, Any]) -> None:
        if name == "capture":
            rows = table["kernels"]
            assert len([row for row in rows if "error" in row]) <= self.asked_deaths
            assert len({(row["provider"], row["workload"]) for row in rows}) == len(rows) > 50
        elif name in _ROWS:
            assert len(table["rows"]) == _ROWS[name], f"{name}: {len(table['rows'])} rows"
            repeats = {len(us) for row in table["rows"] for us in row["medians_us"].values()}
            assert repeats <= {0, 3}, f"{name}: {repeats} repeats; expected 3, or 0 where a timer refuses"
        else:
            assert table["samples_us"], f"{name}: no samples"

    def _check_sweep(self, home: Path) -> int:
        (folder,) = find_runs(home)
        run = read_run(folder)
        assert not run.warnings, run.warnings
        assert run.info.how_ended == "complete", f"{folder}: {run.info.how_ended}"
        assert run.info.software["simulator"], "a simulated run that does not say so"
        _, plan = plan_sweep(options_from_json({**run.info.options, "budget_s": None}), run.info.device)
        points = [record for record in run.records if record.role == "point"]
        measured: set[str] = set()
        for line in (folder / "records.jsonl").read_text().splitlines():
            record = record_from_json(json.loads(line))
            if record.role == "point" and not isinstance(record.outcome, Failed):
                assert record.key not in measured, f"{home.name}: {record.workload} was measured twice"
                measured.add(record.key)
        assert {point.key for point in plan.points} == {point.key for point in points}, f"{home.name}: points are lost"
        failed = [point.outcome for point in points if isinstance(point.outcome, Failed)]
        assert len(failed) <= self.asked_deaths, f"{home.name}: {failed[0]}"
        assert all(outcome.message.startswith(device_double.LOST) for outcome in failed), failed
        return len(points)


def environment(deaths: Path | None = None, smooth: str = "") -> dict[str, str]:
    """Returns the environment in which the double stands for CUDA. deaths, smooth: see `device_double`."""
    path = os.pathsep.join(map(str, (Path(__file__).parent, ROOT / "tests", ROOT)))
    more = {"QUANTBENCH_REHEARSAL": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    more |= {device_double.DEATHS: str(deaths)} if deaths else {}
    more |= {device_double.SMOOTH: smooth} if smooth else {}
    return {name: value for name, value in os.environ.items() if name != "QUANTBENCH_DEVICE"} | more


def rehearse(folder: Path, command: str, kills: int, only: str = "", most_wait_s: float = 8.0) -> int:
    """Kills a command `kills` times, spread over its parts, then lets it finish. Returns the number of points.

    most_wait_s: longest time between the start of a part and the kill.
    """
    rehearsal = Rehearsal(folder, command, only=only)
    for number in range(kills):
        part = rehearsal.parts[number * len(rehearsal.parts) // kills].name
        rehearsal.kill_during(part, most_wait_s, death=number % 3 == 1, vanish=number % 3 == 2)
    for death in rehearsal.deaths.iterdir():  # a kill came first
        death.unlink()
    how = rehearsal.finish()
    assert all(how[part.name] == "complete" for part in rehearsal.parts), how
    return rehearsal.check_complete()


def false_cliffs(folder: Path, words: str, smooth: str = "") -> list[dict[str, Any]]:
    """Sweeps n (`words`: `n=…`), checks the run and returns the cliffs that are not in the truth.

    smooth: µs at both ends of a curve without cliffs; "": tiles and waves, whose steps are the only cliffs.
    """
    env = environment(smooth=smooth)
    sweep = ["sweep", "--dim", words, "-m", "4096", "-k", "512", "--layout", "nt", "--budget", "none"]
    for call in ([*sweep, "--results", str(folder)], ["check", str(folder), "--json"]):
        if call[0] == "check":
            call[1] = str(next(find_runs(folder)))
        done = subprocess.run([sys.executable, "-m", "quantbench", *call], env=env, capture_output=True, text=True)
        assert done.returncode == 0 or call[0] == "check", done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)["cliffs"]
    if smooth:
        return found

    def time_us(n: int) -> float:
        kernel, _ = device_double.kernel_of(Gemm(4096, n, 512, layout="nt"))
        return kernel.us

    assert found, "no cliff was found where the truth has some"
    return [cliff for cliff in found if time_us(cliff["next"]) < 1.01 * time_us(cliff["at"])]


def main() -> None:
    """Runs the whole rehearsal in a temporary folder; an AssertionError says what was lost."""
    start_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start_s:4.0f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        short = Rehearsal(Path(name) / "short", "c", only=RANDOM_SWEEP)
        how = short.finish("--seconds", str(SHORT_S)).get(RANDOM_SWEEP, "not started")
        assert how != "complete"
        assert short.finish()[RANDOM_SWEEP] == "complete"
        say(f"{RANDOM_SWEEP}: ended with {how!r} in {SHORT_S} s, completed with more: {short.check_complete()} points")
        for command, kills in KILLS.items():
            points = rehearse(Path(name) / command, command, kills)
            say(f"{command}: killed {kills} times, complete; {points} points, each once, none lost")
        assert not (found := false_cliffs(Path(name) / "smooth", "n=1024:4096:32", "12:40")), found
        assert not (found := false_cliffs(Path(name) / "stairs", "n=1024:8192:64")), found
        say("12 to 40 µs without a cliff, and a staircase: no cliff that is not in the truth")


if __name__ == "__main__":
    main()
