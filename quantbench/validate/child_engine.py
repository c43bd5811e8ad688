"""The child process that asks aiconfigurator's engine on a table of chosen rows; see `foreign`. Never imported."""

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
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
        (root / f"{name}.yaml").write_text((systems / f"{name}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
        data = root / "data" / name / "gemm" / backend / framework_version
        data.mkdir(parents=True)
        columns = {
            "framework": [backend] * count, "version": [framework_version] * count, "device": [name] * count,
            "op_name": ["gemm"] * count, "kernel_source": ["table"] * count, "gemm_dtype": ["bfloat16"] * count,
            "m": rows["m"], "n": rows["n"], "k": rows["k"], "latency": rows["latency_ms"],
        }  # fmt: skip
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
    os._exit(0)
