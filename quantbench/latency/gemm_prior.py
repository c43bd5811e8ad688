"""What measured GPUs teach about one that is not: pooled parameters, with or without the target's own family."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import StoreError
from quantbench.latency.families import family, generation
from quantbench.latency.gemm_fit import Prior
from quantbench.latency.gemm_parameters import INDEX, hand_prior, runs_in_waves

FloatArray = npt.NDArray[np.float64]

POOL_FORMAT = "quantbench-gemm-pool"
POOL_VERSION = 2
# Shares of the hand prior's standard deviation: what may differ between two tables of one GPU, between two GPUs of one
# family, and at least between families. Chosen on the five public tables of `tables.DEFAULT_TABLES`.
_SAME_GPU, _SAME_FAMILY, _OTHER_FAMILY = 0.4, 0.5, 0.6


@dataclass(frozen=True)
class Known:
    """One GPU's parameters, fitted from the hand prior alone, and how far the others' pool was off on it.

    blind_90: the 90th percentile of |log time error| of what the other families predict for it, unmeasured.
    """

    device: str
    family: str
    dtype: str
    parameters: FloatArray
    rows: int
    table: str
    blind_90: float


@cache
def shipped_pool() -> tuple[Known, ...]:
    """The GPUs whose parameters come with the package."""
    text = (files("quantbench.latency") / "models" / "pool.json").read_text(encoding="utf-8")
    data = json.loads(text)
    if data.get("format") != POOL_FORMAT or data.get("version") != POOL_VERSION:
        raise StoreError("shipped_pool", f"format {data.get('format')!r} version {data.get('version')!r}", POOL_FORMAT)
    return tuple(Known(**{**k, "parameters": np.array(k["parameters"])}) for k in data["known"])


def pool_to_json(known: Sequence[Known]) -> dict[str, Any]:
    """As it is stored in models/pool.json."""
    rows = [{**vars(k), "parameters": [round(float(z), 5) for z in k.parameters]} for k in known]
    return {"format": POOL_FORMAT, "version": POOL_VERSION, "known": rows}


def pooled(known: Sequence[Known]) -> Prior:
    """The mean over families of each family's mean, with the spread between families."""
    mean, sd = hand_prior()
    if not known:
        return Prior(mean, sd, "the spec sheet")
    by_family: dict[str, list[FloatArray]] = defaultdict(list)
    for k in known:
        by_family[k.family].append(k.parameters)
    centres = np.array([np.mean(group, axis=0) for group in by_family.values()])
    count = len(centres)
    pool = (centres.sum(axis=0) + mean) / (count + 1.0)
    variance = (((centres - pool) ** 2).sum(axis=0) + 2.0 * (_OTHER_FAMILY * sd) ** 2) / (count + 1.0)
    return Prior(pool, np.sqrt(variance), "pooled over " + ", ".join(sorted(k.device for k in known)))


def near(known: Sequence[Known], *, same_gpu: bool) -> Prior:
    """Around the mean of GPUs that are the target itself or of its family."""
    _, sd = hand_prior()
    mean = np.mean([k.parameters for k in known], axis=0)
    share = _SAME_GPU if same_gpu else _SAME_FAMILY
    return Prior(mean, share * sd, ", ".join(sorted(k.device for k in known)))


def spec_sheet(device: DeviceSpec, dtype: str) -> tuple[Prior, float]:
    """The prior of a number format that no table teaches, and the half-width (log time) of its 90 % interval.

    fp32 runs on the CUDA cores, every other format on the tensor cores. The hand prior is one for tensor cores; two of
    its parameters differ on CUDA cores. A row that is not 16-byte aligned costs nothing: the requirement is that of
    tensor cores (cuBLAS documentation, "Tensor Core Usage"). And a block's pipeline fills in about the same time, in
    which the slower cores do fewer elements of k.
    """
    mean, sd = hand_prior()
    if dtype != "fp32":
        return Prior(mean, sd, "the peak of its tensor cores and its bandwidth"), _BLIND_TENSOR_CORES
    mean[INDEX["misaligned"]] = 0.0
    tensor_cores = device.peak("fp16") or device.peak("bf16")
    if tensor_cores is not None:
        mean[INDEX["fill"]] += np.log(device.peak_tflops["fp32"] / tensor_cores)
    return Prior(mean, sd, "the peak of its CUDA cores and its bandwidth"), _BLIND_CUDA_CORES


def known_in_waves(device: DeviceSpec, dtype: str) -> bool:
    """Whether what was measured on this GPU, or else on its family, says that products run in waves."""
    return _known_in_waves(device.name, family(device), dtype)


@cache
def _known_in_waves(device: str, family_name: str, dtype: str) -> bool:
    usable = [k for k in shipped_pool() if _teaches(k, dtype)]
    known = [k for k in usable if k.device == device] or [k for k in usable if k.family == family_name]
    return bool(known) and runs_in_waves([k.parameters for k in known])


def _teaches(known: Known, dtype: str) -> bool:
    """Whether products of a format can be predicted from what is known: 2-byte formats teach each other."""
    return known.dtype == dtype or {known.dtype, dtype} <= set(_NARROW)


def choose(device: DeviceSpec, dtype: str, known: Sequence[Known], *, family_out: bool) -> tuple[Prior, float]:
    """The prior for a device and the half-width (log time) of a 90 % interval around its unfitted prediction.

    family_out: leave out every GPU of the device's generation, itself included. Products of 2-byte formats teach each
    other; other formats fall back to the spec sheet.
    """
    usable = [k for k in known if _teaches(k, dtype)]
    if not usable and dtype not in _NARROW:
        return spec_sheet(device, dtype)
    others = [k for k in usable if generation(k.family) != generation(family(device))]
    blind = max((k.blind_90 for k in others), default=_UNKNOWN)
    if not family_out:
        own = [k for k in usable if k.device == device.name]
        if own:
            return near(own, same_gpu=True), blind / 2
        kin = [k for k in usable if k.family == family(device)]
        if kin:
            return near(kin, same_gpu=False), blind
        others = usable
    return pooled(others), blind if others else _UNKNOWN


# 2-byte formats, nothing being known of any: a factor of e either way.
_UNKNOWN = 1.0
_NARROW = ("bf16", "fp16")
# Half-widths, in log time, that hold 90 % of the rows of public tables against `spec_sheet`, each GPU counted alike.
# fp32: NeuSight's linear products above 200 µs on P100, V100, T4 and A100 (all PCIe). DeepBench's fp32 products on a
# V100 SXM2 are within it too. The T4 sets the width: its power limit holds it at half its peak.
_BLIND_CUDA_CORES = 0.65
# fp8: the tables of aiconfigurator-core 0.12.0 (vLLM 0.24.0) of H100, H200, B200, L40S and RTX PRO 6000.
_BLIND_TENSOR_CORES = 1.4
