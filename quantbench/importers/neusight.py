"""Reads NeuSight's timings of fp32 products and softmax: its CSV files, merged or of one GPU, or a Parquet table.

Entry points: `read_rows`, `origin_of`. Used by the command `import` and by tools.

Source: https://github.com/sitar-lab/NeuSight, neusight/Dataset/collect.py. `linear` is torch.nn.Linear with bias, `bmm`
torch.bmm. The files' N is the reduction and K the output's width. A time is the mean of the fastest 5 of 25, between
CUDA events around one call on an idle GPU, so the launch from Python is in every one of them; `_launch_note` finds how
long that is.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

from quantbench.device.spec import DeviceSpec
from quantbench.importers.csv_table import CsvFile, CsvRow
from quantbench.importers.runs import Origin, Row, Rows, file_origin, rows_of_gpu, slug_of
from quantbench.launch import Launch
from quantbench.providers.identity import KernelEvent, launch_of
from quantbench.store.record import Place
from quantbench.units import latency
from quantbench.workload import Gemm, Softmax

_WHO = "import neusight"
_GRID = ("x", "y", "z")
# Work of less than this at the peaks shows the launch. The launch is said from this many such rows on.
_TINY_US, _LEAST_TINY = 5.0, 10


def read_rows(path: Path, spec: DeviceSpec) -> Rows:
    """Reads the rows of one GPU. Raises InputError if the table has none of it, or wrong columns."""
    file = CsvFile(_WHO, path)
    published = "OPName" in file.columns
    names = file.spelled(
        op=("OPName", "op"), gpu=("Device", "gpu"), time=("Latency", "latency_ms"), kernel=("Kernel Name", "kernel"),
        kernels=("Kernels", "kernels"),
        **{f"grid_{axis}": (f"Grid {axis}", f"grid_{axis}") for axis in _GRID},
        **{f"block_{axis}": (f"Block {axis}", f"block_{axis}") for axis in "xy"},
    )  # fmt: skip
    sizes = {"batch": "B", "m": "M", "n": "K", "k": "N", "rows": "B", "cols": "H"} if published else {}
    found = Rows()
    for row in rows_of_gpu(_WHO, path, file.rows(), lambda row: slug_of(row.text(names["gpu"])), spec.name, found):
        work = _workload(file, row, row.text(names["op"]), sizes)
        if isinstance(work, str):
            found.left_out[work] += 1
            continue
        launch = _launch_of(row, names, work, spec)
        shape = ("batch", "rows", "cols") if isinstance(work, Softmax) else ("m", "n", "k", "batch")
        place = Place({name: getattr(work, name) for name in shape}, row.text(names["op"]))
        latency_us = row.number(names["time"]) * 1e3
        found.rows.append(Row(work, latency_us, "torch", place, where=f"line {row.line}", launch=launch))
    return found


def _workload(file: CsvFile, row: CsvRow, op: str, sizes: dict[str, str]) -> Gemm | Softmax | str:
    """Returns the workload of a row, or the reason why there is none. sizes: columns of sizes with other names."""

    def size(name: str) -> int:
        column = sizes.get(name, name)
        file.require((column,))
        return row.integer(column)

    if op == "linear":
        return row.made(Gemm, size("batch") * size("m"), size("n"), size("k"), dtype="fp32", layout="nt")
    if op == "bmm":
        return row.made(Gemm, size("m"), size("n"), size("k"), batch=size("batch"), dtype="fp32")
    if op == "softmax":
        return row.made(Softmax, 1, size("rows"), size("cols"), dtype="fp32", mask="none")
    return f"op {op}: no such workload here"


def _launch_of(row: CsvRow, names: dict[str, str], work: Gemm | Softmax, spec: DeviceSpec) -> Launch | None:
    kernel = row.text(names["kernel"])
    if not kernel:
        return None
    x, y, z = (row.integer(names[f"grid_{axis}"]) for axis in _GRID)
    block = (row.integer(names["block_x"]), row.integer(names["block_y"]), 1)
    events = [row.made(KernelEvent, kernel, 1.0, (x, y, z), block)]
    if "splitkreduce" in row.text(names["kernels"]).lower():
        events.append(KernelEvent("splitKreduce_kernel", 0.0))
    return row.made(launch_of, events, work, spec)


def origin_of(path: Path, found: Rows, spec: DeviceSpec, *, run_id: str | None = None) -> Origin:
    """Describes the origin of a table: how it was timed, and how long the launch in its times is."""
    caveats = ("imported: the mean of the fastest 5 of 25 calls with the launch from Python; clock not recorded",)
    return file_origin(
        path, "neusight", spec.name, run_id, f"NeuSight, {spec.name}, ", software={"torch": "not stated"},
        mode="events", caveats=caveats, notes=_launch_note(found, spec),
    )  # fmt: skip


def _launch_note(found: Rows, spec: DeviceSpec) -> tuple[str, ...]:
    """Says how long the launch is, by op: the median time of rows whose work takes next to none."""
    tiny = defaultdict(list)
    for row in found.rows:
        work = row.workload
        compute_us = work.flops / (spec.peak("fp32") or 1) / 1e6 if isinstance(work, Gemm) else 0.0
        if row.has_time and max(compute_us, work.min_bytes / spec.memory_gb_per_s / 1e3) < _TINY_US:
            tiny[row.place.op].append(row.latency_us)
    floors = {op: median(times) for op, times in tiny.items() if len(times) >= _LEAST_TINY}
    if not floors:
        return ()
    said = ", ".join(f"{latency(us)} ({op})" for op, us in sorted(floors.items()))
    below = sum(row.latency_us < 2 * floors.get(row.place.op, 0.0) for row in found.rows)
    share = f"in {below:,} of {len(found.rows):,} rows it is over half of the time"
    return (f"the launch from Python is in every time: {said} where the work takes less than 5 µs; {share}",)
