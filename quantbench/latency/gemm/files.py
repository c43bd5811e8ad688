"""Encodes the parts of a GEMM model (device, ensemble, distilled model) as JSON, decodes and validates them.

Entry points: the functions `*_to_json` and `*_from_json`; `require_sound` and `require_sound_fast`, which validate
array sizes, finite values and the termination of decision trees; `check_format`, `library_of`, `MODEL_FORMAT`,
`MODEL_VERSION`. Used by `model` and `profile.models`.

History of the format "quantbench-gemm-model":
1: initial version.
2: the cost model has a parameter for serial split-k.
3: it has parameters for the host's work in a time and for address translation (`cost_model.ADDED`), and a member says
   whether products of several batches and layouts were fitted.
4: it names the library whose kernels ran, and has parameters for padded rows and quantized activations. Versions 2
   and 3 are read too.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, StoreError
from quantbench.latency.gemm.cost_model import FIRST_TILE, FloatArray, Machine, Menu, Shapes, upgraded
from quantbench.latency.gemm.distilled import FastGemm, features
from quantbench.latency.gemm.ensemble import Ensemble, Reference
from quantbench.latency.gemm.trees import Forest, Member, watched_columns

MODEL_FORMAT = "quantbench-gemm-model"
MODEL_VERSION = 4
_READ = (2, 3, MODEL_VERSION)
# Frameworks in the provenance of versions 2 and 3, which had no library.
_LIBRARY_OF = {"vLLM": "vllm", "sglang": "sglang", "SGLang": "sglang", "aiter": "aiter"}
_ARRAY_DTYPES = ("<f2", "<f4", "<f8", "<i2", "<i4", "<i8")


def array_to_json(array: npt.NDArray[Any]) -> dict[str, Any]:
    """Encodes an array as {dtype, shape, zlib}: base64 of its zlib-compressed little-endian bytes."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    packed = base64.b64encode(zlib.compress(little.tobytes(), 9)).decode("ascii")
    return {"dtype": little.dtype.str, "shape": list(array.shape), "zlib": packed}


def array_from_json(data: Any) -> npt.NDArray[Any]:
    """Inverse of `array_to_json`. Raises StoreError for anything else."""
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
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in vars(device).items()}


def device_from_json(data: Mapping[str, Any]) -> DeviceSpec:
    """Inverse of `device_to_json`. Raises StoreError for unknown or missing fields."""
    fields = dict(data)
    capability = fields.get("compute_capability")
    fields["compute_capability"] = None if capability is None else tuple(capability)
    try:
        return DeviceSpec(**fields)
    except TypeError as error:
        raise StoreError("GemmModel.from_json", f"device: {error}", "the fields of DeviceSpec") from error


def ensemble_to_json(ensemble: Ensemble) -> dict[str, Any]:
    reference = None
    if ensemble.reference is not None:
        reference = {
            "ensemble": ensemble_to_json(ensemble.reference.ensemble),
            "keys": array_to_json(np.diff(ensemble.reference.keys, prepend=0)),
            "residual": array_to_json(ensemble.reference.residual.astype(np.float32)),
        }
    members = [
        {
            "parameters": [float(z) for z in member.parameters],
            "slope": member.slope,
            "most": member.most,
            "batched": member.batched,
            "layouts": member.layouts,
            "forest": None if member.forest is None else _forest_to_json(member.forest),
        }
        for member in ensemble.members
    ]
    return {**_kernels_to_json(ensemble.machine, ensemble.menu), "members": members, "reference": reference}


def ensemble_from_json(data: Mapping[str, Any]) -> Ensemble:
    """Inverse of `ensemble_to_json`; does not validate (`require_sound`)."""
    members = tuple(
        Member(
            parameters=_vector_from_json(member["parameters"], data["tiles"]),
            slope=float(member["slope"]),
            most=float(member["most"]),
            batched=bool(member.get("batched", False)),
            layouts=bool(member.get("layouts", False)),
            forest=None if member["forest"] is None else _forest_from_json(member["forest"]),
        )
        for member in data["members"]
    )
    machine, menu = _kernels_from_json(data)
    reference = data["reference"]
    if reference is None:
        return Ensemble(machine, menu, members)
    other = Reference(
        ensemble_from_json(reference["ensemble"]),
        np.cumsum(array_from_json(reference["keys"])),
        array_from_json(reference["residual"]).astype(np.float64),
    )
    return Ensemble(machine, menu, members, other)


