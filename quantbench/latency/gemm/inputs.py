"""Validates the shapes and dtype given to a GEMM model and turns them into arrays."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.latency.autodiff import FloatArray
from quantbench.latency.gemm.cost_model import Machine, Sizes
from quantbench.workload.dtypes import GEMM_DTYPES
from quantbench.workload.ops import LAYOUTS

#: largest m, n, k and batch
LARGEST_SIDE = 2**21 - 1


def machine_of(device: DeviceSpec, dtype: str) -> Machine:
    """Returns the device constants that the cost model needs for a dtype.

    Raises UnsupportedError if the device is a CPU or lacks the dtype, and InputError if no GEMM can
    have the dtype.
    """
    who = "GemmModel"
    require_choice(who, "dtype", dtype, GEMM_DTYPES)
    if device.kind == "cpu":
        expected = "a GPU: blocks and waves are modelled"
        raise UnsupportedError(who, f"{device.name} is a {device.kind}", expected)
    if device.peak(dtype) is None:
        expected = f"one of {device.dtypes}"
        raise UnsupportedError(who, f"{device.name} has no peak for {dtype}", expected)
    return Machine.of(device, dtype)


def gemm_sizes(
    who: str,
    layout: str | Sequence[str],
    m: npt.ArrayLike,
    n: npt.ArrayLike,
    k: npt.ArrayLike,
    batch: npt.ArrayLike,
) -> Sizes:
    """Returns the validated sizes of GEMMs.

    who: the caller's name for error messages.
    layout: storage of a and b (`LAYOUTS`), one for each GEMM or one for all.
    m, n, k, batch: (rows,), whole numbers from 1 to LARGEST_SIDE. Each row is one GEMM.

    Raises InputError for other values and for columns of unequal length.
    """
    named = {"m": m, "n": n, "k": k, "batch": batch}
    columns = {name: _whole(who, name, size) for name, size in named.items()}
    counts = [len(column) for column in columns.values()]
    if len(set(counts)) != 1:
        what = f"{', '.join(map(str, counts))} values of {', '.join(named)}"
        raise InputError(who, what, "one each per row")
    rows = counts[0]
    names = [layout] * rows if isinstance(layout, str) else list(layout)
    if len(names) != rows:
        raise InputError(who, f"{len(names)} layouts for {rows} shapes", "one each, or one for all")
    for name in set(names):
        require_choice(who, "layout", name, LAYOUTS)
    places = list(map(LAYOUTS.index, names))
    return Sizes(**columns, layout=np.array(places, dtype=np.float64))


def _whole(who: str, name: str, size: npt.ArrayLike) -> FloatArray:
    """Returns a column of sizes as floats, (rows,).

    Raises InputError unless all are whole numbers from 1 to LARGEST_SIDE.
    """
    array = np.atleast_1d(np.asarray(size))
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        what = f"{name} of shape {array.shape} and type {array.dtype}"
        raise InputError(who, what, "whole numbers, (rows,)")
    with np.errstate(invalid="ignore"):
        bad = ~((array >= 1) & (array <= LARGEST_SIDE) & (array == np.floor(array)))
    if bad.any():
        expected = f"a whole number from 1 to {LARGEST_SIDE}"
        raise InputError(who, f"{name} = {array[bad][0]}", expected)
    return array.astype(np.float64)


def without_layout(machine: Machine, sizes: Sizes) -> Sizes:
    """Returns the sizes as input of a model that was not fitted to several layouts.

    Such a model assumes that the rows of a and b run along k, so that k sets their alignment. In a
    `tn` GEMM, rows run along m and n instead. The k of a `tn` GEMM is therefore raised to the next
    value with the alignment of m. The k of FP8 and FP4 GEMMs stays, because rows of these formats
    run along k in every layout (cuBLASLt's "TN format").
    """
    along_m = (sizes.layout == LAYOUTS.index("tn")) & (not machine.is_narrow)
    aligned = sizes.k + (sizes.m - sizes.k) % (16.0 / machine.element_bytes)
    k = np.where(along_m, aligned, sizes.k)
    return replace(sizes, k=k, layout=np.full(len(sizes), -1.0))
