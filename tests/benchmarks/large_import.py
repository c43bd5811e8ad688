"""Time and memory of `import`, `check`, `report` and `profile export` over the number of imported
rows.

Each command runs in a process of its own. The table shows its CPU seconds (user and system), which
a busy machine changes little, and its peak memory.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil
from pathlib import Path

import numpy as np

GPU = "a100-sxm4-80gb"
_TILE_M, _TILE_N, _SM_COUNT = 128, 256, 108
_PEAK_TFLOPS, _GB_PER_S, _OVERHEAD_US, _NOISE = 260.0, 1500.0, 6.0, 0.01


def shapes(layout: str, rows: int, rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """Sizes (m, n, k) of a table. grid: all combinations of sizes, as tuners measure them; random:
    any sizes, so that hardly two curves share their sizes."""
    if layout == "grid":
        yield from product(_octaves(rows // 1000), _octaves(40), _octaves(25))
        return
    sizes = _octaves(200)
    flat = rng.choice(len(sizes) ** 3, rows, replace=False)
    for place in np.transpose(np.unravel_index(flat, (len(sizes),) * 3)):
        yield tuple(sizes[index] for index in place)


def _octaves(count: int) -> list[int]:
    """`count` different multiples of 8, evenly spaced by ratio from 128 on."""
    sizes: list[int] = []
    for value in np.geomspace(128, 16384, count):
        size = 8 * round(float(value) / 8)
        sizes.append(size if not sizes or size > sizes[-1] else sizes[-1] + 8)
    return sizes


def time_us(m: int, n: int, k: int, rng: np.random.Generator) -> float:
    """Time of a product with the steps of tiles and waves, and noise."""
    waves = ceil(ceil(m / _TILE_M) * ceil(n / _TILE_N) / _SM_COUNT)
    arithmetic_us = waves * _SM_COUNT * 2 * _TILE_M * _TILE_N * k / _PEAK_TFLOPS / 1e6
    memory_us = 2 * (m * k + k * n + m * n) / _GB_PER_S / 1e3
    return float((_OVERHEAD_US + max(arithmetic_us, memory_us)) * np.exp(rng.normal(0, _NOISE)))


def write_table(path: Path, layout: str, rows: int, seed: int = 0) -> None:
    """Write a CSV file with the columns m, n, k, time_us."""
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        file.write("m,n,k,time_us\n")
        for m, n, k in shapes(layout, rows, rng):
            file.write(f"{m},{n},{k},{time_us(m, n, k, rng):.3f}\n")


def run(arguments: Sequence[str]) -> tuple[float, float]:
    """Runs `quantbench` with these arguments. Returns CPU seconds and peak memory in MB. Raises
    RuntimeError where it fails.
    """
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "quantbench", *arguments],
        dict(os.environ),
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"quantbench {' '.join(arguments)} ended with wait status {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure(folder: Path, layout: str, rows: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """CPU seconds and peak MB of each command on one table."""
    name = f"{layout}-{rows}"
    table, results, profile = folder / f"{name}.csv", folder / "results", folder / f"{name}.json"
    write_table(table, layout, rows)
    mapping = "m=m,n=n,k=k,latency=time_us:us"
    run_folder = str(results / GPU / name)
    yield "import", run(["import", "csv", str(table), "--map", mapping, "--gpu", GPU, "--dtype", "bf16", "--results",
                         str(results), "--run-id", name])  # fmt: skip
    yield "check", run(["check", run_folder])
    yield "report", run(["report", run_folder])
    yield "profile export", run(["profile", "export", run_folder, "-o", str(profile)])


def main() -> None:
    print(f"{'layout':8} {'command':15} {'rows':>8} {'CPU s':>7} {'ms/row':>7} {'peak MB':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for layout, rows in product(("grid", "random"), (25_000, 50_000, 100_000)):
            for command, (cpu_s, peak_mb) in measure(Path(folder), layout, rows):
                line = f"{layout:8} {command:15} {rows:8,} {cpu_s:7.1f} {1e3 * cpu_s / rows:7.3f} {peak_mb:8.0f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
