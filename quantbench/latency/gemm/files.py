"""Stores the parts of a GEMM model (device, ensemble, distilled model) in a compact file, reads and validates them.

Entry points: `pack` and `unpack`, a file's content; the functions `*_to_parts` and `*_from_parts`; `text_arrays`, which
turns parts into JSON; `require_sound`, `require_sound_fast` and `require_sound_forest`, which validate array sizes,
finite values and the termination of decision trees; `check_format`, `library_of`, `MODEL_FORMAT`, `MODEL_VERSION`. Used
by `model`, `public`, `latency.moe` and `profile.models`.

A file is one line of JSON, in which {"array": i} stands for the i-th array, and then all arrays, deflated: their
little-endian bytes, all first bytes before all second ones. `sha256` covers both parts without itself.

History of the format "quantbench-gemm-model":
1: initial version.
2: the cost model has a parameter for serial split-k.
3: it has parameters for the host's work in a time and for address translation (`cost_model.ADDED`), and a member says
   whether products of several batches and layouts were fitted.
4: binary; it names the library whose kernels ran, and has parameters for padded rows and quantized activations. A
   member may have trees for recorded kernels, and a menu several kernels of one tile size. Versions 2 and 3, whole
   files of JSON, are read too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, StoreError, one_line
from quantbench.latency.gemm.cost_model import FIRST_TILE, FloatArray, Machine, Menu, Shapes, upgraded
from quantbench.latency.gemm.distilled import FastGemm, features
from quantbench.latency.gemm.ensemble import Ensemble, Reference
from quantbench.latency.gemm.trees import NAMED_COLUMNS, VALUE_STEP, Forest, Member, watched_columns

MODEL_FORMAT = "quantbench-gemm-model"
MODEL_VERSION = 4
_FIRST_BINARY = 4
_MOST_BYTES = 2**28
_READ = (2, 3, MODEL_VERSION)
# Frameworks in the provenance of versions 2 and 3, which had no library.
_LIBRARY_OF = {"vLLM": "vllm", "sglang": "sglang", "SGLang": "sglang", "aiter": "aiter"}
_ARRAY_DTYPES = ("|u1", "<f2", "<f4", "<f8", "<i2", "<i4", "<i8")


def pack(parts: Mapping[str, Any]) -> bytes:
    """Returns the content of a file. parts: JSON values and arrays, nested."""
    arrays: list[npt.NDArray[Any]] = []

    def numbered(array: npt.NDArray[Any]) -> dict[str, Any]:
        arrays.append(array)
        return {"array": len(arrays) - 1}

    header = _replaced(parts, numbered)
    header["arrays"] = [[array.dtype.newbyteorder("<").str, *array.shape] for array in arrays]
    packed = zlib.compress(b"".join(_planes(array) for array in arrays), 9)
    return json.dumps({**header, "sha256": _digest(header, packed)}).encode() + b"\n" + packed


def unpack(raw: bytes, check: Callable[[Any], None] | None = None) -> Any:
    """Inverse of `pack`; returns the JSON value of a file of version 2 or 3. Raises InputError for another format,
    StoreError for a damaged file.

    check: function that raises for another format or version, by default `check_format`; all its versions are binary.
    """
    line, _, packed = raw.partition(b"\n")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StoreError("GemmModel.load", one_line(str(error))[:100], "a file that GemmModel.save wrote") from None
    (check or check_format)(header)
    if check is None and header["version"] < _FIRST_BINARY:
        return header
    stated = header.pop("sha256", None)
    try:
        if stated != _digest(header, packed):
            raise ValueError("its sha256 is not that of its content")
        shapes = [(_array_dtype(dtype), tuple(map(int, shape))) for dtype, *shape in header.pop("arrays")]
        bounds = np.cumsum([0, *(dtype.itemsize * prod(shape) for dtype, shape in shapes)]).tolist()
        content = zlib.decompressobj().decompress(packed, bounds[-1] or 1)
        if len(content) != bounds[-1] or not 0 <= bounds[-1] <= _MOST_BYTES:
            raise ValueError(f"arrays of {bounds[-1]} bytes, {len(content)} stored")
        arrays = [
            _from_planes(content[start:end], dtype).reshape(shape)
            for (dtype, shape), start, end in zip(shapes, bounds, bounds[1:], strict=False)
        ]
        return _filled(header, arrays)
    except (ValueError, TypeError, KeyError, IndexError, zlib.error) as error:
        what = f"a damaged file ({one_line(str(error))[:100]})"
        raise StoreError("GemmModel.load", what, "the file as GemmModel.save wrote it") from None


def text_arrays(parts: Mapping[str, Any]) -> Any:
    """Encodes the arrays of parts as {dtype, shape, zlib}: base64 of their deflated little-endian bytes."""

    def text(array: npt.NDArray[Any]) -> dict[str, Any]:
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        packed = base64.b64encode(zlib.compress(little.tobytes(), 9)).decode("ascii")
        return {"dtype": little.dtype.str, "shape": list(array.shape), "zlib": packed}

    return _replaced(parts, text)


def _replaced(value: Any, of_array: Callable[[npt.NDArray[Any]], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return of_array(value)
    if isinstance(value, Mapping):
        return {name: _replaced(one, of_array) for name, one in value.items()}
    return [_replaced(one, of_array) for one in value] if isinstance(value, list | tuple) else value


def _filled(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    """Inverse of `_replaced` in `pack`."""
    if isinstance(value, dict):
        return arrays[value["array"]] if set(value) == {"array"} else {k: _filled(v, arrays) for k, v in value.items()}
    return [_filled(one, arrays) for one in value] if isinstance(value, list) else value


def _digest(header: Mapping[str, Any], packed: bytes) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode() + b"\n" + packed).hexdigest()


def _planes(array: npt.NDArray[Any]) -> bytes:
    """Returns all first bytes of the values, then all second ones, and so on: similar bytes deflate well."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.view(np.uint8).reshape(-1, little.itemsize).T.tobytes()


