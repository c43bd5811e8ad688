"""The pytest fixture against `quantbench sweep` on the same products, medians side by side:
`python -m quantbench.evidence.fixture_truth FILE.json`.

Both use one timer with the same options, in a process each; what differs is the process and the minute.
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
    """Both ways once, in `folder`. us by size for each; ratio: the fixture's median over the sweep's."""
    spec = device.current()
    dtype, sizes = device.default_dtype(spec), _SIZES[spec.kind]
    (folder / "test_products.py").write_text(_SUITE.format(sizes=sizes, dtype=dtype))
    (folder / "shapes.csv").write_text("m,n,k\n" + "".join(f"{n},{n},{n}\n" for n in sizes))
    limit = _MAX_TIME[spec.kind]
    _run(folder, "pytest", "-q", "--benchmark-only", "--benchmark-json=fixture.json", "--device-max-time", limit)
    words = (
        "--shapes",
        "shapes.csv",
        "--dtype",
        dtype,
        "--provider",
        "torch.mm",
        "--max-time",
        limit,
        "--budget",
        "none",
    )
    _run(folder, "quantbench", "sweep", *words)
    found = json.loads((folder / "fixture.json").read_text(encoding="utf-8"))["benchmarks"]
    fixture_us = {each["params"]["n"]: each["stats"]["median"] * 1e6 for each in found}
    (run,) = find_runs(folder / "results")
    sweep_us = {
        record.places[0].axes["n"]: median(record.outcome.measurement.samples_us)
        for record in read_run(run).records
        if record.role == "point" and isinstance(record.outcome, Measured)
    }
    rows = [
        {"n": n, "fixture_us": fixture_us[n], "sweep_us": sweep_us[n], "ratio": fixture_us[n] / sweep_us[n]}
        for n in sizes
        if n in fixture_us and n in sweep_us
    ]
    return {"device": spec.name, "dtype": dtype, "rows": rows}


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
        print(f"n = {row['n']}: fixture {row['fixture_us']:.2f} µs, sweep {row['sweep_us']:.2f} µs, {row['ratio']:.3f}")


if __name__ == "__main__":
    main()
