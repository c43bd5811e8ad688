"""Predicts GEMM times with the package nvidia-matmul-heuristics, in a child process.

`heuristics` is the entry point. The child runs this module. It ends with os._exit, because
destroying the package's handle crashes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec

import numpy as np

from tools.accuracy.aiconfigurator_engine import ask_child, print_answer
from tools.accuracy.contests import Answer
from tools.accuracy.tables import GemmTable

#: device slug → name of the card in nvidia-matmul-heuristics
HEURISTICS_GPUS = {
    "a100-sxm4-80gb": "A100_SXM_80GB", "a100-pcie-80gb": "A100_PCIE_80GB",
    "a30-24gb": "A30_PCIE", "l4-24gb": "L4", "l40s-48gb": "L40S", "h100-sxm5-80gb": "H100_SXM",
    "h100-pcie-80gb": "H100_PCIE", "h100-nvl-94gb": "H100_NVL", "h200-sxm-141gb": "H200_SXM",
    "b200-sxm-180gb": "B200",
    "gb200-186gb": "GB200_NVL", "gb300-279gb": "GB300_NVL", "rtx-pro-6000-96gb": "RTX_PRO_6000",
}  # fmt: skip
#: dtype → the package's letters for the precision of inputs, accumulation and output
_PRECISION = {"bf16": "TST", "fp16": "HSH", "fp32": "SSS"}


def heuristics_missing(device: str, dtype: str) -> str:
    """Returns why nvidia-matmul-heuristics cannot be asked about a device and dtype; "" if it can.

    device: slug of the GPU.
    """
    if find_spec("nvMatmulHeuristics") is None:
        return "the package nvidia-matmul-heuristics is not installed"
    if device not in HEURISTICS_GPUS:
        return f"nvidia-matmul-heuristics has no descriptor of {device}"
    return "" if dtype in _PRECISION else f"nvidia-matmul-heuristics was not asked about {dtype}"


def heuristics(asked: GemmTable) -> Answer:
    """Returns the package's estimated time of each GEMM, taken as row-major nt.

    This is the time of the kernel configuration that the package ranks first.

    asked: GEMMs to estimate.
    """
    request = {
        "gpu": HEURISTICS_GPUS[asked.gpu],
        "precision": _PRECISION[asked.dtype],
        "shapes": np.stack(asked.shapes).tolist(),
    }
    return ask_child("tools.accuracy.heuristics", request)


def _answer_as_child() -> None:
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
        problem = library.makeNvMatmulHeuristicsProblem(m, n, k, layout)
        found = library.get(problem, 1, precision=request["precision"])
        times_us.append(found[0]["runtime"] * 1e6 if found else None)
    print_answer(times_us, start, loaded)
    os._exit(0)


if __name__ == "__main__":
    _answer_as_child()
