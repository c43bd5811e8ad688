"""Sizes that a profile is asked for, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError

IntArray = npt.NDArray[np.int64]

LARGEST = 2**31 - 1


def broadcast_sizes(
    who: str, names: tuple[str, ...], given: tuple[Any, ...], largest: int = LARGEST
) -> tuple[tuple[IntArray, ...], tuple[int, ...]]:
    """(flat int64 arrays of one length, the common shape). Raises InputError for what is no size."""
    arrays = []
    for name, values in zip(names, given, strict=True):
        array = np.asarray(values)
        if array.dtype.kind not in "iuf":
            raise InputError(who, f"{name} = {values!r}"[:100], f"whole numbers from 1 to {largest}")
        with np.errstate(invalid="ignore"):
            bad = ~((array >= 1) & (array <= largest))
            if array.dtype.kind == "f":
                bad |= array != np.floor(array)
        if bad.any():
            raise InputError(who, f"{name} = {array[bad].flat[0]}", f"whole numbers from 1 to {largest}")
        arrays.append(array.astype(np.int64))
    try:
        wide = np.broadcast_arrays(*arrays)
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(names, arrays, strict=True))
        raise InputError(who, f"arrays of {shapes}", "shapes that broadcast") from None
    return tuple(np.ascontiguousarray(array).ravel() for array in wide), wide[0].shape
