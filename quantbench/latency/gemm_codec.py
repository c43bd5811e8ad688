"""A GEMM model as JSON and back. No pickle: arrays are little-endian bytes, deflated, in base64.

History of the format "quantbench-gemm-model":
1  the first.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, StoreError
from quantbench.latency.gemm_ensemble import Ensemble, Reference
from quantbench.latency.gemm_forest import Forest
from quantbench.latency.gemm_form import Machine
from quantbench.latency.gemm_menu import Menu
from quantbench.latency.gemm_residual import Member

MODEL_FORMAT = "quantbench-gemm-model"
MODEL_VERSION = 2
_ARRAY_DTYPES = ("<f2", "<f4", "<f8", "<i2", "<i4", "<i8")


def array_to_json(array: npt.NDArray[Any]) -> dict[str, Any]:
    """dtype, shape and the deflated bytes."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    packed = base64.b64encode(zlib.compress(little.tobytes(), 9)).decode("ascii")
    return {"dtype": little.dtype.str, "shape": list(array.shape), "zlib": packed}


def array_from_json(data: Any) -> npt.NDArray[Any]:
    """The array of array_to_json; StoreError for anything else."""
    try:
        dtype, shape = data["dtype"], tuple(int(x) for x in data["shape"])
        if dtype not in _ARRAY_DTYPES:
            raise StoreError("GemmModel.from_json", f"array dtype {dtype!r}", "one of " + ", ".join(_ARRAY_DTYPES))
        raw = zlib.decompress(base64.b64decode(data["zlib"], validate=True))
        return np.frombuffer(raw, dtype=dtype).reshape(shape).astype(np.dtype(dtype).newbyteorder("="))
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError("GemmModel.from_json", f"a broken array ({error})", "dtype, shape and zlib") from error


def device_to_json(device: DeviceSpec) -> dict[str, Any]:
    """Every field of the spec; mappings as plain objects."""
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in vars(device).items()}


def device_from_json(data: Mapping[str, Any]) -> DeviceSpec:
    """The spec of device_to_json."""
    fields = dict(data)
    capability = fields.get("compute_capability")
    fields["compute_capability"] = None if capability is None else tuple(capability)
    try:
        return DeviceSpec(**fields)
    except TypeError as error:
        raise StoreError("GemmModel.from_json", f"device: {error}", "the fields of DeviceSpec") from error


def ensemble_to_json(ensemble: Ensemble) -> dict[str, Any]:
    """The ensemble, its reference included."""
    reference = ensemble.reference
    return {
        "machine": dict(vars(ensemble.machine)),
        "tiles": [list(tile) for tile in ensemble.menu.tiles],
        "kernels": [list(kernel) for kernel in ensemble.menu.kernels],
        "members": [_member_to_json(member) for member in ensemble.members],
        "reference": None
        if reference is None
        else {
            "ensemble": ensemble_to_json(reference.ensemble),
            "keys": array_to_json(np.diff(reference.keys, prepend=0)),
            "residual": array_to_json(reference.residual.astype(np.float32)),
        },
    }


def ensemble_from_json(data: Mapping[str, Any]) -> Ensemble:
    """The ensemble of ensemble_to_json."""
    reference = data["reference"]
    return Ensemble(
        machine=Machine(**data["machine"]),
        menu=menu_from_json(data),
        members=tuple(_member_from_json(member) for member in data["members"]),
        reference=None
        if reference is None
        else Reference(
            ensemble_from_json(reference["ensemble"]),
            np.cumsum(array_from_json(reference["keys"])),
            array_from_json(reference["residual"]).astype(np.float64),
        ),
    )


def _member_to_json(member: Member) -> dict[str, Any]:
    forest = member.forest
    return {
        "parameters": [float(z) for z in member.parameters],
        "slope": member.slope,
        "most": member.most,
        "forest": None if forest is None else forest_to_json(forest),
    }


def menu_from_json(data: Mapping[str, Any]) -> Menu:
    """The menu of fields "tiles" and "kernels"."""
    tiles = tuple((int(m), int(n)) for m, n in data["tiles"])
    return Menu(tiles, tuple((int(t), int(s)) for t, s in data["kernels"]))


def forest_to_json(forest: Forest) -> dict[str, Any]:
    """The forest's arrays."""
    return {
        "depth": forest.depth,
        "feature": array_to_json(forest.feature),
        "threshold": array_to_json(forest.threshold),
        "right_offset": array_to_json(forest.right - _own_index(forest.right)),
        "value": array_to_json(forest.value.astype(np.float16)),
        "roots": array_to_json(forest.roots),
    }


def _own_index(nodes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    return np.arange(len(nodes), dtype=np.int32)


def _member_from_json(data: Mapping[str, Any]) -> Member:
    forest = data["forest"]
    return Member(
        parameters=np.array(data["parameters"], dtype=np.float64),
        slope=float(data["slope"]),
        most=float(data["most"]),
        forest=None if forest is None else forest_from_json(forest),
    )


def forest_from_json(data: Mapping[str, Any]) -> Forest:
    """The forest of forest_to_json."""
    offset = array_from_json(data["right_offset"])
    return Forest(
        feature=array_from_json(data["feature"]),
        threshold=array_from_json(data["threshold"]),
        right=offset + _own_index(offset),
        value=array_from_json(data["value"]).astype(np.float32),
        roots=array_from_json(data["roots"]),
        depth=int(data["depth"]),
    )


def check_format(data: Any) -> None:
    """Raise for anything but a model of a version that is known here."""
    if not isinstance(data, Mapping) or data.get("format") != MODEL_FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise InputError("GemmModel.from_json", f"format {found!r}", repr(MODEL_FORMAT))
    if data.get("version") != MODEL_VERSION:
        raise StoreError("GemmModel.from_json", f"version {data.get('version')!r}", f"version {MODEL_VERSION}")
