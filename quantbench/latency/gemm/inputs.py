"""Validates what a GEMM model is asked or fitted to, and turns it into arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.latency.gemm.cost_model import FloatArray, Machine
from quantbench.workload.dtypes import GEMM_DTYPES
from quantbench.workload.ops import LAYOUTS

_SIZES = ("m", "n", "k", "batch")
#: largest m, n, k and batch
LARGEST_SIDE = 2**21 - 1


def machine_of(device: DeviceSpec, dtype: str) -> Machine:
    """Returns the device's rates for a dtype. Raises UnsupportedError if it is no GPU or lacks the
    dtype.
    """
    require_choice("GemmModel", "dtype", dtype, GEMM_DTYPES)
    if device.kind == "cpu":
        raise UnsupportedError(
            "GemmModel", f"{device.name} is a {device.kind}", "a GPU: blocks and waves are modelled"
        )
    if device.peak(dtype) is None:
        raise UnsupportedError(
            "GemmModel", f"{device.name} has no peak for {dtype}", f"one of {device.dtypes}"
        )
    return Machine.of(device, dtype)


def whole_sizes(who: str, *sizes: npt.ArrayLike) -> tuple[FloatArray, ...]:
    """Returns m, n, k and any batch as float arrays, (rows,). Raises InputError unless all are
    integers from 1 to 2**21 - 1."""
    out = []
    for name, size in zip(_SIZES, sizes, strict=False):
        array = np.atleast_1d(np.asarray(size))
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise InputError(
                who,
                f"{name} of shape {array.shape} and type {array.dtype}",
                "whole numbers, (rows,)",
            )
        with np.errstate(invalid="ignore"):
            bad = ~((array >= 1) & (array <= LARGEST_SIDE) & (array == np.floor(array)))
        if bad.any():
            raise InputError(
                who, f"{name} = {array[bad][0]}", f"a whole number from 1 to {LARGEST_SIDE}"
            )
        out.append(array.astype(np.float64))
    if len({len(x) for x in out}) != 1:
        raise InputError(
            who,
            f"{', '.join(str(len(x)) for x in out)} values of {', '.join(_SIZES[: len(out)])}",
            "one each per row",
        )
    return tuple(out)


def layout_indices(who: str, layout: str | Sequence[str], rows: int) -> FloatArray:
    """Returns the index of each row's layout, (rows,)."""
    names = [layout] * rows if isinstance(layout, str) else list(layout)
    if len(names) != rows:
        raise InputError(who, f"{len(names)} layouts for {rows} shapes", "one each, or one for all")
    for name in set(names):
        require_choice(who, "layout", name, LAYOUTS)
    return np.array([LAYOUTS.index(name) for name in names], dtype=np.float64)


def k_as_stored(machine: Machine, sizes: Sequence[FloatArray], layouts: FloatArray) -> FloatArray:
    """Returns k, (rows,), for a model of unknown layout, which takes rows of a and b to be k long.

    Those of a `tn` product lie along m and n, whatever k is: its k becomes the next one that is
    aligned as its m. FP8 and FP4 are multiplied with rows along k in every layout (cuBLASLt's "TN
    format").
    sizes: m, n, k and batch.
    """
    m, _, k, *_ = sizes
    along_m = (layouts == LAYOUTS.index("tn")) & (not machine.is_narrow)
    return np.where(along_m, k + (m - k) % (16.0 / machine.element_bytes), k)
