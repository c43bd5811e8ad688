"""The same kernels by our timer and by everybody else's: one table of medians, and the spread of repeats.

Run as `python -m quantbench.evidence.timer_truth FILE.json`, in a process of its own: profilers leave traces behind.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from quantbench import device
from quantbench.device.spec import DeviceSpec
from quantbench.providers import catalog
from quantbench.stats import median
from quantbench.timing.options import TimingOptions
from quantbench.timing.other_methods import METHODS
from quantbench.timing.rotation import LazyRuns, cold_copies
from quantbench.timing.timer import Timer, make_timer
from quantbench.workload import Gemm

REPEATS = 3
# Twelve products from a few microseconds to some twenty milliseconds on an H200 (half the sizes on a CPU core).
_SIZES = {
    "cuda": (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384),
    "cpu": (64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768),
}


def main() -> None:
    """Measure and write the table."""
    out = Path(sys.argv[1])
    spec = device.current()
    options = TimingOptions(max_time_s=1.0 if spec.kind == "cuda" else 0.2)
    modes = ("events", "graph") if spec.kind == "cuda" else ("auto",)
    timers = {f"quantbench {mode}": make_timer(spec, replace(options, mode=mode)) for mode in modes}
    rows = [_row(Gemm(n, n, n, dtype=device.default_dtype(spec)), spec, timers) for n in _SIZES[spec.kind]]
    out.write_text(json.dumps({"device": spec.name, "repeats": REPEATS, "rows": rows}, indent=1) + "\n")
    for row in rows:
        medians = ", ".join(f"{name} {us[0]:.2f}" for name, us in row["medians_us"].items() if us)
        print(f"{row['workload']}: {medians} µs")


def _row(gemm: Gemm, spec: DeviceSpec, timers: dict[str, Timer]) -> dict[str, Any]:
    """Medians of each method, one per repeat, and the wall seconds that each repeat cost."""
    provider = catalog.make("torch.mm")
    task = provider.prepare(gemm, spec)
    copies = cold_copies(spec.l2_bytes, gemm.min_bytes) - 1
    medians: dict[str, list[float]] = {}
    wall_s: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        for name, timer in timers.items():
            start_s = time.perf_counter()
            rotate = LazyRuns(copies if copies <= 500 else 0, lambda i: provider.prepare(gemm, spec, seed=i + 1).run)
            measured = timer.measure(task.run, rotate=rotate, min_bytes=gemm.min_bytes)
            medians.setdefault(name, []).append(median(measured.samples_us))
            wall_s.setdefault(name, []).append(time.perf_counter() - start_s)
        # The profiler comes last: once it has been active it may add to the cost of launches.
        for name, method in sorted(METHODS[spec.kind].items(), key=lambda item: item[0] == "profiler"):
            start_s = time.perf_counter()
            samples = method(task.run, spec)
            if samples:
                medians.setdefault(name, []).append(median(samples))
            wall_s.setdefault(name, []).append(time.perf_counter() - start_s)
    return {"workload": str(gemm), "flops": gemm.flops, "medians_us": medians, "wall_s": wall_s}


if __name__ == "__main__":
    main()
