"""Packs the latency models of a GPU for a page: cost models as WebAssembly, trees and processes as arrays.

Entry points: `Blobs`, the arrays of a page; `gemm_model`, `attention_model`, `softmax_model` and `experts_model`, which
return JSON that refers to them. Used by `page`. `templates/model.js` evaluates them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.explore.trace import inputs
from quantbench.explore.webassembly import Module
from quantbench.latency.attention import AttentionModel, learner_features
from quantbench.latency.attention_cost_model import AttentionShapes, Blocks, times
from quantbench.latency.forest import Forest
from quantbench.latency.gemm.cost_model import LEAST_K, Shapes
from quantbench.latency.gemm.member import watched_columns
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.moe import MoEModel
from quantbench.latency.moe_features import MOST_TOKENS, NUM_FEATURES, TILES, ExpertLoads, Layers
from quantbench.latency.softmax import SoftmaxModel, softmax_times

_GEMM = ("m", "n", "k", "batch", "layout")
_ATTENTION = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim", "causal", "backward")
_BLOCKS = ("rows", "keys", "longest", "block_m", "block_n", "width", "group")
_LAYER = ("tokens", "hidden", "expert_ffn", "ffn", "width", "num_experts", "top_k", "ep")
_LOADS = ("rows", "active", "most", "median")
_LEAF = 255


class Blobs:
    """Byte strings of a page, each of them once; `add` returns [offset, bytes]."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        self._end = 0

    def add(self, content: bytes | npt.NDArray[Any]) -> tuple[int, int]:
        data = content if isinstance(content, bytes) else content.tobytes()
        if data not in self._places:
            self._places[data] = (self._end, len(data))
            padded = data + bytes(-len(data) % 8)  # every array starts at a multiple of its items' size
            self.parts.append(padded)
            self._end += len(padded)
        return self._places[data]


def gemm_model(model: GemmModel, blobs: Blobs) -> dict[str, Any]:
    """Returns a GEMM model as JSON.

    Raises InputError for a model with a reference, which no page holds.
    """
    ensemble, menu = model.ensemble, model.ensemble.menu
    if ensemble.reference is not None:
        raise InputError("explore", f"a model of {model.device.name} with a reference", "a model of its own rows")
    shapes = Shapes(ensemble.machine, menu, *inputs(*_GEMM))  # type: ignore[arg-type]
    watched = watched_columns(shapes)
    outputs: list[Any] = []
    members = []
    for member in ensemble.members:
        log_us, parts = member.physics(shapes)
        columns = [] if member.forest is None else member.columns(menu, shapes, log_us, parts, watched)
        at = len(outputs)
        outputs += [log_us, parts.log_time.argmin(axis=0), *columns]
        forest = None if member.forest is None else _forest(member.forest, blobs)
        members.append({"at": at, "columns": len(columns), "most": member.limit, "forest": forest})
    module = Module(len(outputs))
    module.add("times", _GEMM, outputs)
    each = menu.each
    kernels = np.concatenate([each.block_m, each.block_n, each.split_k, each.blocks_per_sm], axis=1).astype("<f8")
    return {
        "wasm": blobs.add(module.to_bytes()), "members": members,
        "factor": model.interval.factor, "floor": model.interval.floor, "kernels": blobs.add(kernels),
        "flop_per_us": ensemble.machine.flop_per_us, "in_waves": model.in_waves, "rows": model.rows,
        "least_k": LEAST_K, "layouts": model.layouts,
        "aligned": None if ensemble.machine.is_narrow else 16 / ensemble.machine.element_bytes,
    }  # fmt: skip


def _forest(forest: Forest, blobs: Blobs) -> dict[str, Any]:
    """Packs trees in preorder: the feature of each node (_LEAF: none), thresholds of inner nodes, values of leaves."""
    leaf = np.isinf(forest.threshold)
    waiting: list[int] = []
    for node in range(len(leaf)):
        if node not in forest.roots and leaf[node - 1] and forest.right[waiting.pop()] != node:
            raise InputError("explore", f"node {node} of a tree", "nodes in preorder")
        if not leaf[node]:
            waiting.append(node)
    return {
        "roots": blobs.add(forest.roots.astype("<i4")),
        "feature": blobs.add(np.where(leaf, _LEAF, forest.feature).astype("u1")),
        "threshold": blobs.add(forest.threshold[~leaf].astype("<f4")),
        "value": blobs.add(forest.value[leaf].astype("<f4")),
    }


