"""Predicts softmax times in unfused attention from bytes, waves of row blocks and launches.

Three implementations are modelled: Megatron's fused kernel, Megatron's separate kernels, which run
if the fused kernel's constraints are not met, and PyTorch's softmax. `SoftmaxModel.best` returns
the fitted model that the package contains for a device, or a prior from the spec sheet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quantbench.device.registry import same_chip
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.autodiff import FloatArray
from quantbench.latency.estimate import (
    Estimates,
    bounded,
    measured_times,
    name_bound,
    require_format,
)
from quantbench.workload import Softmax
from quantbench.workload.dtypes import element_bytes

# The kernels differ. Megatron's fused kernel applies scale and mask, and reads and writes each
# element once. If the constraints of the fused kernel are not met, Megatron runs separate
# kernels in fp32 (cast, mask, softmax, cast). In 16-bit dtypes, these move 5 to 9 times the bytes
# of the fused kernel forward, and 3 to 4.5 times its bytes backward. PyTorch's softmax has neither
# scale nor mask. PyTorch's kernel holds a row of up to 1024 columns in a warp's registers. A wider
# row is processed by one block, which reads the row once for each of maximum, sum and result
# (aten/src/ATen/native/cuda/SoftMax.cu, PersistentSoftmax.cuh, 2.1).
#
# The packaged models are fitted to measured times of PyTorch's softmax in fp32. Megatron's kernel
# is PyTorch's kernel for rows in registers, with scale and mask added (scaled_masked_softmax.h:
# "extended softmax (from native aten pytorch)"). `SoftmaxModel.best` therefore gives Megatron's
# kernel the fitted fraction of the bandwidth and the fitted cost of a wave. The launch time of
# Megatron's kernel comes from the prior, because the measured times include the launch from Python.
# On GPUs without a packaged model, the intervals come from published bandwidths.
_WHO = "SoftmaxModel"
MODEL_FORMAT = "quantbench-softmax-model"
MODEL_VERSION = 1
#: models fitted to published tables (`tools.ship`), a JSON object by device
SHIPPED = Path(__file__).parent / "models" / "softmax.json"
LIBRARIES = ("megatron", "torch")

# A block of 128 threads holds 4 rows of more than 128 columns, one warp per row (Megatron's
# scaled_masked_softmax.h), and 16 such blocks fill the 2048 threads of an SM.
_ROWS_PER_BLOCK = 4
_BLOCKS_PER_SM = 16
# A row of fewer columns counts as a row of this many columns, the lanes of a warp. (The kernel pads
# a row to the next power of two, log2_elements in the same file.)
_LEAST_COLUMNS = 32
#: Number of launches that are counted for Megatron's separate kernels: cast, softmax and cast. For
#: the kernel that applies a mask, only the bytes are counted (`fallback_bytes`).
_FALLBACK_KERNELS = 3

# Maps each parameter, a logarithm, to its start, optimistic and pessimistic value. Launch and drain
# of a small kernel take 2 to 8 µs. A kernel reaches from 0.93 (as a copy does) down to 0.5 of the
# memory bandwidth. Each wave of row blocks has a fixed cost of 0.2 to 3 µs.
_PARAMETERS = {
    "log_launch_us": np.log((3.5, 2.0, 8.0)),
    "log_memory_efficiency": np.log((0.8, 0.93, 0.5)),
    "log_wave_us": np.log((0.7, 0.2, 3.0)),
    # A time measured from Python is at least the host's launch time of 30 to 60 µs. A time measured
    # by a timer on the GPU does not include that launch.
    "log_host_us": np.log((0.1, 0.1, 10.0)),
    # Cost of a byte in wide rows, which do not fit in PyTorch's registers, over that in other rows.
    # The cost is near 1, because most repeated reads hit in L2.
    "log_wide": np.log((1.0, 1.0, 2.0)),
    # Extra time of wide rows. The unit is the time in which memory moves the softmax's bytes, or
    # the bytes of a full L2 if the softmax moves more. On four GPUs, such an extra time was seen
    # to grow with the bytes up to the size of L2.
    "log_wide_cached": np.log((1.0, 0.3, 3.0)),
}
# Parameters that `SoftmaxModel.best` gives Megatron's kernel from a fit to PyTorch's kernel.
_SHARED = ("log_memory_efficiency", "log_wave_us")
# Start, optimistic and pessimistic values of all parameters, (parameters,) each.
_START, _FAST, _SLOW = zip(*np.array([*_PARAMETERS.values()]).tolist(), strict=True)
_INDEX = {name: i for i, name in enumerate(_PARAMETERS)}
# Widest row, in columns, that PyTorch's kernel holds in registers.
_WIDEST_IN_REGISTERS = 1024
# The latency is the p-norm, with this p, of the host's launch time and the GPU's time. The two
# overlap, so p is large and the latency is close to the longer time.
_HOST_NORM = 8.0
_FEWEST_ROWS = 6  # smallest number of rows for a fit
_NOISE = 0.05  # standard deviation of the measured log times, which weighs rows against the prior


@dataclass(frozen=True)
class SoftmaxModel:
    """Latency model of `Softmax` on one device.

    parameters: logarithms of the parameters, in the order of _PARAMETERS.
    half_width: half-width of the fit's 90 % interval in log time. It is None for a pure prior,
        whose interval spans the times of the optimistic and the pessimistic parameters. If `rows`
        is 0 but half_width is given, the model uses parameters from a fit to PyTorch's softmax
        (`best`), and the half-width is added to such a span.
    rows: number of measured shapes of this library's kernel that the model was fitted to; 0 if the
        kernel was not measured.
    note: source and caveats of the predictions.
    library: library whose kernel runs, one of LIBRARIES.

    >>> from quantbench.device import lookup
    >>> model = SoftmaxModel.prior(lookup("a100-sxm4-80gb"))
    >>> model.predict([Softmax(64, 2048, 2048)])[0].bound
    'memory'
    """

    device: DeviceSpec
    parameters: tuple[float, ...]
    half_width: float | None
    rows: int
    note: str
    library: str = "megatron"

    @classmethod
    def prior(cls, device: DeviceSpec, *, library: str = "megatron") -> SoftmaxModel:
        """Returns an unfitted model from the spec sheet, with wide intervals."""
        require_choice(_WHO, "library", library, LIBRARIES)
        note = f"softmax on {device.name}: from the spec sheet, nothing measured"
        return cls(device, _START, None, 0, f"{note}; the interval is a guess", library)

    @classmethod
    def best(cls, device: DeviceSpec, *, library: str = "megatron") -> SoftmaxModel:
        """Returns the model shipped for a device, or the device's prior if none is shipped.

        The shipped models are fitted to PyTorch's softmax. For Megatron's kernel, the result is the
        prior, in which the parameters that both kernels share (`_SHARED`) have the shipped model's
        values. The result's `note` names its source.
        """
        prior = cls.prior(device, library=library)
        shipped = [_shipped()[name] for name in same_chip(device.name) if name in _shipped()]
        if not shipped:
            return prior
        data = shipped[0]
        measured = cls.from_json({**data, "device": device.name}, device)
        if library == measured.library:
            return measured
        note = (
            f"softmax on {device.name}: Megatron's kernel is taken to reach the bandwidth of "
            f"PyTorch's, of which {measured.rows:,} shapes were measured there"
        )
        shared = measured._sharing(prior.parameters)
        return replace(prior, parameters=shared, half_width=measured.half_width, note=note)

    @classmethod
    def fit(
        cls,
        device: DeviceSpec,
        works: Iterable[Softmax],
        latency_us: Iterable[float],
        *,
        fused: bool = True,
        library: str = "megatron",
    ) -> SoftmaxModel:
        """Fits the model to measured times in µs.

        fused: whether Megatron's fused kernel ran, or its separate kernels. PyTorch's softmax
            (library="torch") always is one kernel.

        Returns the prior, with a note, for fewer than _FEWEST_ROWS rows.
        """
        from scipy.optimize import least_squares

        found = list(works)
        times_us = measured_times(_WHO, list(latency_us), len(found))
        prior = cls.prior(device, library=library)
        if len(found) < _FEWEST_ROWS:
            few = f"{len(found)} rows are fewer than the {_FEWEST_ROWS} that a fit needs"
            return replace(prior, note=f"{prior.note} ({few})")
        start = np.array(prior.parameters)
        spread = np.abs(np.subtract(_SLOW, _FAST)) / 2

        def residuals(parameters: FloatArray) -> FloatArray:
            error = np.log(prior._times(found, parameters, fused)[0] / times_us) / _NOISE
            return np.concatenate([error, (parameters - start) / spread])

        first = start.copy()
        # If the host's launch time started far below all measured times, it would have no gradient.
        first[_INDEX["log_host_us"]] = np.log(times_us.min())
        solved = least_squares(residuals, first, loss="soft_l1")
        predicted = prior._times(found, solved.x, fused)[0]
        # `left` is the fraction of the degrees of freedom that remains after fitting the
        # parameters. Dividing by `left` widens the interval accordingly. The added 0.01 keeps the
        # interval from vanishing.
        left = max(1.0, len(found) - len(start)) / len(found)
        half_width = float(np.quantile(np.abs(np.log(predicted / times_us)), 0.9)) / left + 0.01
        kernel = "PyTorch's softmax" if library == "torch" else "softmax"
        note = f"{kernel} on {device.name}: fitted on {len(found)} measured shapes"
        return cls(device, tuple(solved.x.tolist()), half_width, len(found), note, library)

    def predict(self, works: Iterable[Softmax], *, fused: bool = True) -> Estimates:
        """Predicts the times of `works`.

        fused: whether one fused kernel runs, or Megatron's separate kernels. PyTorch's softmax
            always is one kernel.

        Raises InputError for no shapes.
        """
        found = list(works)
        if not found:
            raise InputError(_WHO, "no shapes", "at least one Softmax")
        latency_us, launch_us, memory_us, waves_us, waves = self._times(
            found, self.parameters, fused
        )
        nothing = np.zeros(len(found))
        below = np.full(len(found), self.half_width or 0.0)
        above = below
        if not self.rows:
            fast, slow = self.extremes
            below = below + np.log(latency_us / self._times(found, fast, fused)[0])
            above = above + np.log(self._times(found, slow, fused)[0] / latency_us)
        bound = name_bound(launch_us + waves_us, nothing, memory_us)
        return Estimates(*bounded(latency_us, below, above, nothing), waves, bound, note=self.note)

    @property
    def extremes(self) -> list[tuple[float, ...]]:
        """Optimistic and pessimistic parameters, which span the interval of a model without rows.

        In a model that uses parameters from a fit to PyTorch's softmax (`_SHARED`), these
        parameters keep their fitted values.
        """
        if self.half_width is None:
            return [_FAST, _SLOW]
        return [self._sharing(_FAST), self._sharing(_SLOW)]

    def _sharing(self, parameters: Iterable[float]) -> tuple[float, ...]:
        """Returns `parameters` with this model's value for each parameter in `_SHARED`."""
        shared = list(parameters)
        for name in _SHARED:
            shared[_INDEX[name]] = self.parameters[_INDEX[name]]
        return tuple(shared)

    def _times(
        self, works: list[Softmax], parameters: Iterable[float], fused: bool
    ) -> tuple[FloatArray, ...]:
        """Returns latency, launch, memory and wave times in µs, and the number of waves, (n,) each.

        parameters: logarithms, in the order of _PARAMETERS.
        fused: as in `predict`.
        """
        one_kernel = fused or self.library == "torch"
        of_kernel = [work.min_bytes if one_kernel else fallback_bytes(work) for work in works]
        moved = np.array(of_kernel, dtype=float)
        sizes = [(work.batch * work.rows, work.cols) for work in works]
        rows, columns = np.array(sizes, dtype=float).T
        kernels = 1.0 if one_kernel else float(_FALLBACK_KERNELS)
        latency_us, launch_us, *others = softmax_times(
            self.device, moved, rows, columns, parameters, kernels, self.library
        )
        return latency_us, np.full(len(works), launch_us), *others

    def to_json(self) -> dict[str, Any]:
        """Returns the model as a JSON object that names the device by its slug."""
        return {
            "format": MODEL_FORMAT,
            "version": MODEL_VERSION,
            "device": self.device.name,
            "parameters": dict(zip(_PARAMETERS, self.parameters, strict=True)),
            "half_width": self.half_width,
            "rows": self.rows,
            "note": self.note,
            "library": self.library,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], device: DeviceSpec) -> SoftmaxModel:
        """Inverse of `to_json`. Raises InputError for another device, format or version."""
        require_format(_WHO, data, MODEL_FORMAT, MODEL_VERSION, device)
        values = tuple(float(data["parameters"][name]) for name in _PARAMETERS)
        library = require_choice(_WHO, "library", data["library"], LIBRARIES)
        return cls(device, values, data["half_width"], int(data["rows"]), data["note"], library)