def _vector_from_json(parameters: Any, tiles: Any) -> FloatArray:
    """Returns a parameter vector; one of version 2 or 3, told by its length, is upgraded."""
    vector = np.array(parameters, dtype=np.float64)
    return upgraded(vector, len(tiles))


def _kernels_to_json(machine: Machine, menu: Menu) -> dict[str, Any]:
    return {
        "machine": dict(vars(machine)),
        "tiles": [list(tile) for tile in menu.tiles],
        "kernels": [list(kernel) for kernel in menu.kernels],
    }


def _kernels_from_json(data: Mapping[str, Any]) -> tuple[Machine, Menu]:
    tiles = tuple((int(m), int(n)) for m, n in data["tiles"])
    return Machine(**data["machine"]), Menu(tiles, tuple((int(t), int(s)) for t, s in data["kernels"]))


def _forest_to_json(forest: Forest) -> dict[str, Any]:
    return {
        "depth": forest.depth,
        "feature": array_to_json(forest.feature),
        "threshold": array_to_json(forest.threshold),
        "right_offset": array_to_json(forest.right - np.arange(len(forest.right), dtype=np.int32)),
        "value": array_to_json(forest.value.astype(np.float16)),
        "roots": array_to_json(forest.roots),
    }


def _forest_from_json(data: Mapping[str, Any]) -> Forest:
    offset = array_from_json(data["right_offset"])
    return Forest(
        feature=array_from_json(data["feature"]),
        threshold=array_from_json(data["threshold"]),
        right=offset + np.arange(len(offset), dtype=np.int32),
        value=array_from_json(data["value"]).astype(np.float32),
        roots=array_from_json(data["roots"]),
        depth=int(data["depth"]),
    )


def fast_to_json(fast: FastGemm) -> dict[str, Any]:
    return {
        **_kernels_to_json(fast.machine, fast.menu),
        "parameters": [float(z) for z in fast.parameters],
        "most": fast.most,
        "forest": _forest_to_json(fast.forest),
    }


def fast_from_json(data: Any) -> FastGemm:
    """Inverse of `fast_to_json`; does not validate (`require_sound_fast`)."""
    machine, menu = _kernels_from_json(data)
    return FastGemm(
        machine=machine,
        menu=menu,
        parameters=_vector_from_json(data["parameters"], data["tiles"]),
        forest=_forest_from_json(data["forest"]),
        most=float(data["most"]),
    )


def library_of(data: Mapping[str, Any]) -> str:
    """Returns the library of a model; that of an older version from its provenance."""
    return str(data.get("library") or _LIBRARY_OF.get(data["provenance"].get("framework", ""), "torch"))


def check_format(data: Any) -> None:
    """Raises InputError unless `data` is a GEMM model, and StoreError for an unsupported version."""
    if not isinstance(data, Mapping) or data.get("format") != MODEL_FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise InputError("GemmModel.from_json", f"format {found!r}", repr(MODEL_FORMAT))
    if data.get("version") not in _READ:
        raise StoreError("GemmModel.from_json", f"version {data.get('version')!r}", f"one of versions {_READ}")


# Far above any GPU's rate: larger values mean a wrong unit or a damaged file.
_LARGEST_RATE = 1e15
_LARGEST_BLOCK = 4096
# Parameters are logarithms and exponents; the widest fitted so far are about 10.
_LARGEST_PARAMETER = 50.0
_DEEPEST = 64
# An arbitrary shape, used to count the features of a model.
_PROBE = (np.full(1, 128.0), np.full(1, 4096.0), np.full(1, 1024.0))


