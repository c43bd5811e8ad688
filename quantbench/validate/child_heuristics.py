"""The child process that asks nvidia-matmul-heuristics; see `foreign`. Never imported."""

import json
import os
import sys
import time
from importlib.metadata import version

if __name__ == "__main__":
    from nvMatmulHeuristics import (
        NvMatmulHeuristicsFlags,
        NvMatmulHeuristicsInterfaceEx,
        NvMatmulHeuristicsMatmulLayout,
        NvMatmulHeuristicsNvidiaGpu,
    )

    request = json.load(sys.stdin)
    start = time.process_time()
    library = NvMatmulHeuristicsInterfaceEx(
        flags=NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        gpu=NvMatmulHeuristicsNvidiaGpu[request["gpu"]],
    )
    layout = NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR
    loaded = time.process_time()
    times_us = []
    for m, n, k in zip(*request["shapes"], strict=True):
        found = library.get(library.makeNvMatmulHeuristicsProblem(m, n, k, layout), 1, precision=request["precision"])
        times_us.append(found[0]["runtime"] * 1e6 if found else None)
    done = time.process_time()
    answer = {
        "latency_us": times_us,
        "load_s": loaded - start,
        "predict_s": done - loaded,
        "version": version("nvidia-matmul-heuristics"),
    }
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)
