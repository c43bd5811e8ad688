"""Runs one step of the evidence: `quantbench sweep` commands, most valuable first, each with a share of the time.

Entry point: `python -m tools.evidence.steps --step N`. Run by `make evidence`; `write` uses `STEPS`. On a CPU the same
steps run over small sizes, to find mistakes without a GPU.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

# Ten minutes per step on a GPU, less the start of the processes and the packing.
STEP_SECONDS = {"cuda": 530.0, "cpu": 60.0}


@dataclass(frozen=True)
class PlannedSweep:
    """One `quantbench sweep`.

    name: key of the sweep in state.json.
    words, cpu_words: arguments on a GPU and on a CPU.
    share: share of the step's time, 0 to 1.
    """

    name: str
    words: tuple[str, ...]
    cpu_words: tuple[str, ...]
    share: float


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_BOTH = "torch,triton"

# Step 1: our kernels against the libraries' (for the page on the kernels), then the fused-softmax rule.
_KERNELS = (
    PlannedSweep(
        "gemm-8192",
        _words(
            "--dim n=8192 -m 8192 -k 8192 --layout nt --provider "
            "torch,triton.data_parallel,triton.persistent,triton.stream_k,triton.split_k"
        ),
        _words("--dim n=128 -m 128 -k 128 --layout nt --provider torch"),
        0.06,
    ),
    PlannedSweep(
        "kernels-hidden",
        _words(f"--dim hidden=1024:8192:512 --provider {_BOTH},triton.persistent"),
        _words("--dim hidden=128:256:128 --seq 64 --provider torch"),
        0.30,
    ),
    PlannedSweep(
        "kernels-softmax",
        _words(f"--dim seq=512,1024,2048,2056,4096,8192 --heads 32 --ops softmax --direction both --provider {_BOTH}"),
        _words("--dim seq=64,128 --heads 4 --ops softmax --direction both --provider torch"),
        0.12,
    ),
    PlannedSweep(
        "kernels-attention",
        _words(
            f"--dim seq=1024,2048,4096,8192 --hidden 4096 --heads 32 --ops attention --direction both "
            f"--provider {_BOTH}"
        ),
        _words("--dim seq=64,128 --hidden 256 --heads 4 --ops attention --direction both --provider torch"),
        0.16,
    ),
    PlannedSweep(
        # heads · mbs from 4 to 12: every third is divisible by 4, where Megatron's fused kernel is available.
        "fused-rule",
        _words(f"--dim heads=4,5,6,7,8,12 --hidden 8400 --skip-impossible --seq 2048 --ops softmax --provider {_BOTH}"),
        _words("--dim heads=2,4 --hidden 256 --seq 64 --ops softmax --provider torch"),
        0.06,
    ),
)

# Step 2: the axes.
_AXES = (
    PlannedSweep(
        "hidden",
        _words("--dim hidden=1024:16384:64@edges --direction both"),
        _words("--dim hidden=128:256:64 --seq 64 --direction both"),
        0.34,
    ),
    *(
        PlannedSweep(
            f"heads-{hidden}",
            _words(f"--dim heads={heads} --hidden {hidden} --skip-impossible --ops scores,softmax,context,attention"),
            _words("--dim heads=2,4 --hidden 256 --seq 64 --ops scores,softmax,context,attention"),
            0.07,
        )
        for hidden, heads in (
            (12288, "48,64,96,128"),
            (13824, "64,72,96,108,128"),
            (14336, "56,64,112,128"),
            (14400, "60,72,80,96,100,120"),
        )
    ),
    PlannedSweep("mbs", _words("--dim mbs=1:8:1 --hidden 8192 --heads 64"), _words("--dim mbs=1,2 --seq 64"), 0.08),
    PlannedSweep("tp", _words("--dim tp=1,2,4,8 --hidden 14336 --heads 112"), _words("--dim tp=1,2 --seq 64"), 0.04),
    PlannedSweep(
        "vocab",
        _words("--dim vocab=50176:50432:8,128000:128256:8,250752:251008:8 --hidden 4096"),
        _words("--dim vocab=256:320:8 --seq 64"),
        0.10,
    ),
    PlannedSweep(
        "n-edges", _words("--dim n=3072:9216:8@edges -m 4096 -k 4096 --layout nt"), _words("--dim n=64:96:8"), 0.16
    ),
)

# Step 3 is a list of shapes, made when it runs (see `random_shapes`).
STEPS: dict[int, tuple[PlannedSweep, ...]] = {1: _KERNELS, 2: _AXES, 3: ()}

#: name of step 3's sweep, and its number of shapes by kind of device
RANDOM_SWEEP = "random-shapes"
RANDOM_SHAPES = {"cuda": 1500, "cpu": 12}
_SHAPE_RANGES = {
    "cuda": {"m": (1, 16384), "n": (64, 16384), "k": (64, 16384)},
    "cpu": {"m": (1, 256), "n": (16, 256), "k": (16, 256)},
}


def random_shapes(kind: str, seed: int = 0) -> list[tuple[int, int, int]]:
    """Draws (m, n, k), log-uniform in each range; n and k are multiples of 8, three in four of 64."""
    import numpy as np

    random = np.random.default_rng(seed)
    shapes = []
    for _ in range(RANDOM_SHAPES[kind]):
        sizes = []
        for name in ("m", "n", "k"):
            low, high = _SHAPE_RANGES[kind][name]
            value = int(np.exp(random.uniform(np.log(low), np.log(high))))
            step = 1 if name == "m" else 64 if random.random() < 0.75 else 8
            sizes.append(max(step, round(value / step) * step))
        shapes.append((sizes[0], sizes[1], sizes[2]))
    return shapes


# With less time than this, a sweep measures little more than its reference point.
_LEAST_BUDGET_S = 8.0
# Tables that are not sweeps, by step: name of file and module, and share of the step's time.
TABLES: dict[int, dict[str, float]] = {1: {"timer-truth": 0.20, "copy-bandwidth": 0.02}, 2: {}, 3: {"cost": 0.20}}
# Time to load torch and create a context.
_TABLE_START_S = 30.0
# Time of a sweep besides its budget: loading torch, creating a context, drawing the plot.
_SWEEP_OVERHEAD_S = {"cuda": 12.0, "cpu": 6.0}


def main(
    step: Annotated[int, typer.Option(min=1, max=3, help="1: kernels and timer, 2: axes, 3: random shapes.")],
    results: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("results"),
    seconds: Annotated[float, typer.Option(min=0, help="Time for the step; 0 for the device's.")] = 0,
) -> None:
    """Runs the missing parts of a step within its time, then packs the results."""
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
        # A table that ran out of time keeps its rows and continues when the step is run again.
        if _run([f"tools.evidence.{table.replace('-', '_')}", str(out)], share * limit_s + _TABLE_START_S):
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
    """Writes random GEMMs as a file for `quantbench sweep --shapes`; returns its sweep."""
    path = folder / "random-shapes.csv"
    if not path.exists():
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("m", "n", "k"))
            writer.writerows(random_shapes(kind))
    words = ("--shapes", str(path), "--layout", "nt", "--max-time", "250ms")
    return PlannedSweep(RANDOM_SWEEP, words, words, 0.78)


def _sweep(sweep: PlannedSweep, kind: str, run: str | None, results: Path, budget_s: float) -> dict[str, Any]:
    """Starts a sweep, or resumes run `run`. Returns its entry in state.json."""
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
    """Runs a module in a new process. Returns whether it succeeded within `limit_s` seconds.

    After the limit, the process and its children are killed, so that none uses the device during the next sweep.
    """
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
    """Writes the runs and the files of the evidence folder to one compressed archive, to copy to another machine."""
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
