"""Times square GEMMs with NVBench's Python bindings (`cuda-bench`), to compare with our timer.

Each sample is one run with cold caches, as with quantbench's timer. The module runs in a separate
process, because NVBench keeps its benchmarks until the process ends: `python -m
tools.measure.nvbench FILE.json SIZE…` times one GEMM per size.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from quantbench.files import read_json
from quantbench.stats import typical_us
from quantbench.workload import Gemm
from tools.measure.side_by_side import write_json

_NAME = "product"
_AXIS = "Size"
# Sampling time per state. NVBench's default of 0.5 s would take most of the time of a comparison,
# and the median is steady long before.
_MIN_TIME_S = "0.1"
_TIMEOUT_S = "4"


def main() -> None:
    """Times every size on the command line, and writes `{size: [samples in µs]}` as JSON."""
    from cuda import bench
    from cuda.bench.results import BenchmarkResult

    out = Path(sys.argv[1])
    sizes = list(map(int, sys.argv[2:]))
    registered = bench.register(_product)
    registered.set_name(_NAME)
    registered.add_int64_axis(_AXIS, sizes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "nvbench.json"
        words = ["--jsonbin", str(path), "--devices", "0"]
        words += ["--min-time", _MIN_TIME_S, "--timeout", _TIMEOUT_S]
        bench.run_all_benchmarks([_NAME, *words])
        result = BenchmarkResult.from_json(path)
        samples_us = {}
        for state in result[_NAME]:
            samples = [1e6 * float(seconds) for seconds in state.samples or ()]
            samples_us[int(state.point[_AXIS])] = samples
    write_json(out, samples_us)


def _product(state: Any) -> None:
    """Runs one NVBench state: the GEMM of our provider `torch.mm`, launched on NVBench's stream."""
    import torch

    from quantbench import device
    from quantbench.providers import catalog

    spec = device.current()
    size = state.get_int64(_AXIS)
    task = catalog.make("torch.mm").prepare(
        Gemm(size, size, size, dtype=device.default_dtype(spec)), spec
    )
    torch.cuda.synchronize()

    def launch(launched: Any) -> None:
        stream = torch.cuda.ExternalStream(launched.get_stream().addressof())
        with torch.cuda.stream(stream):
            task.run()

    state.exec(launch, batched=False)


def merge_nvbench(rows: list[dict[str, Any]], file: Path) -> None:
    """Adds the medians of one repeat to the rows of the same sizes, in place.

    rows: rows of the table of medians.
    file: JSON file with the samples of the repeat, as this module writes it.
    """
    samples_us = read_json(file)
    for row in rows:
        found = samples_us.get(str(row["sizes"][0]))
        if found:
            row["medians_us"].setdefault("nvbench", []).append(typical_us(found))


if __name__ == "__main__":
    main()
