"""One step of the evidence: `python -m quantbench.evidence.run --step 1`. Run again, it finishes what is missing.

Each sweep is the command that a user would type, in a process of its own. What has been done is kept in
`results/<device>/evidence/state.json`; at the end of a step everything is packed beside it.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from quantbench.evidence.steps import RANDOM_SWEEP, STEP_SECONDS, STEPS, PlannedSweep, random_shapes

# A sweep that is given less than this would measure its reference point and little else.
_LEAST_BUDGET_S = 8.0
# Tables that are no sweep, by step: name of the file and the module, and its share of the step's time.
TABLES: dict[int, dict[str, float]] = {1: {"timer-truth": 0.20, "copy-bandwidth": 0.02}, 2: {}, 3: {"cost": 0.20}}
# Loading torch and making a context.
_TABLE_START_S = 30.0
# Loading torch, making a context, drawing the picture: what a sweep takes beside its budget.
_SWEEP_OVERHEAD_S = {"cuda": 12.0, "cpu": 6.0}


def main(
    step: Annotated[int, typer.Option(min=1, max=3, help="1: kernels and timer, 2: axes, 3: random shapes.")],
    results: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("results"),
    seconds: Annotated[float, typer.Option(min=0, help="Time for the step; 0 for the device's.")] = 0,
) -> None:
    """Run what is missing of a step within its time, then pack it."""
    from quantbench import device

    start_s = time.monotonic()
    spec = device.current()
    folder = results / spec.name / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    state_path = folder / "state.json"
    state: dict[str, Any] = json.loads(state_path.read_text()) if state_path.exists() else {}
    limit_s = seconds or STEP_SECONDS[spec.kind]

    def left_s() -> float:
        return limit_s - (time.monotonic() - start_s)

    for table, share in TABLES[step].items():
        if table in state:
            continue
        out = folder / f"{table}.json"
        # A table that was cut short keeps its rows, and goes on from there when the step is run again.
        if _run([f"quantbench.evidence.{table.replace('-', '_')}", str(out)], share * limit_s + _TABLE_START_S):
            state[table] = {"file": out.name}
            _keep(state_path, state)
    sweeps = STEPS[step] if step != 3 else (_shapes_sweep(folder, spec.kind),)
    for sweep in sweeps:
        known = state.get(sweep.name, {})
        if known.get("how_ended") == "complete":
            continue
        budget_s = min(sweep.share * limit_s, left_s()) - _SWEEP_OVERHEAD_S[spec.kind]
        if budget_s < _LEAST_BUDGET_S and spec.kind == "cuda":
            print(f"{sweep.name}: no time left in this step; run it again to finish")
            continue
        state[sweep.name] = _sweep(sweep, spec.kind, known.get("run"), results, max(budget_s, 3.0))
        _keep(state_path, state)
    packed = pack(folder, [results.parent / entry["run"] for entry in state.values() if entry.get("run")], step)
    print(f"step {step} took {time.monotonic() - start_s:.0f} s; packed: {', '.join(str(p) for p in packed)}")


def _shapes_sweep(folder: Path, kind: str) -> PlannedSweep:
    """Random products, as a file that `quantbench sweep --shapes` reads."""
    path = folder / "random-shapes.csv"
    if not path.exists():
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("m", "n", "k"))
            writer.writerows(random_shapes(kind))
    words = ("--shapes", str(path), "--layout", "nt", "--max-time", "250ms")
    return PlannedSweep(RANDOM_SWEEP, words, words, 0.78)


def _sweep(sweep: PlannedSweep, kind: str, run: str | None, results: Path, budget_s: float) -> dict[str, Any]:
    """Start a sweep, or go on with the one that was cut short; what it says of itself."""
    words = sweep.words if kind == "cuda" else sweep.cpu_words
    quick = () if kind == "cuda" else ("--max-time", "20ms", "--half-width", "0.2")
    started = ["--resume", run] if run else [*words, *quick, "--results", str(results)]
    arguments = [*started, "--budget", f"{budget_s:.0f}s"]
    done = subprocess.run(
        [sys.executable, "-m", "quantbench", "sweep", *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print(f"{sweep.name}: `quantbench sweep {' '.join(arguments)}` ended with exit code {done.returncode}")
        return {"how_ended": "failed", "run": run}
    said = json.loads(done.stdout)
    print(
        f"{sweep.name}: {said['how_ended']}, {len(said['rows'])} rows, {said['wall_s']:.0f} s, {said['run']}",
        flush=True,
    )
    return {"how_ended": said["how_ended"], "run": said["run"], "overhead_share": said["overhead_share"]}


def _run(module: list[str], limit_s: float) -> bool:
    """Whether a table was finished. What is late is ended with all that it started, so that nothing of it is left on
    the device while the next figure is taken."""
    with subprocess.Popen([sys.executable, "-m", *module], start_new_session=True) as process:
        try:
            return process.wait(timeout=limit_s) == 0
        except subprocess.TimeoutExpired:
            print(f"{module[0]}: not done within {limit_s:.0f} s")
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _keep(path: Path, state: dict[str, Any]) -> None:
    path.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def pack(folder: Path, runs: list[Path], step: int) -> list[Path]:
    """One compressed archive with the runs and what lies in the evidence folder, for carrying to another machine."""
    path = folder / f"evidence-step{step}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for run in dict.fromkeys(runs):
            archive.add(run, arcname=f"{run.parent.name}/{run.name}")
        for file in sorted(folder.glob("*.*")):
            if file.suffix in (".json", ".csv"):
                archive.add(file, arcname=f"{folder.parent.name}/evidence/{file.name}")
    return [path]


if __name__ == "__main__":
    typer.run(main)
