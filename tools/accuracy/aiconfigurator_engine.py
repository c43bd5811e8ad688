"""Runs aiconfigurator's engine in a child process, with selected rows as its only table. The child,
which is this module, isolates the engine's imports, memory leaks and crashes; it reads and writes
JSON objects on its standard streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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
    return (
        None
        if find_spec("aiconfigurator_core")
        else "the package aiconfigurator-core is not installed"
    )


def engine(
    table: Mapping[str, str], rows: Mapping[str, Any], m: IntArray, n: IntArray, k: IntArray
) -> ChildAnswer:
    """Returns the engine's times of GEMMs, with `rows` (lists m, n, k, latency_ms) as its whole
    bf16 table.

    table: system, backend and version under which the engine stores its tables.
    m, n, k: (rows,) GEMM sizes.
    """
    shapes = [m.tolist(), n.tolist(), k.tolist()]
    return ask_child(
        "tools.accuracy.aiconfigurator_engine", {**table, "rows": dict(rows), "shapes": shapes}
    )


def ask_child(module: str, request: Mapping[str, Any]) -> ChildAnswer:
    """Runs `python -m module` with the request as JSON on standard input, and parses the JSON on
    its last output line.

    Raises MeasurementError if the child fails or takes more than 900 s.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MeasurementError(
            "validate", f"{module} ran past {_LIMIT_S:.0f} s", "an answer"
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MeasurementError(
            "validate", f"{module} ended with {done.returncode}: {last[:200]}", "an answer"
        )
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    latency_us = np.array([np.nan if v is None else v for v in answer["latency_us"]], dtype=float)
    return ChildAnswer(latency_us, answer["load_s"], answer["predict_s"], answer["version"])


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
    name, backend, framework_version = request["system"], request["backend"], request["version"]
    rows = request["rows"]
    count = len(rows["m"])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / f"{name}.yaml").write_text(
            (systems / f"{name}.yaml").read_text(encoding="utf-8"), encoding="utf-8"
        )
        data = root / "data" / name / "gemm" / backend / framework_version
        data.mkdir(parents=True)
        columns = {
            "framework": [backend] * count,
            "version": [framework_version] * count,
            "device": [name] * count,
            "op_name": ["gemm"] * count,
            "kernel_source": ["table"] * count,
            "gemm_dtype": ["bfloat16"] * count,
            "m": rows["m"],
            "n": rows["n"],
            "k": rows["k"],
            "latency": rows["latency_ms"],
        }
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
        done = time.process_time()
    answer = {
        "latency_us": times_us,
        "load_s": loaded - start,
        "predict_s": done - loaded,
        "version": version("aiconfigurator-core"),
    }
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _answer_as_child()
