"""What a GEMM model is given, checked: the device and format, the sizes, the times and the kernels that ran."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.latency.gemm_form import Machine
from quantbench.latency.gemm_menu import Menu
from quantbench.launch import Launch
from quantbench.workload.dtypes import GEMM_DTYPES

FloatArray = npt.NDArray[np.float64]

#: m (times the batch), n and k go up to this
LARGEST_SIDE = 2**21 - 1


def machine_of(device: DeviceSpec, dtype: str) -> Machine:
    """The machine that a device is for products of a format; UnsupportedError where it has none."""
    require_choice("GemmModel", "dtype", dtype, GEMM_DTYPES)
    if device.kind != "cuda":
        raise UnsupportedError("GemmModel", f"{device.name} is a {device.kind}", "a GPU: blocks and waves are modelled")
    if device.peak(dtype) is None:
        have = ", ".join(sorted(device.peak_tflops))
        raise UnsupportedError("GemmModel", f"{device.name} has no peak for {dtype}", f"one of {have}")
    return Machine.of(device, dtype)


def whole_sizes(who: str, *sizes: npt.ArrayLike) -> tuple[FloatArray, FloatArray, FloatArray]:
    """m, n, k as flat float arrays of whole numbers from 1 to 2**21 - 1."""
    out = []
    for name, size in zip("mnk", sizes, strict=True):
        array = np.atleast_1d(np.asarray(size))
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise InputError(who, f"{name} of shape {array.shape} and type {array.dtype}", "whole numbers, (rows,)")
        with np.errstate(invalid="ignore"):
            bad = ~((array >= 1) & (array <= LARGEST_SIDE) & (array == np.floor(array)))
        if bad.any():
            raise InputError(who, f"{name} = {array[bad][0]}", f"a whole number from 1 to {LARGEST_SIDE}")
        out.append(array.astype(np.float64))
    if len({len(x) for x in out}) != 1:
        raise InputError(who, f"{', '.join(str(len(x)) for x in out)} values of m, n, k", "one each per row")
    return out[0], out[1], out[2]


def measured_times(latency_us: npt.ArrayLike, rows: int) -> FloatArray:
    """Times in µs, (rows,), finite and above 0."""
    times = np.atleast_1d(np.asarray(latency_us, dtype=np.float64))
    if times.shape != (rows,):
        raise InputError("GemmModel.fit", f"latency_us of shape {times.shape} for {rows} shapes", "one time each")
    bad = ~(np.isfinite(times) & (times > 0))
    if bad.any():
        raise InputError("GemmModel.fit", f"latency_us = {times[bad][0]}", "finite times above 0 µs")
    return times


def kernels_of(menu: Menu, launches: Sequence[Launch | None] | None, rows: int) -> npt.NDArray[np.intp]:
    """Index in the menu of each recorded kernel, -1 where none is known."""
    kernel = np.full(rows, -1, dtype=np.intp)
    if launches is None:
        return kernel
    if len(launches) != rows:
        raise InputError("GemmModel", f"{len(launches)} launches for {rows} shapes", "one each, or None")
    for i, launch in enumerate(launches):
        if launch is not None and launch.tile is not None:
            kernel[i] = menu.nearest(launch.tile.block_m, launch.tile.block_n, launch.tile.split_k)
    return kernel
