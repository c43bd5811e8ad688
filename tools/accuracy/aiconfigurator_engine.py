"""Predicts GEMM times with aiconfigurator's engine, whose only table is a selection of rows.

`engine` is the entry point. It runs this module as a child process, which isolates the engine's
imports, memory leaks and crashes. The child reads and writes JSON on its standard streams.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quantbench.errors import MeasurementError
from quantbench.importers.aiconfigurator import systems_folder
from tools.accuracy.contests import Answer
from tools.accuracy.tables import GemmTable

_LIMIT_S = 900.0


def engine(place: Sequence[str], rows: GemmTable, asked: GemmTable) -> Answer:
    """Runs this module as a child process; returns the engine's times of GEMMs.

    place: system, backend and version under which the engine stores its tables.
    rows: the only rows of the engine's bf16 table.
    asked: GEMMs to predict.
    Raises MeasurementError if the child fails or takes more than 900 s.
    """
    columns = {name: column.tolist() for name, column in rows.sizes.items()}
    columns["latency"] = (rows.latency_us / 1e3).tolist()
    request = {"place": place, "rows": columns, "shapes": np.stack(asked.shapes).tolist()}
    path = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            check=False,
        )
    except subprocess.TimeoutExpired:
        late = f"{__name__} ran past {_LIMIT_S:.0f} s"
        raise MeasurementError("validate", late, "an answer") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        failed = f"{__name__} ended with {done.returncode}: {last[:200]}"
        raise MeasurementError("validate", failed, "an answer")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    # A GEMM without an answer has the time null, which becomes nan.
    return Answer(**{**answer, "latency_us": np.array(answer["latency_us"], dtype=float)})


def _answer_as_child() -> None:
    """Reads a request from standard input, and prints the answer as the last line."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from aiconfigurator_core.sdk import common, perf_database
    from aiconfigurator_core.sdk.errors import PerfDataNotAvailableError
    from aiconfigurator_core.sdk.operations.gemm import GEMM

    request = json.load(sys.stdin)
    systems = systems_folder()
    assert systems is not None
    system, backend, framework_version = request["place"]
    same = {
        "framework": backend,
        "version": framework_version,
        "device": system,
        "op_name": "gemm",
        "kernel_source": "table",
        "gemm_dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copy(systems / f"{system}.yaml", root)
        data = root / "data" / system / "gemm" / backend / framework_version
        data.mkdir(parents=True)
        columns = request["rows"]
        for column, value in same.items():
            columns[column] = [value] * len(columns["m"])
        pq.write_table(pa.table(columns), data / "gemm_perf.parquet")
        start = time.process_time()
        # `shared_layer=False` keeps the engine to these rows. By default it fills gaps from sibling
        # tables of the package.
        database = perf_database.get_database(
            system, backend, framework_version, systems_paths=str(root), shared_layer=False
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
        predict_s = time.process_time() - loaded
        answer = {"latency_us": times_us, "fit_s": loaded - start, "predict_s": predict_s}
        print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _answer_as_child()