def attention_model(model: AttentionModel, dtype: str, blobs: Blobs) -> dict[str, Any]:
    """Returns an attention model for one dtype as JSON."""
    device: DeviceSpec = model.device
    family = model.physics.family
    sizes: dict[str, Any] = dict(zip(_ATTENTION, inputs(*_ATTENTION), strict=True))
    counts: dict[str, Any] = dict(zip(_BLOCKS, inputs(*_BLOCKS), strict=True))
    shapes, blocks = AttentionShapes(**sizes, dtype=dtype), Blocks(**counts, may_split=family.splits)
    terms = times(device, shapes, blocks, model.physics.parameters, np.zeros(1, dtype=bool))
    outputs: list[Any] = [terms.latency_us, *learner_features(device, shapes, blocks, terms)]
    module = Module(len(outputs))
    module.add("times", (*_ATTENTION, *_BLOCKS), outputs)
    learner = model.learner
    process = None
    if learner is not None:
        arrays = {name: getattr(learner, name) for name in ("features", "targets", "shift", "spread", "length_scales")}
        process = {name: blobs.add(array.astype("<f8")) for name, array in arrays.items()}
        process |= {name: getattr(learner, name) for name in ("amplitude", "noise", "centre")}
    return {
        "wasm": blobs.add(module.to_bytes()), "tiles": family.tiles, "packs": family.packs, "widths": family.widths,
        "factor": model.interval.factor, "floor": model.interval.floor, "below": model.below, "above": model.above,
        "masks": model.masks, "learned": dtype in (model.dtype, "fp16", "bf16"), "learner": process,
        "flop_per_us": (device.peak(dtype) or 0.0) * 1e6,
    }  # fmt: skip


def softmax_model(device: DeviceSpec, blobs: Blobs) -> dict[str, Any]:
    """Returns the model of Megatron's fused softmax as JSON."""
    model, names = SoftmaxModel.best(device), ("bytes", "rows", "columns")
    moved, rows, columns = inputs(*names)
    expected, fast, slow = (
        softmax_times(device, moved, rows, columns, values, 1.0, model.library)
        for values in (model.parameters, *model.extremes)
    )
    by = np.exp(model.half_width or 0.0)
    module = Module(3)
    module.add("times", names, [expected[0], fast[0] / by, slow[0] * by])
    return {"wasm": blobs.add(module.to_bytes())}


def experts_model(model: MoEModel, blobs: Blobs) -> dict[str, Any]:
    """Returns a model of experts as JSON. Its `groups` are the forests of a fitted model, or the references of a prior;
    their mean corrects the roofline, their spread gives the interval.

    Raises InputError for a model whose forests need references, which no shipped one has.
    """
    sizes: dict[str, Any] = dict(zip(_LAYER, inputs(*_LAYER), strict=True))
    loads: dict[str, Any] = dict(zip(_LOADS, inputs(*_LOADS), strict=True))
    tiles: Any = inputs(*(f"tiles{tile}" for tile in TILES))
    layers = Layers(dtype=model.dtype, **sizes, loads=ExpertLoads(**loads, tiles=tiles))
    outputs: list[Any] = [layers.roofline(model.device), layers.compute_us(model.device)]
    groups = []
    for one in [model] if model.halves else model.references:
        if one.references or not one.halves:
            raise InputError("explore", f"experts of {one.device.name} with references", "a model of its own rows")
        parts = [
            {"at": len(outputs), "base": float(half.slopes[0]), "forest": _forest(forest, blobs)}
            for half in one.halves
            for forest in half.forests
        ]
        outputs += layers.columns(one.device)
        groups += [[part] for part in parts] if model.halves else [parts]
    module = Module(len(outputs))
    module.add("times", (*_LAYER, *_LOADS, *(str(tile.value) for tile in tiles)), outputs)
    return {
        "wasm": blobs.add(module.to_bytes()), "groups": groups, "columns": NUM_FEATURES, "tiles": TILES,
        "factor": model.interval.factor, "floor": model.interval.floor, "rows": model.rows,
        "most_tokens": MOST_TOKENS, "library": model.library if model.rows else "",
    }  # fmt: skip
