"""Other people's predictors, each in a process of its own: what it imports, leaks or crashes stays there.

A child reads one JSON object from its standard input and writes one to its standard output. It ends with os._exit,
for the handle of nvidia-matmul-heuristics crashes when it is destroyed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import MeasurementError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_LIMIT_S = 900.0


@dataclass(frozen=True)
class ForeignAnswer:
    """Predictions of a child, (rows,) in µs; nan where it has none. load_s, predict_s: seconds of one core."""

    latency_us: FloatArray
    load_s: float
    predict_s: float
    version: str


#: device slug → the name that nvidia-matmul-heuristics has for the card
HEURISTICS_GPUS = {
    "a100-sxm4-80gb": "A100_SXM_80GB", "a100-pcie-80gb": "A100_PCIE_80GB", "a30-24gb": "A30_PCIE",
    "l4-24gb": "L4", "l40s-48gb": "L40S", "h100-sxm5-80gb": "H100_SXM", "h100-pcie-80gb": "H100_PCIE",
    "h100-nvl-94gb": "H100_NVL", "h200-sxm-141gb": "H200_SXM", "b200-sxm-180gb": "B200",
    "gb200-186gb": "GB200_NVL", "gb300-279gb": "GB300_NVL", "rtx-pro-6000-96gb": "RTX_PRO_6000",
}  # fmt: skip
#: our dtype → its precision letters: inputs, accumulation, output
_PRECISION = {"bf16": "TST", "fp16": "HSH", "fp32": "SSS"}


def heuristics_missing(device: str, dtype: str) -> str | None:
    """Why nvidia-matmul-heuristics cannot be asked, in words; None when it can."""
    if find_spec("nvMatmulHeuristics") is None:
        return "the package nvidia-matmul-heuristics is not installed"
    if device not in HEURISTICS_GPUS:
        return f"nvidia-matmul-heuristics has no descriptor of {device}"
    return None if dtype in _PRECISION else f"nvidia-matmul-heuristics was not asked about {dtype}"


def heuristics(device: str, dtype: str, m: IntArray, n: IntArray, k: IntArray) -> ForeignAnswer:
    """The estimated run time of the configuration that nvidia-matmul-heuristics ranks first, for a row-major nt
    product. It is fitted to nothing."""
    request = {"gpu": HEURISTICS_GPUS[device], "precision": _PRECISION[dtype], "shapes": _shapes(m, n, k)}
    return _ask("quantbench.validate.child_heuristics", request)


def engine_missing() -> str | None:
    """Why aiconfigurator's engine cannot be asked, in words; None when it can."""
    return None if find_spec("aiconfigurator_core") else "the package aiconfigurator-core is not installed"


def engine(table: Mapping[str, str], rows: Mapping[str, Any], m: IntArray, n: IntArray, k: IntArray) -> ForeignAnswer:
    """aiconfigurator's own engine, given only `rows` (lists m, n, k, latency_ms) as its bf16 table.

    table: system, backend and version under which it looks them up.
    """
    return _ask("quantbench.validate.child_engine", {**table, "rows": dict(rows), "shapes": _shapes(m, n, k)})


def _shapes(m: IntArray, n: IntArray, k: IntArray) -> list[list[int]]:
    return [m.tolist(), n.tolist(), k.tolist()]


def _ask(module: str, request: Mapping[str, Any]) -> ForeignAnswer:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], input=json.dumps(request), capture_output=True, text=True,
            timeout=_LIMIT_S, env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MeasurementError("validate", f"{module} ran past {_LIMIT_S:.0f} s", "an answer") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MeasurementError("validate", f"{module} ended with {done.returncode}: {last[:200]}", "an answer")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    latency_us = np.array([np.nan if v is None else v for v in answer["latency_us"]], dtype=float)
    return ForeignAnswer(latency_us, answer["load_s"], answer["predict_s"], answer["version"])
