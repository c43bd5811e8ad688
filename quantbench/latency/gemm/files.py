"""Converts a GEMM model's ensemble to a JSON object with arrays and back, for the model's file.

Reading refuses an inconsistent ensemble, which may come from a damaged file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quantbench.errors import StoreError
from quantbench.latency.autodiff import FloatArray
from quantbench.latency.forest import Forest
from quantbench.latency.gemm.cost_model import FIRST_TILE, Machine, Menu, Sizes
from quantbench.latency.gemm.ensemble import Ensemble
from quantbench.latency.gemm.member import Member
from quantbench.latency.model_file import Arrays, inner, outer

# Largest constant of a `Machine`, far above any GPU's rate. A file with a larger value is refused,
# because it is damaged or uses a wrong unit.
_LARGEST_RATE = 1e15
# Largest side of a tile and largest split_k that are accepted.
_LARGEST_BLOCK = 4096
# Largest accepted magnitude of a cost model parameter, which is a logarithm or an exponent. The
# magnitudes fitted so far are at most about 10.
_LARGEST_PARAMETER = 50.0
_REFERENCE = "reference."
_KINDS = ("batched", "layouts", "unaligned", "row_scales")
_SETTINGS = ("slope", "limit", *_KINDS)
# Arbitrary GEMMs, for which `_with_trees` computes the trees' inputs only to count the columns.
_PROBE = Sizes.of(np.full(2, 128.0), np.full(2, 4096.0), np.full(2, 1024.0))


def ensemble_to_json(ensemble: Ensemble) -> tuple[dict[str, Any], Arrays]:
    """Returns an ensemble as a JSON object and named arrays."""
    arrays: Arrays = {}
    members = []
    for i, member in enumerate(ensemble.members):
        settings = {name: getattr(member, name) for name in _SETTINGS}
        members.append({**settings, "trees": member.forest is not None})
        arrays[f"{i}.parameters"] = member.parameters
        if member.forest is not None:
            arrays |= outer(member.forest.to_arrays(), f"{i}.")
    reference = None
    if ensemble.reference is not None:
        reference, of_reference = ensemble_to_json(ensemble.reference)
        arrays |= outer(of_reference, _REFERENCE)
    data = {
        "machine": dict(vars(ensemble.machine)),
        "tiles": ensemble.menu.tiles,
        "kernels": ensemble.menu.kernels,
        "members": members,
        "reference": reference,
    }
    return data, arrays


def ensemble_from_json(data: Mapping[str, Any], arrays: Arrays) -> Ensemble:
    """Inverse of `ensemble_to_json`.

    Raises StoreError for an inconsistent ensemble. A missing or malformed entry raises another
    error, such as KeyError or ValueError.
    """
    machine = Machine(**data["machine"])
    menu = Menu(_pairs(data["tiles"]), _pairs(data["kernels"]))
    _require_machine_and_menu(machine, menu)
    reference = None
    if data["reference"] is not None:
        reference = ensemble_from_json(data["reference"], inner(arrays, _REFERENCE))
    bare = Ensemble(machine, menu, (), reference)
    members = []
    for i, settings in enumerate(data["members"]):
        of_member = inner(arrays, f"{i}.")
        member = _member(settings, of_member["parameters"].astype(np.float64), len(menu.tiles))
        if settings["trees"]:
            member = _with_trees(member, bare, of_member)
        members.append(member)
    if not members:
        raise _broken("no members")
    return replace(bare, members=tuple(members))


def _pairs(data: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(first), int(second)) for first, second in data)


def _member(settings: Mapping[str, Any], vector: FloatArray, tiles: int) -> Member:
    """Returns a member that still lacks its trees.

    settings: the member's JSON object.
    vector: (parameters + tiles,), parameters of its cost model.
    tiles: number of tiles in the menu.

    Raises StoreError for parameters of another shape and for values out of range.
    """
    if vector.shape != (FIRST_TILE + tiles,) or not (np.abs(vector) < _LARGEST_PARAMETER).all():
        raise _broken(f"parameters of shape {vector.shape} for {tiles} tiles, or beyond all bounds")
    slope = float(settings["slope"])
    limit = float(settings["limit"])
    if not np.isfinite([slope, limit]).all():
        raise _broken("a slope or a limit that is not finite")
    kinds = {name: bool(settings[name]) for name in _KINDS}
    return Member(vector, None, slope, limit, **kinds)


def _with_trees(member: Member, bare: Ensemble, arrays: Arrays) -> Member:
    """Returns the member with the forest that `arrays` contain.

    bare: the member's ensemble, still without members.
    """
    reference = None if bare.reference is None else np.zeros(len(_PROBE))
    with np.errstate(all="ignore"):
        shapes = bare.shapes(_PROBE)
        features = member.features(shapes, *member.physics(shapes), reference)
    return replace(member, forest=Forest.from_arrays(arrays, features.shape[1]))


def _require_machine_and_menu(machine: Machine, menu: Menu) -> None:
    """Raises StoreError for constants, tiles or kernels out of range."""
    for name, value in vars(machine).items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < _LARGEST_RATE:
            raise _broken(f"machine with {name} = {value!r}"[:100])
    blocks = np.array(menu.tiles)
    if not blocks.size or not ((blocks > 0) & (blocks <= _LARGEST_BLOCK)).all():
        raise _broken(f"tiles of {menu.tiles}"[:100])
    for tile, split in menu.kernels:
        if not 0 <= tile < len(menu.tiles) or not 0 < split <= _LARGEST_BLOCK:
            raise _broken("kernels of unknown tiles, or that split k into none or too many")


def _broken(what: str) -> StoreError:
    return StoreError("GemmModel.load", what, "a whole model")
