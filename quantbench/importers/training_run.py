"""Summarizes the speed and the loss of training runs from their logs.

Speeds are medians over the iterations with the log's last batch size. The first iteration after
each start is left out. The module also names the fastest of several runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.importers.megatron_log import FloatArray, Iterations
from quantbench.stats import Interval, median_interval


@dataclass(frozen=True)
class TrainingSummary:
    """Summary of a training log. Values that the log does not contain are None.

    name: name of the log.
    arguments: settings of the job by name (see `Iterations.arguments`), with the log's last gbs
        (global batch size) and seq.
    iterations: number of distinct iterations. An iteration that a restart repeats counts once.
    restarts: number of restarts of the job.
    sec_per_it: median time of an iteration in s.
    tokens_per_s: median tokens per second of the whole job.
    tokens_per_s_within: 95 % interval of the median tokens_per_s.
    tflops: median TFLOP/s per GPU, as logged.
    first_loss, last_loss: first and last finite loss.
    nan_losses: number of losses that are not finite; 0 if no loss is finite.
    left_out: number of lines left out, by reason.
    """

    name: str
    arguments: dict[str, Any]
    iterations: int
    restarts: int
    sec_per_it: float
    tokens_per_s: float | None
    tokens_per_s_within: Interval | None
    tflops: float | None
    first_loss: float | None
    last_loss: float | None
    nan_losses: int
    left_out: dict[str, int]


def summarize(name: str, found: Iterations) -> TrainingSummary:
    """Summarizes the iterations of one log.

    name: name of the log in the summary.
    """
    steady = _steady(found)
    tokens = _finite(found.tokens_per_s[steady])
    losses = found.values["loss"]
    numbers = _finite(losses)
    seq = _finite(found.seq)
    arguments = {**found.arguments, "gbs": int(found.values["gbs"][-1])}
    if len(seq):
        arguments["seq"] = round(float(seq[-1]))
    return TrainingSummary(
        name=name,
        arguments=arguments,
        iterations=len(np.unique(found.values["iteration"])),
        restarts=int(found.segment[-1]),
        sec_per_it=float(np.median(found.values["elapsed_s"][steady])),
        tokens_per_s=_median(tokens),
        tokens_per_s_within=median_interval(tokens) if len(tokens) else None,
        tflops=_median(_finite(found.values["tflops"][steady])),
        first_loss=_median(numbers[:1]),
        last_loss=_median(numbers[-1:]),
        nan_losses=(len(losses) - len(numbers)) * bool(len(numbers)),
        left_out=dict(found.left_out),
    )


def _median(values: FloatArray) -> float | None:
    """Returns the median, or None if there are no values."""
    return float(np.median(values)) if len(values) else None


def _finite(values: FloatArray) -> FloatArray:
    return np.asarray(values[np.isfinite(values)])


def _steady(found: Iterations) -> npt.NDArray[np.bool_]:
    """Returns a mask of the iterations whose speed is representative, (iterations,).

    These iterations have the last batch size and are not the first after a start. If there are
    none, the mask selects all iterations with the last batch size.
    """
    # While the batch size ramps up, the workload changes every few iterations. The first iteration
    # after a start fills caches.
    same = found.values["gbs"] == found.values["gbs"][-1]
    steady = same & (np.diff(found.segment, prepend=-1) == 0)
    return np.asarray(steady if steady.any() else same)


def fastest(summaries: Sequence[TrainingSummary]) -> str:
    """Returns a sentence that names the log with the most tokens per second and GPU.

    The sentence is "" if no log contains both its tokens per second and its number of GPUs.
    """
    per_gpu = {}
    for one in summaries:
        gpus = one.arguments.get("gpus")
        if one.tokens_per_s is not None and gpus:
            per_gpu[one.name] = one.tokens_per_s / gpus
    if not per_gpu:
        return ""
    name = max(per_gpu, key=per_gpu.__getitem__)
    return f"most tokens per GPU: {per_gpu[name]:.0f} a second in {name}"