def _from_planes(content: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    planes = np.frombuffer(content, dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).ravel().astype(dtype.newbyteorder("="))


def _array_dtype(name: Any) -> np.dtype[Any]:
    if name not in _ARRAY_DTYPES:
        raise ValueError(f"array dtype {name!r}, not one of {', '.join(_ARRAY_DTYPES)}")
    return np.dtype(str(name))


def _array(data: Any) -> npt.NDArray[Any]:
    """Returns an array of parts, decoded if `text_arrays` encoded it. Raises StoreError for anything else."""
    if isinstance(data, np.ndarray):
        return data
    try:
        dtype, shape = _array_dtype(data["dtype"]), tuple(int(x) for x in data["shape"])
        raw = zlib.decompress(base64.b64decode(data["zlib"], validate=True))
        return np.frombuffer(raw, dtype=dtype).reshape(shape).astype(dtype.newbyteorder("="))
    except (KeyError, TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise StoreError("GemmModel.from_parts", f"a broken array ({error})", "dtype, shape and zlib") from error


def device_to_parts(device: DeviceSpec) -> dict[str, Any]:
    return {k: dict(v) if isinstance(v, Mapping) else v for k, v in vars(device).items()}


def device_from_parts(data: Mapping[str, Any]) -> DeviceSpec:
    """Inverse of `device_to_parts`. Raises StoreError for unknown or missing fields."""
    fields = dict(data)
    capability = fields.get("compute_capability")
    fields["compute_capability"] = None if capability is None else tuple(capability)
    try:
        return DeviceSpec(**fields)
    except TypeError as error:
        raise StoreError("GemmModel.from_parts", f"device: {error}", "the fields of DeviceSpec") from error


def ensemble_to_parts(ensemble: Ensemble) -> dict[str, Any]:
    reference = None
    if ensemble.reference is not None:
        reference = ensemble_to_parts(ensemble.reference.ensemble)
    members = [
        {
            "parameters": [float(z) for z in member.parameters],
            "slope": member.slope,
            "most": member.most,
            "batched": member.batched,
            "layouts": member.layouts,
            "forest": None if member.forest is None else forest_to_parts(member.forest),
            "named_forest": None if member.named_forest is None else forest_to_parts(member.named_forest),
        }
        for member in ensemble.members
    ]
    return {**_kernels_to_parts(ensemble.machine, ensemble.menu), "members": members, "reference": reference}


def ensemble_from_parts(data: Mapping[str, Any]) -> Ensemble:
    """Inverse of `ensemble_to_parts`; does not validate (`require_sound`)."""
    members = tuple(
        Member(
            parameters=_vector(member["parameters"], data["tiles"]),
            slope=float(member["slope"]),
            most=float(member["most"]),
            batched=bool(member.get("batched", False)),
            layouts=bool(member.get("layouts", False)),
            forest=None if member["forest"] is None else forest_from_parts(member["forest"]),
            named_forest=forest_from_parts(named) if (named := member.get("named_forest")) else None,
        )
        for member in data["members"]
    )
    machine, menu = _kernels_from_parts(data)
    reference = data["reference"]
    if reference is None:
        return Ensemble(machine, menu, members)
    return Ensemble(machine, menu, members, Reference(ensemble_from_parts(reference)))


def _vector(parameters: Any, tiles: Any) -> FloatArray:
    """Returns a parameter vector; one of version 2 or 3, told by its length, is upgraded."""
    vector = np.array(parameters, dtype=np.float64)
    return upgraded(vector, len(tiles))


def _kernels_to_parts(machine: Machine, menu: Menu) -> dict[str, Any]:
    return {
        "machine": dict(vars(machine)),
        "tiles": [list(tile) for tile in menu.tiles],
        "kernels": [list(kernel) for kernel in menu.kernels],
        "variants": list(menu.variants),
    }


def _kernels_from_parts(data: Mapping[str, Any]) -> tuple[Machine, Menu]:
    tiles = tuple((int(m), int(n)) for m, n in data["tiles"])
    kernels = tuple((int(t), int(s)) for t, s in data["kernels"])
    return Machine(**data["machine"]), Menu(tiles, kernels, tuple(str(name) for name in data.get("variants", ())))


def forest_to_parts(forest: Forest) -> dict[str, Any]:
    """Returns the kinds of all nodes of a forest, and the contents of inner nodes and of leaves."""
    compact = forest.rounded()
    leaf = np.isinf(compact.threshold)
    feature = compact.feature[~leaf]
    return {
        "depth": compact.depth,
        "nodes": len(leaf),
        "leaf": np.packbits(leaf),
        "feature": feature.astype(np.uint8) if not len(feature) or feature.max() < 256 else feature,
        "threshold": compact.threshold[~leaf],
        "value": np.round(compact.value[leaf] / VALUE_STEP).astype(np.int16),
    }


def forest_from_parts(data: Mapping[str, Any]) -> Forest:
    if "right_offset" in data:
        return _old_forest(data)
    nodes = int(data["nodes"])
    leaf = np.unpackbits(_array(data["leaf"]), count=nodes).astype(bool)
    right, roots = _links(leaf)
    feature, threshold, value = np.zeros(nodes, np.int16), np.full(nodes, np.inf, np.float32), np.zeros(nodes)
    feature[~leaf], threshold[~leaf] = _array(data["feature"]), _array(data["threshold"])
    value[leaf] = _array(data["value"]) * VALUE_STEP
    return Forest(feature, threshold, right, value.astype(np.float32), roots, int(data["depth"]))


def _links(leaf: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns the right child of each node, a leaf's own index, and the roots. Nodes are in preorder, left child first.

    Over a tree, inner nodes less leaves add up to -1. So a node's left subtree ends where the running sum is first one
    below the sum at the node, and tree t ends where it first is -t.
    """
    nodes = len(leaf)
    total = np.cumsum(np.where(leaf, -1, 1))
    ends = np.flatnonzero(np.diff(np.minimum.accumulate(np.minimum(total, 0)), prepend=0))
    if not nodes or ends[-1:].tolist() != [nodes - 1]:
        raise _broken("trees that are none")
    inner = np.flatnonzero(~leaf)
    # Sorted by sum, then position; numpy sorts short integers in linear time.
    above = total - total.min()
    order = np.argsort(above.astype(np.int16), kind="stable")
    keys = (above[order] + 1) * nodes + order
    below = above[inner] * nodes
    right = np.arange(nodes, dtype=np.int32)
    right[inner] = keys[np.searchsorted(keys, below + inner)] - below + 1
    return right, np.append(0, ends[:-1] + 1).astype(np.int32)


def _old_forest(data: Mapping[str, Any]) -> Forest:
    """Returns a forest of version 2 or 3, which stored every field of every node."""
    offset = _array(data["right_offset"])
    return Forest(
        feature=_array(data["feature"]),
        threshold=_array(data["threshold"]),
        right=offset + np.arange(len(offset), dtype=np.int32),
        value=_array(data["value"]).astype(np.float32),
        roots=_array(data["roots"]),
        depth=int(data["depth"]),
    )


def fast_to_parts(fast: FastGemm) -> dict[str, Any]:
    return {
        **_kernels_to_parts(fast.machine, fast.menu),
        "parameters": [float(z) for z in fast.parameters],
        "most": fast.most,
        "forest": forest_to_parts(fast.forest),
    }


def fast_from_parts(data: Any) -> FastGemm:
    """Inverse of `fast_to_parts`; does not validate (`require_sound_fast`)."""
    machine, menu = _kernels_from_parts(data)
    return FastGemm(
        machine=machine,
        menu=menu,
        parameters=_vector(data["parameters"], data["tiles"]),
        forest=forest_from_parts(data["forest"]),
        most=float(data["most"]),
    )


def library_of(data: Mapping[str, Any]) -> str:
    """Returns the library of a model; that of an older version from its provenance."""
    return str(data.get("library") or _LIBRARY_OF.get(data["provenance"].get("framework", ""), "torch"))


def check_format(data: Any) -> None:
    """Raises InputError unless `data` is a GEMM model, and StoreError for an unsupported version."""
    if not isinstance(data, Mapping) or data.get("format") != MODEL_FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise InputError("GemmModel.from_parts", f"format {found!r}", repr(MODEL_FORMAT))
    if data.get("version") not in _READ:
        raise StoreError("GemmModel.from_parts", f"version {data.get('version')!r}", f"one of versions {_READ}")


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
            require_sound_forest(member.forest, seen.shape[1])
            if member.named_forest is not None:
                require_sound_forest(member.named_forest, seen.shape[1] + NAMED_COLUMNS)
    if ensemble.reference is not None:
        require_sound(ensemble.reference.ensemble, None)
    if fast is not None:
        require_sound_fast(fast)


def require_sound_fast(fast: FastGemm) -> None:
    """Raises StoreError unless a distilled model is consistent and finite."""
    _machine_and_menu(fast.machine, fast.menu)
    _parameters(fast.parameters, fast.menu)
    _finite("most", (fast.most,))
    require_sound_forest(fast.forest, features(fast.machine, *_PROBE, np.zeros(1)).shape[1])


def _machine_and_menu(machine: Machine, menu: Menu) -> None:
    for name, value in vars(machine).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST_RATE:
            raise _broken(f"machine with {name} = {value!r}"[:100])
    blocks = [block for tile in menu.tiles for block in tile]
    if not blocks or not all(0 < block <= _LARGEST_BLOCK for block in blocks):
        raise _broken(f"tiles from {min(blocks, default=0)} to {max(blocks, default=0)}")
    if len(menu.variants) >= len(menu.tiles):
        raise _broken(f"{len(menu.variants)} variants of {len(menu.tiles)} tiles")
    if not menu.kernels or not all(0 <= tile < len(menu.tiles) for tile, _ in menu.kernels):
        raise _broken("kernels of tiles that are none")
    if not all(0 < split <= _LARGEST_BLOCK for _, split in menu.kernels):
        raise _broken("kernels that split k into none or too many")


def _parameters(vector: FloatArray, menu: Menu) -> None:
    if vector.shape != (FIRST_TILE + len(menu.tiles),):
        raise _broken(f"parameters of shape {vector.shape} for {len(menu.tiles)} tiles")
    if not (np.abs(vector) < _LARGEST_PARAMETER).all():
        raise _broken("a parameter that is not finite or beyond all bounds")


def require_sound_forest(forest: Forest, features_seen: int) -> None:
    """Raises StoreError unless trees terminate and read the first `features_seen` features only."""
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
    return StoreError("GemmModel.from_parts", what, "a whole model")
