"""The pytest fixture against `quantbench sweep` on the same products, medians side by side:
`python -m quantbench.evidence.fixture_truth FILE.json`.

Both use one timer with the same options, in a process each; what differs is the process and the minute. They take
turns, since where a process happens to lie in memory and what else the machine does move short times by per cents.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quantbench import device
from quantbench.stats import median
from quantbench.store.folder import find_runs, read_run
from quantbench.store.record import Measured

# On shared cores a process' times lie per cents beside the next one's, so that it takes more of them.
REPEATS = {"cuda": 3, "cpu": 9}
_SIZES = {"cuda": (256, 512, 1024, 2048, 3072, 4096, 8192), "cpu": (128, 256, 384, 512, 640, 768)}
_MAX_TIME = {"cuda": "2s", "cpu": "500ms"}
_SUITE = """
import pytest
from quantbench.workload import Gemm

@pytest.mark.parametrize("n", {sizes})
def test_product(device_benchmark, n):
    device_benchmark.workload(Gemm(n, n, n, dtype={dtype!r}), "torch.mm")
"""


def measure(folder: Path) -> dict[str, Any]:
    """Both ways in turn, REPEATS times, in `folder`. Per size: each repeat's median for both, in µs, and ratio: the
    middle of the fixture's over the middle of the sweep's."""
    spec = device.current()
    dtype, sizes = device.default_dtype(spec), _SIZES[spec.kind]
    fixture_us: dict[int, list[float]] = {n: [] for n in sizes}
    sweep_us: dict[int, list[float]] = {n: [] for n in sizes}
    repeats = REPEATS[spec.kind]
    for repeat in range(repeats):
        once = folder / str(repeat)
        once.mkdir()
        for found, all_us in (
            (_by_fixture(once, dtype, spec.kind), fixture_us),
            (_by_sweep(once, dtype, spec.kind), sweep_us),
        ):
            for n, us in found.items():
                all_us[n].append(us)
    rows = [
        {
            "n": n, "fixture_us": fixture_us[n], "sweep_us": sweep_us[n],
            "ratio": median(fixture_us[n]) / median(sweep_us[n]),
        }
        for n in sizes
        if fixture_us[n] and sweep_us[n]
    ]  # fmt: skip
    return {"device": spec.name, "dtype": dtype, "repeats": repeats, "rows": rows}


def _by_fixture(folder: Path, dtype: str, kind: str) -> dict[int, float]:
    """Median µs by size, from pytest-benchmark's JSON."""
    (folder / "test_products.py").write_text(_SUITE.format(sizes=_SIZES[kind], dtype=dtype))
    words = ("-q", "--benchmark-only", "--benchmark-json=fixture.json", "--device-max-time", _MAX_TIME[kind])
    _run(folder, "pytest", *words)
    found = json.loads((folder / "fixture.json").read_text(encoding="utf-8"))["benchmarks"]
    return {each["params"]["n"]: each["stats"]["median"] * 1e6 for each in found}


def _by_sweep(folder: Path, dtype: str, kind: str) -> dict[int, float]:
    """Median µs by size, from the run that a sweep leaves."""
    (folder / "shapes.csv").write_text("m,n,k\n" + "".join(f"{n},{n},{n}\n" for n in _SIZES[kind]))
    words = ("--shapes", "shapes.csv", "--dtype", dtype, "--provider", "torch.mm", "--max-time", _MAX_TIME[kind])
    _run(folder, "quantbench", "sweep", *words, "--budget", "none")
    (run,) = find_runs(folder / "results")
    return {
        record.places[0].axes["n"]: median(record.outcome.measurement.samples_us)
        for record in read_run(run).records
        if record.role == "point" and isinstance(record.outcome, Measured)
    }


def _run(folder: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{words[0]}: exit code {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")


def main() -> None:
    """Measure, write the table and print it."""
    with tempfile.TemporaryDirectory() as folder:
        table = measure(Path(folder))
    Path(sys.argv[1]).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for row in table["rows"]:
        fixture, sweep = (" ".join(f"{us:.2f}" for us in row[name]) for name in ("fixture_us", "sweep_us"))
        print(f"n = {row['n']}: fixture {fixture} µs, sweep {sweep} µs, ratio of the middles {row['ratio']:.3f}")


if __name__ == "__main__":
    main()
