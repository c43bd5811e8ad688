"""Times the same GEMMs with quantbench's timer and other methods, and writes a table of medians.

Run it as `python -m tools.measure.timer_truth FILE.json [--nvbench]`. With --nvbench, NVBench is
the only other method. It runs in separate processes and needs `cuda-bench` (README.md).
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quantbench import device
from quantbench.device.spec import DeviceSpec
from quantbench.timing import make_timer
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm
from tools.measure.nvbench import merge_nvbench
from tools.measure.other_methods import METHODS
from tools.measure.side_by_side import REPEATS, by_timer, measure_rows, write_table

# Sizes of square GEMMs: from a few microseconds to about 20 ms on an H200.
_SIZES = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
_NVBENCH_LIMIT_S = 60.0
# The profiler stays attached to the process and slows down later launches.
_LAST = "profiler"


def main() -> None:
    """Measures the missing rows of the table, writes the table, and prints its medians."""
    out = Path(sys.argv[1])
    spec = device.current()
    options = TimingOptions(max_time_s=1.0)
    methods = {}
    for mode in ("events", "graph"):
        methods[f"quantbench {mode}"] = by_timer(make_timer(spec, replace(options, mode=mode)))
    gemms = [Gemm(n, n, n, dtype=device.default_dtype(spec)) for n in _SIZES]
    if "--nvbench" in sys.argv:
        rows = measure_rows(out, spec, gemms, methods)
        _add_nvbench(rows, out, spec)
    else:
        methods |= METHODS
        last = {_LAST: methods.pop(_LAST)}
        measure_rows(out, spec, gemms, methods)
        rows = measure_rows(out, spec, gemms, last)
    for row in rows:
        medians = ", ".join(f"{name} {us[0]:.2f}" for name, us in row["medians_us"].items() if us)
        print(f"{row['workload']}: {medians} µs")


def _add_nvbench(rows: list[dict[str, Any]], out: Path, spec: DeviceSpec) -> None:
    """Adds NVBench's medians to the rows, and writes the table after each repeat.

    Each repeat is a process. Repeats whose files exist, from an interrupted start, are not run
    again. If a process fails, the error is printed and NVBench has no further repeats.
    """
    if not (find_spec("cuda") and find_spec("cuda.bench")):
        print(
            "nvbench: cuda-bench is not installed; README.md says how to carry it to this machine"
        )
        return
    for row in rows:
        row["medians_us"].pop("nvbench", None)  # the repeats' files are read again
    for repeat in range(REPEATS):
        file = out.with_name(f"nvbench-{repeat}.json")
        words = [sys.executable, "-m", "tools.measure.nvbench", str(file), *map(str, _SIZES)]
        try:
            if not file.exists():
                subprocess.run(
                    words, timeout=_NVBENCH_LIMIT_S, check=True, capture_output=True, text=True
                )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"nvbench: {error}: {str(error.stderr)[-500:]}")
            return
        merge_nvbench(rows, file)
        write_table(out, spec, rows)


if __name__ == "__main__":
    main()
