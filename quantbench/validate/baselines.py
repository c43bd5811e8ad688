"""What a latency model has to beat: the spec sheet, and interpolation that knows nothing of tiles.

Efficiency is the spec-sheet roofline over the measured time; both learners work on its logarithm over log (m, n, k).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import UnsupportedError
from quantbench.latency.gaussian_process import GaussianProcess
from quantbench.workload.dtypes import DTYPES

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
#: (m, n, k), each (rows,), to microseconds
Predictor = Callable[[IntArray, IntArray, IntArray], FloatArray]


def roofline(device: DeviceSpec, dtype: str) -> Predictor:
    """The larger of FLOPs over the peak and bytes over the bandwidth, both as the spec sheet states them."""
    peak = device.peak(dtype)
    if peak is None:
        raise UnsupportedError("roofline", f"{dtype} on {device.name}", "one of " + ", ".join(device.peak_tflops))
    width, output = DTYPES[dtype].element_bytes, DTYPES[DTYPES[dtype].output].element_bytes

    def predict(m: IntArray, n: IntArray, k: IntArray) -> FloatArray:
        a, b, c = m.astype(float), n.astype(float), k.astype(float)
        compute_us = 2.0 * a * b * c / (peak * 1e6)
        memory_us = (width * (a * c + c * b) + output * a * b) / (device.memory_gb_per_s * 1e3)
        return np.asarray(np.maximum(compute_us, memory_us))

    return predict


def log_interpolation(
    device: DeviceSpec, dtype: str, m: IntArray, n: IntArray, k: IntArray, latency_us: FloatArray
) -> Predictor:
    """Linear interpolation of the logarithm of efficiency between the rows; outside of them the nearest row's."""
    from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator

    ideal = roofline(device, dtype)
    points, values = _logs(m, n, k), np.log(ideal(m, n, k) / latency_us)
    inside, outside = LinearNDInterpolator(points, values), NearestNDInterpolator(points, values)

    def predict(m: IntArray, n: IntArray, k: IntArray) -> FloatArray:
        where = _logs(m, n, k)
        found = inside(where)
        return np.asarray(ideal(m, n, k) / np.exp(np.where(np.isnan(found), outside(where), found)))

    return predict


def gaussian_process(
    device: DeviceSpec, dtype: str, m: IntArray, n: IntArray, k: IntArray, latency_us: FloatArray, *, seed: int = 0
) -> Predictor:
    """A Gaussian process on the logarithm of efficiency."""
    ideal = roofline(device, dtype)
    learner = GaussianProcess.fit(_logs(m, n, k), np.log(ideal(m, n, k) / latency_us), seed=seed)

    def predict(m: IntArray, n: IntArray, k: IntArray) -> FloatArray:
        return np.asarray(ideal(m, n, k) / np.exp(learner.predict(_logs(m, n, k))[0]))

    return predict


def _logs(m: IntArray, n: IntArray, k: IntArray) -> FloatArray:
    return np.asarray(np.log(np.column_stack([m, n, k]).astype(float)))
