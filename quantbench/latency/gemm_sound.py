"""Whether a model that was read from a file can be asked at all: sizes that fit together, numbers that are finite."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quantbench.errors import StoreError
from quantbench.latency.gemm_ensemble import Ensemble
from quantbench.latency.gemm_fast import FastGemm, features
from quantbench.latency.gemm_features import watched_columns
from quantbench.latency.gemm_forest import Forest
from quantbench.latency.gemm_form import Machine, Shapes
from quantbench.latency.gemm_menu import Menu
from quantbench.latency.gemm_parameters import FIRST_TILE, FloatArray
from quantbench.latency.gemm_residual import Member

# Far above any GPU's: what lies beyond is a slipped unit or a damaged file.
_LARGEST_RATE = 1e15
_LARGEST_BLOCK = 4096
# Parameters are logarithms and exponents; the widest fitted so far are about 10.
_LARGEST_PARAMETER = 50.0
_DEEPEST = 64
# Any shape: its features are counted.
_PROBE = (np.full(1, 128.0), np.full(1, 4096.0), np.full(1, 1024.0))


def require_sound(ensemble: Ensemble, fast: FastGemm | None) -> None:
    """Raise StoreError unless everything that a prediction goes through fits together."""
    _machine_and_menu(ensemble.machine, ensemble.menu)
    if not ensemble.members:
        raise _broken("no members")
    for member in ensemble.members:
        _parameters(member.parameters, ensemble.menu)
        _finite("slope and most", (member.slope, member.most))
        if member.forest is not None:
            _forest(member.forest, _features_of(ensemble, member))
    if ensemble.reference is not None:
        if len(ensemble.reference.keys) != len(ensemble.reference.residual):
            raise _broken(f"{len(ensemble.reference.keys)} keys for {len(ensemble.reference.residual)} residuals")
        _finite("residuals", ensemble.reference.residual)
        require_sound(ensemble.reference.ensemble, None)
    if fast is not None:
        require_sound_fast(fast)


def require_sound_fast(fast: FastGemm) -> None:
    """The same for a distilled model alone."""
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


def _features_of(ensemble: Ensemble, member: Member) -> int:
    """How many features the member's trees see of a shape."""
    shapes = Shapes(ensemble.machine, ensemble.menu, *_PROBE)
    known = None if ensemble.reference is None else np.zeros(1)
    with np.errstate(all="ignore"):
        log_us, parts = member.physics(shapes)
        seen = member.features(
            ensemble.menu, shapes, log_us, parts, member.weights(parts), watched_columns(shapes), known
        )
    return int(seen.shape[1])


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
        # Only a leaf stays where it is; the left child of anything else is the next node.
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
