"""The attention model against simple baselines, on held-out sites of the public tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.latency.attention import AttentionModel
from quantbench.latency.attention_cost_model import AttentionShapes, peak_tflops
from quantbench.latency.gaussian_process import GaussianProcess
from quantbench.latency.protocol import coverage, summarize
from quantbench.validate.attention_data import AttentionTable, held_out, read_attention
from quantbench.validate.gemm_runner import Step
from quantbench.validate.scores import Answer, Line, Score, line

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: (device, table, train rows, test rows, seed) to predictions for the test rows
Contestant = Callable[[DeviceSpec, AttentionTable, IntArray, IntArray, int], Answer]


def _ours(device: DeviceSpec, table: AttentionTable, train: IntArray, test: IntArray, seed: int) -> Answer:
    start = time.process_time()
    model = AttentionModel.fit(
        device, table.shapes[train], table.latency_us[train], cache_write=table.cache_write[train],
        prior="family-out", seed=seed,
    )  # fmt: skip
    fitted = time.process_time()
    predicted = model.predict(table.shapes[test], cache_write=table.cache_write[test])
    done = time.process_time()
    return Answer(predicted.latency_us, predicted.low_us, predicted.high_us, fitted - start, done - fitted)


def _prior(device: DeviceSpec, table: AttentionTable, train: IntArray, test: IntArray, seed: int) -> Answer:
    model = AttentionModel.prior(device, prior="family-out")
    predicted = model.predict(table.shapes[test], cache_write=table.cache_write[test])
    return Answer(predicted.latency_us, predicted.low_us, predicted.high_us)


def _roofline_us(device: DeviceSpec, shapes: AttentionShapes) -> FloatArray:
    compute_us = shapes.flops / (peak_tflops(device, shapes.dtype) * 1e6)
    return np.asarray(np.maximum(compute_us, shapes.min_bytes / (device.memory_gb_per_s * 1e3)))


def _roofline(device: DeviceSpec, table: AttentionTable, train: IntArray, test: IntArray, seed: int) -> Answer:
    return Answer(_roofline_us(device, table.shapes[test]))


def _fitted_roofline(device: DeviceSpec, table: AttentionTable, train: IntArray, test: IntArray, seed: int) -> Answer:
    from scipy.optimize import least_squares

    ideal, times = _roofline_us(device, table.shapes[train]), table.latency_us[train]

    def residuals(x: FloatArray) -> FloatArray:
        return np.asarray(np.log((np.exp(x[0]) + ideal * np.exp(x[1])) / times))

    launch, stretch = np.exp(least_squares(residuals, np.array([2.0, 0.3]), loss="soft_l1", f_scale=0.05).x)
    return Answer(launch + stretch * _roofline_us(device, table.shapes[test]))


def _logs(shapes: AttentionShapes) -> FloatArray:
    sizes = [shapes.batch, shapes.heads, shapes.kv_heads, shapes.seq_q, shapes.head_dim]
    return np.column_stack([*(np.log(size) for size in sizes), shapes.causal])


def _gaussian_process(device: DeviceSpec, table: AttentionTable, train: IntArray, test: IntArray, seed: int) -> Answer:
    shapes, unseen = table.shapes[train], table.shapes[test]
    learner = GaussianProcess.fit(
        _logs(shapes), np.log(_roofline_us(device, shapes) / table.latency_us[train]), seed=seed
    )
    return Answer(_roofline_us(device, unseen) / np.exp(learner.predict(_logs(unseen))[0]))


CONTESTANTS: dict[str, Contestant] = {
    "ours": _ours,
    "ours, nothing measured": _prior,
    "spec-sheet roofline": _roofline,
    "roofline with fitted launch and efficiency": _fitted_roofline,
    "Gaussian process on log efficiency": _gaussian_process,
}
_UNFITTED = {"ours, nothing measured", "spec-sheet roofline"}


def attention_lines(
    gpus: Sequence[str], train_rows: int, seeds: Sequence[int], progress: Callable[[Step], None]
) -> Iterator[Line]:
    """A line for each device and contestant, as they are done."""
    total = float(len(gpus) * len(CONTESTANTS))
    done = 0.0
    for gpu in gpus:
        device, table = lookup(gpu), read_attention(gpu)
        for name, contestant in CONTESTANTS.items():
            progress(Step(f"{gpu}, attention: {name}", done, total))
            fitted = name not in _UNFITTED
            scores = [_score(contestant, device, table, train_rows, seed) for seed in (seeds if fitted else seeds[:1])]
            yield line(gpu, "heads", name, train_rows if fitted else None, scores)
            done += 1


def _score(contestant: Contestant, device: DeviceSpec, table: AttentionTable, train_rows: int, seed: int) -> Score:
    train, test = held_out(table.shapes, train_rows, seed)
    answer = contestant(device, table, train, test, seed)
    measured = table.latency_us[test]
    covered = None
    if answer.low_us is not None and answer.high_us is not None:
        covered = coverage(measured, answer.low_us, answer.high_us)
    return Score(
        errors=summarize(answer.latency_us, measured),
        compute=None,
        unanswered=0.0,
        coverage=covered,
        cliffs=None,
        forecasts=None,
        levels=None,
        fit_s=answer.fit_s,
        shapes_per_s=None if answer.predict_s is None else len(test) / answer.predict_s,
        note=answer.note,
    )
