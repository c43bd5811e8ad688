"""Turns an ensemble into JSON values and arrays and back, and refuses inconsistent ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from quantbench.errors import StoreError
from quantbench.latency.forest import Forest
from quantbench.latency.gemm.cost_model import FIRST_TILE, Machine, Menu, Shapes
from quantbench.latency.gemm.ensemble import Ensemble
from quantbench.latency.gemm.member import Member, watched_columns
from quantbench.latency.model_file import Arrays, inner, outer

# Far above any GPU's rate: larger values mean a wrong unit or a damaged file.
_LARGEST_RATE = 1e15
_LARGEST_BLOCK = 4096
# Parameters are logarithms and exponents; the widest fitted so far are about 10.
_LARGEST_PARAMETER = 50.0
_REFERENCE = "reference."
# An arbitrary shape, used to count the features of a model.
_PROBE = (np.full(2, 128.0), np.full(2, 4096.0), np.full(2, 1024.0))


def ensemble_to_parts(ensemble: Ensemble) -> tuple[dict[str, Any], Arrays]:
    """Returns an ensemble as a JSON object and named arrays."""
    arrays: Arrays = {}
    members = []
    for i, member in enumerate(ensemble.members):
        told: dict[str, Any] = {
            name: getattr(member, name) for name in ("slope", "limit", "batched", "layouts")
        }
        members.append({**told, "trees": member.forest is not None})
        arrays[f"{i}.parameters"] = member.parameters
        if member.forest is not None:
            arrays |= outer(member.forest.to_arrays(), f"{i}.")
    reference = None
    if ensemble.reference is not None:
        reference, more = ensemble_to_parts(ensemble.reference)
        arrays |= outer(more, _REFERENCE)
    data = {
        "machine": dict(vars(ensemble.machine)),
        "tiles": ensemble.menu.tiles,
        "kernels": ensemble.menu.kernels,
        "members": members,
        "reference": reference,
    }
    return data, arrays


def ensemble_from_parts(data: Mapping[str, Any], arrays: Arrays) -> Ensemble:
    """Inverse of `ensemble_to_parts`. Raises StoreError for an inconsistent ensemble, and what a
    broken one raises.
    """
    machine = Machine(**data["machine"])
    tiles = tuple((int(m), int(n)) for m, n in data["tiles"])
    menu = Menu(tiles, tuple((int(tile), int(split)) for tile, split in data["kernels"]))
    _require_machine_and_menu(machine, menu)
    reference = None
    if data["reference"] is not None:
        reference = ensemble_from_parts(data["reference"], inner(arrays, _REFERENCE))
    members = []
    for i, told in enumerate(data["members"]):
        own = inner(arrays, f"{i}.")
        vector = own["parameters"].astype(np.float64)
        if (
            vector.shape != (FIRST_TILE + len(tiles),)
            or not (np.abs(vector) < _LARGEST_PARAMETER).all()
        ):
            raise _broken(
                f"parameters of shape {vector.shape} for {len(tiles)} tiles, or beyond all bounds"
            )
        bare = Member(
            vector,
            None,
            float(told["slope"]),
            float(told["limit"]),
            bool(told["batched"]),
            bool(told["layouts"]),
        )
        if not np.isfinite([bare.slope, bare.limit]).all():
            raise _broken("a slope or a limit that is not finite")
        members.append(_with_trees(bare, machine, menu, own, reference) if told["trees"] else bare)
    if not members:
        raise _broken("no members")
    return Ensemble(machine, menu, tuple(members), reference)


def _with_trees(
    member: Member, machine: Machine, menu: Menu, arrays: Arrays, reference: Ensemble | None
) -> Member:
    shapes = Shapes(machine, menu, *_PROBE)
    known = None if reference is None else np.zeros(len(_PROBE[0]))
    with np.errstate(all="ignore"):
        log_us, parts = member.physics(shapes)
        seen = member.features(menu, shapes, log_us, parts, watched_columns(shapes), known)
    return replace(member, forest=Forest.from_arrays(arrays, seen.shape[1]))


def _require_machine_and_menu(machine: Machine, menu: Menu) -> None:
    for name, value in vars(machine).items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < _LARGEST_RATE
        ):
            raise _broken(f"machine with {name} = {value!r}"[:100])
    blocks = [block for tile in menu.tiles for block in tile]
    if not blocks or not all(0 < block <= _LARGEST_BLOCK for block in blocks):
        raise _broken(f"tiles from {min(blocks, default=0)} to {max(blocks, default=0)}")
    if not all(
        0 <= tile < len(menu.tiles) and 0 < split <= _LARGEST_BLOCK for tile, split in menu.kernels
    ):
        raise _broken("kernels of unknown tiles, or that split k into none or too many")


def _broken(what: str) -> StoreError:
    return StoreError("GemmModel.load", what, "a whole model")
