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
from quantbench.latency.gemm_parameters import hand_prior

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


def choose(device: DeviceSpec, dtype: str, known: Sequence[Known], *, family_out: bool) -> tuple[Prior, float]:
    """The prior for a device and the half-width (log time) of a 90 % interval around its unfitted prediction.

    family_out: leave out every GPU of the device's generation, itself included. Products of 2-byte formats teach each
    other; other formats fall back to the spec sheet.
    """
    narrow = ("bf16", "fp16")
    usable = [k for k in known if k.dtype == dtype or {k.dtype, dtype} <= set(narrow)]
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


# A format or library of which nothing is known: a factor of e either way.
_UNKNOWN = 1.0
