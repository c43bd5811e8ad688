"""Converts a latency model's JSON header and arrays to the content of one `.npz` file and back.

Reading does not use pickle, so a file from elsewhere cannot run code.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from io import BytesIO
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, StoreError, one_line

Arrays = dict[str, npt.NDArray[Any]]
_HEADER = "header"
# `unpack` refuses a file whose unpacked arrays are larger than this in total.
_LARGEST_BYTES = 2**28
#: exceptions that reading a model from a damaged or foreign file can raise
BROKEN = (
    ArithmeticError,
    AttributeError,
    BadZipFile,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


def pack(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Returns the content of a model file with this header and these arrays."""
    stream = BytesIO()
    named: dict[str, Any] = {_HEADER: np.array(json.dumps(header)), **arrays}
    np.savez_compressed(stream, **named)
    return stream.getvalue()


def unpack(
    who: str, content: bytes, model_format: str, version: int
) -> tuple[dict[str, Any], Arrays]:
    """Returns the header and the arrays of a model file; inverse of `pack`.

    who: the caller's name for error messages.
    model_format, version: format and version that the header must have.

    Raises StoreError for a damaged file, and InputError for another format or version.
    """
    try:
        with ZipFile(BytesIO(content)) as packed:
            size = sum(one.file_size for one in packed.infolist())
        if size > _LARGEST_BYTES:
            raise ValueError(f"{size} bytes of arrays")
        with np.load(BytesIO(content), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        header = json.loads(str(arrays.pop(_HEADER)))
        found = (header["format"], header["version"])
    except BROKEN as error:
        what = f"a damaged file or none of a model ({one_line(str(error))[:100]})"
        raise StoreError(who, what, "a file that save wrote") from None
    if found != (model_format, version):
        what = f"format {found[0]!r} version {found[1]!r}"
        raise InputError(who, what, f"{model_format} version {version}")
    return header, arrays


def inner(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> Arrays:
    """Returns the arrays whose names begin with a prefix, with the prefix removed."""
    found = {}
    for name, array in arrays.items():
        if name.startswith(prefix):
            found[name.removeprefix(prefix)] = array
    return found


def outer(arrays: Mapping[str, npt.NDArray[Any]], prefix: str) -> Arrays:
    """Returns the arrays with a prefix added to each name."""
    return {prefix + name: array for name, array in arrays.items()}


def device_to_json(device: DeviceSpec) -> dict[str, Any]:
    """Returns all fields of a device, with mappings as dictionaries."""
    fields = dict(vars(device))
    for name, value in fields.items():
        if isinstance(value, Mapping):
            fields[name] = dict(value)
    return fields


def device_from_json(data: Mapping[str, Any]) -> DeviceSpec:
    """Inverse of `device_to_json`. Raises TypeError for unknown or missing fields."""
    fields = dict(data)
    if fields["compute_capability"] is not None:
        fields["compute_capability"] = tuple(fields["compute_capability"])
    return DeviceSpec(**fields)
