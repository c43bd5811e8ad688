"""Compares times by the pytest fixture with times by `quantbench sweep` on the same GEMMs.

Entry point: `python -m tests.fixture_truth FILE.json [PAGE.md]`. An existing FILE is not measured
again; the table is written between the markers of PAGE. Tests use `measure`.

Both use the same timer and options, each in its own process. Short times differ by a few percent
between processes and with the load of the machine. So the two alternate, each starting half of the
turns, until every ratio is precise enough or the maximum number of turns is reached.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from quantbench import device
from quantbench.stats import median, median_interval
from quantbench.store.folder import find_runs, read_run
from quantbench.store.record import Measured
from tools.guide.markers import write_between

#: half-width of the 95 % interval below which a ratio is precise enough
KNOWN = 0.02
# Minimum turns (a 95 % interval needs six) and maximum: on shared cores, times differ by percents
# between processes; a turn on a GPU takes 20 s, most of it to start two processes.
TURNS = {"cuda": (6, 6), "cpu": (7, 90)}
_SIZES = {"cuda": (256, 512, 1024, 2048, 3072, 4096, 8192), "cpu": (128, 256, 384, 512, 640, 768)}
_MAX_TIME = {"cuda": "2s", "cpu": "500ms"}
_ROOT = Path(__file__).resolve().parents[1]
_PLUGIN = "quantbench.pytest_plugin"
_SUITE = """
import pytest
from quantbench.workload import Gemm

@pytest.mark.parametrize("n", {sizes})
def test_product(device_benchmark, n):
    device_benchmark.workload(Gemm(n, n, n, dtype={dtype!r}), "torch.mm")
"""


def measure(folder: Path) -> dict[str, Any]:
    """Runs both alternately, in `folder`.

    Returns the device, the dtype and one row per size: medians of each turn, µs, and the median
    ratio, fixture over sweep, with its 95 % interval.
    """
    spec = device.current()
    dtype, sizes = device.default_dtype(spec), _SIZES[spec.kind]
    fewest, most = TURNS[spec.kind]
    ways = {"fixture_us": _by_fixture, "sweep_us": _by_sweep}
    found: dict[int, dict[str, list[float]]] = {n: {way: [] for way in ways} for n in sizes}
    for turn in range(most):
        left = [
            n for n in sizes if turn < fewest or (found[n]["sweep_us"] and not _known(found[n]))
        ]
        if not left:
            break
        once = folder / str(turn)
        once.mkdir()
        order = sorted(ways, reverse=turn % 2 == 1)
        times_us = {way: ways[way](once, dtype, spec.kind, left) for way in order}
        # A GEMM that one of them did not measure has no ratio in this turn.
        for n in (n for n in left if all(n in times_us[way] for way in ways)):
            for way in ways:
                found[n][way].append(times_us[way][n])
    rows = [{"n": n, **found[n], **_ratio(found[n])} for n in sizes if found[n]["sweep_us"]]
    return {"device": spec.name, "dtype": dtype, "rows": rows}


def _ratio(times_us: dict[str, list[float]]) -> dict[str, float]:
    ratios = [
        one / other for one, other in zip(times_us["fixture_us"], times_us["sweep_us"], strict=True)
    ]
    interval = median_interval(ratios)
    return {"ratio": median(ratios), "low": interval.low, "high": interval.high}


def _known(times_us: dict[str, list[float]]) -> bool:
    found = _ratio(times_us)
    return found["high"] - found["low"] <= 2 * KNOWN


def _by_fixture(folder: Path, dtype: str, kind: str, sizes: Sequence[int]) -> dict[int, float]:
    """Runs the fixture; returns median µs by size, from pytest-benchmark's JSON."""
    (folder / "test_products.py").write_text(_SUITE.format(sizes=tuple(sizes), dtype=dtype))
    words = (
        "-q",
        "--benchmark-only",
        "--benchmark-json=fixture.json",
        "--device-max-time",
        _MAX_TIME[kind],
    )
    _run(folder, "pytest", *plugin_words(), *words)
    found = json.loads((folder / "fixture.json").read_text(encoding="utf-8"))["benchmarks"]
    return {each["params"]["n"]: each["stats"]["median"] * 1e6 for each in found}


def plugin_words() -> tuple[str, ...]:
    """Returns what pytest needs to find the fixture in a checkout that is not installed."""
    installed = any(point.value == _PLUGIN for point in entry_points(group="pytest11"))
    return () if installed else ("-p", _PLUGIN)


def _by_sweep(folder: Path, dtype: str, kind: str, sizes: Sequence[int]) -> dict[int, float]:
    """Runs a sweep; returns median µs by size, from its records."""
    (folder / "shapes.csv").write_text("m,n,k\n" + "".join(f"{n},{n},{n}\n" for n in sizes))
    words = ("--shapes", "shapes.csv", "--dtype", dtype, "--provider", "torch.mm")
    _run(folder, "quantbench", "sweep", *words, "--budget", "none")
    (run,) = find_runs(folder / "results")
    return {
        record.places[0].axes["n"]: median(record.outcome.measurement.samples_us)
        for record in read_run(run).records
        if record.role == "point" and isinstance(record.outcome, Measured)
    }


def _run(folder: Path, *words: str) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))),
    }
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(
            f"{words[0]}: exit code {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}"
        )


def markdown(found: dict[str, Any]) -> str:
    """Formats the result of `measure` as a Markdown table with its conditions."""
    lines = [
        f"{found['device']}, {found['dtype']}, cold cache, `torch.mm` of n × n × n; medians over the turns, with the "
        "95 % interval of their ratio's median.",
        "",
        "| n | fixture, µs | sweep, µs | fixture / sweep | 95 % interval | turns |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        fixture_us, sweep_us = median(row["fixture_us"]), median(row["sweep_us"])
        lines.append(
            f"| {row['n']} | {fixture_us:.2f} | {sweep_us:.2f} | {row['ratio']:.3f} | {row['low']:.3f} to "
            f"{row['high']:.3f} | {len(row['sweep_us'])} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Measures if the file does not exist, prints the table and writes it into the pages."""
    file, pages = Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]]
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder))
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    table = markdown(json.loads(file.read_text(encoding="utf-8")))
    print(table, end="")
    for page in pages:
        write_between(page, "agreement", table)


if __name__ == "__main__":
    main()