@cache
def _shipped() -> dict[str, Any]:
    """Returns the packaged models as JSON objects, by device slug."""
    models: dict[str, Any] = json.loads(SHIPPED.read_text(encoding="utf-8"))["models"]
    return models


def fallback_bytes(work: Softmax) -> int:
    """Returns the bytes that Megatron's separate kernels move.

    A forward pass casts to fp32 with the scale, fills masked elements, computes the softmax and
    casts back. A backward pass computes one softmax gradient in fp32 and casts it.
    """
    elements = work.batch * work.rows * work.cols
    width = element_bytes(work.dtype)
    if work.direction == "backward":
        return elements * (4 + 4 + 4 + 4 + width)
    mask = 0
    if work.mask != "none":
        mask = elements * (4 + 4) + work.mask_batch * work.rows * work.cols
    return elements * (width + 4 + 4 + 4 + 4 + width) + mask


def softmax_times(
    device: DeviceSpec,
    moved: Any,
    rows: Any,
    columns: Any,
    parameters: Iterable[float],
    kernels: float,
    library: str,
) -> tuple[Any, float, Any, Any, Any]:
    """Computes latency, launch, memory and wave times in µs, and the number of waves.

    moved: (n,), bytes moved.
    rows: (n,), number of rows of all matrices together.
    columns: (n,), number of columns, the scores in a row.
    parameters: logarithms, in the order of _PARAMETERS.
    kernels: number of launches.
    library: library whose kernel runs, one of LIBRARIES.

    The (n,) arguments may be symbols (`explore.trace`).
    """
    log_launch, log_efficiency, log_wave, log_host, log_wide, log_cached = parameters
    columns = np.maximum(columns, float(_LEAST_COLUMNS))
    # A row of more than 1024 columns takes as many threads as several shorter rows.
    per_block = np.maximum(_ROWS_PER_BLOCK / np.maximum(columns / 1024.0, 1.0), 1.0)
    waves = np.ceil(rows / per_block / (device.sm_count * _BLOCKS_PER_SM))
    launch_us = kernels * float(np.exp(log_launch))
    host_us = kernels * float(np.exp(log_host))
    bytes_per_us = device.memory_gb_per_s * 1e3
    memory_us = moved / (bytes_per_us * np.exp(log_efficiency))
    if library == "torch":
        cached_us = np.exp(log_cached) * np.minimum(moved, device.l2_bytes) / bytes_per_us
        wide_us = np.exp(log_wide) * memory_us + cached_us
        memory_us = np.where(columns > _WIDEST_IN_REGISTERS, wide_us, memory_us)
    waves_us = kernels * waves * np.exp(log_wave)
    busy_us = (memory_us**3 + waves_us**3) ** (1.0 / 3.0)
    latency_us = ((launch_us + busy_us) ** _HOST_NORM + host_us**_HOST_NORM) ** (1.0 / _HOST_NORM)
    return latency_us, max(launch_us, host_us), memory_us, waves_us, waves
