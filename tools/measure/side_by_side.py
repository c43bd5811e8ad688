"""Times the same GEMMs by several methods in turn, and stores the medians and the time spent.

`measure_rows` is the entry point. `tools.measure.cost` calls it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantbench.device.spec import DeviceSpec
from quantbench.errors import UnsupportedError
from quantbench.files import read_json, write_file
from quantbench.providers import catalog
from quantbench.stats import typical_us
from quantbench.sweep.worker import copier
from quantbench.timing.options import TimingOptions
from quantbench.timing.session import Timer
from quantbench.workload import Gemm
from tools.measure.other_methods import Case, Method

REPEATS = 3


def by_timer(timer: Timer) -> Method:
    """Returns our timer as a method. Its only sample is the time that the timer states."""

    def samples_us(case: Case) -> list[float]:
        provider = catalog.make("torch.mm")
        copy = copier(provider, case.gemm, case.spec, TimingOptions())
        # A CUDA graph with a cold cache may need too many copies of the inputs.
        with suppress(UnsupportedError):
            measured = timer.measure(case.run, copy=copy, min_bytes=case.gemm.min_bytes)
            return [measured.stated.latency_us]
        return []

    return samples_us


def prepare(gemm: Gemm, spec: DeviceSpec) -> Case:
    return Case(gemm, spec, catalog.make("torch.mm").prepare(gemm, spec).run)


def measure_rows(
    out: Path, spec: DeviceSpec, gemms: Sequence[Gemm], methods: Mapping[str, Method]
) -> list[dict[str, Any]]:
    """Times GEMMs by the methods that the table in the file `out` lacks; returns all its rows.

    The table is written after each GEMM. A row has, for each method, the medians (microseconds) and
    the seconds spent, by repeat. It also has the seconds for making the inputs, which are the same
    for every method.
    """
    rows: list[dict[str, Any]] = []
    if out.exists():
        rows = read_json(out)["rows"]
    known = {row["workload"]: row for row in rows}
    for gemm in gemms:
        row = known.get(str(gemm))
        missing = [name for name in methods if row is None or name not in row["wall_s"]]
        if not missing:
            continue
        start_s = time.perf_counter()
        case = prepare(gemm, spec)
        if row is None:
            row = {
                "workload": str(gemm),
                "sizes": [gemm.m, gemm.n, gemm.k],
                "medians_us": {},
                "wall_s": {},
                "prepare_s": time.perf_counter() - start_s,
            }
        for _ in range(REPEATS):
            for name in missing:
                start_s = time.perf_counter()
                samples = methods[name](case)
                medians_us = row["medians_us"].setdefault(name, [])
                if samples:
                    medians_us.append(typical_us(samples))
                seconds = time.perf_counter() - start_s
                row["wall_s"].setdefault(name, []).append(seconds)
        if str(gemm) not in known:
            rows.append(row)
        write_table(out, spec, rows)
    return rows


def write_table(out: Path, spec: DeviceSpec, rows: list[dict[str, Any]]) -> None:
    """Writes the rows as a JSON file from which `figures` makes Markdown tables."""
    table = {"device": spec.name, "repeats": REPEATS, "rows": rows}
    write_json(out, table)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file in one step, so that none is left half written."""
    write_file("measure", path, json.dumps(value, indent=1) + "\n")
