"""What is known of attention before anything is measured on a device: the parameters of GPUs that were measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.latency.attention_physics import PARAMETERS, SPREAD, START
from quantbench.latency.attention_tiles import FAMILIES, KernelFamily, assumed_family
from quantbench.latency.families import family, family_of, generation

FloatArray = npt.NDArray[np.float64]

# Where nothing at all was measured: factors on the predicted time that the interval spans.
_BLIND_BELOW, _BLIND_ABOVE = float(np.log(2.0)), float(np.log(3.0))
# A parameter that several GPUs agree on may still differ on the next one.
_LEAST_SPREAD = 0.2


@dataclass(frozen=True)
class Knowledge:
    """Where a fit starts and how far it may go cheaply; what a prior predicts with, and how far off that was on other
    GPUs (90 %, in log time). words: the same for people."""

    family: KernelFamily
    start: FloatArray
    spread: FloatArray
    log_below: float
    log_above: float
    words: str


def knowledge(device: DeviceSpec, *, family_out: bool) -> Knowledge:
    """What the shipped models know about `device`. family_out: without those of its generation."""
    shipped = [model for model in map(shipped_json, shipped_slugs()) if model is not None]
    own = family(device)
    same = [model for model in shipped if _family_of(model) == own]
    foreign = [model for model in shipped if generation(_family_of(model)) != generation(own)]
    others = foreign if family_out else shipped
    if not others:
        words = "from the spec sheet alone; the interval is a guess"
        return Knowledge(assumed_family(device.compute_capability), START, SPREAD, _BLIND_BELOW, _BLIND_ABOVE, words)
    per_family: dict[str, list[FloatArray]] = {}
    for model in others:
        per_family.setdefault(_family_of(model), []).append(_parameters(model))
    means = np.array([np.mean(group, axis=0) for group in per_family.values()])
    start, spread = means.mean(axis=0), np.maximum(means.std(axis=0), _LEAST_SPREAD)
    kernels = assumed_family(device.compute_capability)
    names = ", ".join(model["device"] for model in others)
    words = f"from the spec sheet and the models of {names}; nothing measured on it"
    if same and not family_out:
        start, kernels = np.mean([_parameters(m) for m in same], axis=0), FAMILIES[same[0]["family"]]
        names = ", ".join(model["device"] for model in same)
        words = f"from the spec sheet and its relatives {names}; nothing measured on it"
    transfers = [model["provenance"]["transfer"] for model in others]
    below = max(-transfer["log_low"] for transfer in transfers)
    above = max(transfer["log_high"] for transfer in transfers)
    return Knowledge(kernels, start, spread, max(0.0, below), max(0.0, above), words)


def _family_of(model: dict[str, Any]) -> str:
    major, minor = model["provenance"]["compute_capability"]
    return family_of((major, minor))


def _parameters(model: dict[str, Any]) -> FloatArray:
    return np.array([float(model["parameters"][p.name]) for p in PARAMETERS])


@cache
def shipped_slugs() -> tuple[str, ...]:
    """Devices that an attention model is shipped for."""
    names = [entry.name for entry in files("quantbench.latency.shipped").iterdir()]
    return tuple(
        sorted(n.removeprefix("attention-").removesuffix(".json") for n in names if n.startswith("attention-"))
    )


@cache
def shipped_json(slug: str) -> dict[str, Any] | None:
    """The shipped model of a device as `AttentionModel.to_json` wrote it; None where there is none."""
    if slug not in shipped_slugs():
        return None
    text = files("quantbench.latency.shipped").joinpath(f"attention-{slug}.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