def require_sound(ensemble: Ensemble, fast: FastGemm | None) -> None:
    """Raises StoreError unless all parts used in prediction are consistent and finite."""
    _machine_and_menu(ensemble.machine, ensemble.menu)
    if not ensemble.members:
        raise _broken("no members")
    for member in ensemble.members:
        _parameters(member.parameters, ensemble.menu)
        _finite("slope and most", (member.slope, member.most))
        if member.forest is not None:
            shapes = Shapes(ensemble.machine, ensemble.menu, *_PROBE)
            known = None if ensemble.reference is None else np.zeros(1)
            with np.errstate(all="ignore"):
                log_us, parts = member.physics(shapes)
                seen = member.features(ensemble.menu, shapes, log_us, parts, watched_columns(shapes), known)
            _forest(member.forest, seen.shape[1])
    if ensemble.reference is not None:
        if len(ensemble.reference.keys) != len(ensemble.reference.residual):
            raise _broken(f"{len(ensemble.reference.keys)} keys for {len(ensemble.reference.residual)} residuals")
        _finite("residuals", ensemble.reference.residual)
        require_sound(ensemble.reference.ensemble, None)
    if fast is not None:
        require_sound_fast(fast)


def require_sound_fast(fast: FastGemm) -> None:
    """Raises StoreError unless a distilled model is consistent and finite."""
    _machine_and_menu(fast.machine, fast.menu)
    _parameters(fast.parameters, fast.menu)
    _finite("most", (fast.most,))
    _forest(fast.forest, features(fast.machine, *_PROBE, np.zeros(1)).shape[1])


def _machine_and_menu(machine: Machine, menu: Menu) -> None:
    for name, value in vars(machine).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST_RATE:
            raise _broken(f"machine with {name} = {value!r}"[:100])
    blocks = [block for tile in menu.tiles for block in tile]
    if not blocks or not all(0 < block <= _LARGEST_BLOCK for block in blocks):
        raise _broken(f"tiles from {min(blocks, default=0)} to {max(blocks, default=0)}")
    if not menu.kernels or not all(0 <= tile < len(menu.tiles) for tile, _ in menu.kernels):
        raise _broken("kernels of tiles that are none")
    if not all(0 < split <= _LARGEST_BLOCK for _, split in menu.kernels):
        raise _broken("kernels that split k into none or too many")


def _parameters(vector: FloatArray, menu: Menu) -> None:
    if vector.shape != (FIRST_TILE + len(menu.tiles),):
        raise _broken(f"parameters of shape {vector.shape} for {len(menu.tiles)} tiles")
    if not (np.abs(vector) < _LARGEST_PARAMETER).all():
        raise _broken("a parameter that is not finite or beyond all bounds")


def _forest(forest: Forest, features_seen: int) -> None:
    nodes = len(forest.threshold)
    own = np.arange(nodes)
    arrays = (forest.feature, forest.threshold, forest.right, forest.value)
    sound = (
        all(array.shape == (nodes,) for array in arrays)
        and forest.roots.ndim == 1
        and len(forest.roots) > 0
        and 0 < forest.depth <= _DEEPEST
        and not np.isnan(forest.threshold).any()
        and bool(((forest.roots >= 0) & (forest.roots < nodes)).all())
        and bool(((forest.feature >= 0) & (forest.feature < features_seen)).all())
        and bool(((forest.right >= own) & (forest.right < nodes)).all())
        and all(np.issubdtype(array.dtype, np.integer) for array in (forest.feature, forest.right, forest.roots))
        # Only a leaf is its own child; the left child of other nodes is the next node.
        and bool(((forest.right > own) | np.isinf(forest.threshold)).all())
    )
    if not sound:
        raise _broken("trees that are none")
    _finite("leaves", forest.value)


def _finite(name: str, values: Iterable[float]) -> None:
    if not np.isfinite(np.asarray(values, dtype=np.float64)).all():
        raise _broken(f"{name} that are not finite")


def _broken(what: str) -> StoreError:
    return StoreError("GemmModel.from_json", what, "a whole model")
