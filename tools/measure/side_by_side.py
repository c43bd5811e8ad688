"""Times the same GEMMs by several methods, repeated in turn, and stores medians and the seconds
spent.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantbench.device.spec import DeviceSpec
from quantbench.errors import UnsupportedError
from quantbench.providers import catalog
from quantbench.stats import typical_us
from quantbench.sweep.worker import copier
from quantbench.timing.options import TimingOptions
from quantbench.timing.session import Timer
from quantbench.workload import Gemm
from tools.measure.other_methods import Run

REPEATS = 3

Method = Callable[[Run, DeviceSpec], list[float]]


def measure_row(
    gemm: Gemm, spec: DeviceSpec, timers: dict[str, Timer], methods: dict[str, Method]
) -> dict[str, Any]:
    """Times one GEMM with each method.

    Returns, per method and repeat, the median in microseconds and the seconds spent; and the
    seconds for making the inputs, which every method needs.
    """
    start_s = time.perf_counter()
    provider = catalog.make("torch.mm")
    task = provider.prepare(gemm, spec)
    prepare_s = time.perf_counter() - start_s
    medians: dict[str, list[float]] = {}
    wall_s: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        for name, timer in timers.items():
            start_s = time.perf_counter()
            copy = copier(provider, gemm, spec, TimingOptions())
            found = medians.setdefault(name, [])
            # A graph with a cold cache may need too many copies to rotate over.
            with suppress(UnsupportedError):
                measured = timer.measure(task.run, copy=copy, min_bytes=gemm.min_bytes)
                found.append(measured.stated.latency_us)
            wall_s.setdefault(name, []).append(time.perf_counter() - start_s)
        for name, method in methods.items():
            _once(method, task.run, spec, medians.setdefault(name, []), wall_s.setdefault(name, []))
    return {
        "workload": str(gemm),
        "sizes": [gemm.m, gemm.n, gemm.k],
        "flops": gemm.flops,
        "medians_us": medians,
        "wall_s": wall_s,
        "prepare_s": prepare_s,
    }


def _once(
    method: Method, run: Run, spec: DeviceSpec, medians_us: list[float], wall_s: list[float]
) -> None:
    """Runs one repeat and appends its median, if there is one, and the seconds spent."""
    start_s = time.perf_counter()
    samples = method(run, spec)
    if samples:
        medians_us.append(typical_us(samples))
    wall_s.append(time.perf_counter() - start_s)


def measure_rows(
    out: Path,
    spec: DeviceSpec,
    gemms: Sequence[Gemm],
    timers: dict[str, Timer],
    methods: dict[str, Method],
) -> list[dict[str, Any]]:
    """Measures the rows that `out` does not hold yet; writes the table after each row. Returns all
    rows.
    """
    known: dict[str, dict[str, Any]] = {}
    if out.exists():
        table = json.loads(out.read_text(encoding="utf-8"))
        known = {row["workload"]: row for row in table["rows"]}
    rows = []
    for gemm in gemms:
        rows.append(known.get(str(gemm)) or measure_row(gemm, spec, timers, methods))
        write_table(out, spec, rows)
    return rows


def add_method(
    out: Path,
    spec: DeviceSpec,
    gemms: Sequence[Gemm],
    rows: list[dict[str, Any]],
    name: str,
    method: Method,
) -> None:
    """Measures another method for the rows that do not have it yet, and writes the table to `out`
    after each.
    """
    for gemm, row in zip(gemms, rows, strict=True):
        if len(row["wall_s"].get(name, ())) >= REPEATS:
            continue
        run = catalog.make("torch.mm").prepare(gemm, spec).run
        medians_us: list[float] = []
        wall_s: list[float] = []
        row["medians_us"][name] = medians_us
        row["wall_s"][name] = wall_s
        for _ in range(REPEATS):
            _once(method, run, spec, medians_us, wall_s)
        write_table(out, spec, rows)


def write_table(out: Path, spec: DeviceSpec, rows: list[dict[str, Any]]) -> None:
    """Writes the rows as a JSON file that `figures` reads."""
    table = {"device": spec.name, "kind": spec.kind, "repeats": REPEATS, "rows": rows}
    write_json(out, table)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, replacing the last one in one step."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
