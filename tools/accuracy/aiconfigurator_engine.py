"""Runs aiconfigurator's engine in a child process, with selected rows as its only table. The child,
which is this module, isolates the engine's imports, memory leaks and crashes; it reads and writes
JSON objects on its standard streams."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import MeasurementError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_LIMIT_S = 900.0


@dataclass(frozen=True)
class ChildAnswer:
    """Predictions of a child process.

    latency_us: (rows,) predicted times in µs, nan if the predictor has none.
    load_s, predict_s: CPU time of loading the table and of predicting, seconds.
    version: version of the predictor's package.
    """

    latency_us: FloatArray
    load_s: float
    predict_s: float
    version: str


def engine_missing() -> str | None:
    """Returns the reason why aiconfigurator's engine is not available, None if it is."""
    if find_spec("aiconfigurator_core"):
        return None
    return "the package aiconfigurator-core is not installed"


def engine(
    table: Mapping[str, str],
    m: IntArray,
    n: IntArray,
    k: IntArray,
    latency_us: FloatArray,
    asked: Sequence[IntArray],
) -> ChildAnswer:
    """Returns the engine's times of the GEMMs `asked` (m, n, k), with these rows as its whole bf16
    table.

    table: system, backend and version under which the engine stores its tables.
    m, n, k, latency_us: (rows,) each.
    """
    latency_ms = (latency_us / 1e3).tolist()
    rows = {"m": m.tolist(), "n": n.tolist(), "k": k.tolist(), "latency": latency_ms}
    request = {**table, "rows": rows, "shapes": np.stack(asked).tolist()}
    return ask_child("tools.accuracy.aiconfigurator_engine", request)


def ask_child(module: str, request: Mapping[str, Any]) -> ChildAnswer:
    """Runs `python -m module` with the request as JSON on standard input, and parses the JSON on
    its last output line.

    Raises MeasurementError if the child fails or takes more than 900 s.
    """
    path = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            check=False,
        )
    except subprocess.TimeoutExpired:
        late = f"{module} ran past {_LIMIT_S:.0f} s"
        raise MeasurementError("validate", late, "an answer") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        failed = f"{module} ended with {done.returncode}: {last[:200]}"
        raise MeasurementError("validate", failed, "an answer")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    # No answer is null, which becomes nan.
    return ChildAnswer(**{**answer, "latency_us": np.array(answer["latency_us"], dtype=float)})


def print_answer(
    times_us: Sequence[float | None], start: float, loaded: float, package: str
) -> None:
    """Prints the child's answer. start, loaded: CPU seconds before and after loading the table."""
    answer = {
        "latency_us": times_us,
        "load_s": loaded - start,
        "predict_s": time.process_time() - loaded,
        "version": version(package),
    }
    print("\n" + json.dumps(answer), flush=True)


def _answer_as_child() -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from aiconfigurator_core.sdk import common, perf_database
    from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError
    from aiconfigurator_core.sdk.operations.gemm import GEMM

    request = json.load(sys.stdin)
    spec = find_spec("aiconfigurator_core")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    systems = Path(next(iter(spec.submodule_search_locations))) / "systems"
    name = request["system"]
    backend = request["backend"]
    framework_version = request["version"]
    same = {
        "framework": backend,
        "version": framework_version,
        "device": name,
        "op_name": "gemm",
        "kernel_source": "table",
        "gemm_dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copy(systems / f"{name}.yaml", root)
        data = root / "data" / name / "gemm" / backend / framework_version
        data.mkdir(parents=True)
        columns = request["rows"]
        for column, value in same.items():
            columns[column] = [value] * len(columns["m"])
        pq.write_table(pa.table(columns), data / "gemm_perf.parquet")
        start = time.process_time()
        # Its own rows only: by default it would fill gaps from sibling tables of the package.
        database = perf_database.get_database(
            name, backend, framework_version, systems_paths=str(root), shared_layer=False
        )
        GEMM.load_data(database)
        loaded = time.process_time()
        times_us: list[float | None] = []
        for m, n, k in zip(*request["shapes"], strict=True):
            product = GEMM("gemm", 1.0, n, k, common.GEMMQuantMode.bfloat16)
            try:
                times_us.append(float(product._engine_query(database, x=m)) * 1e3)
            except PerfDataNotAvailableError:  # no row near enough
                times_us.append(None)
        print_answer(times_us, start, loaded, "aiconfigurator-core")


if __name__ == "__main__":
    _answer_as_child()
