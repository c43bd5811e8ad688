from __future__ import annotations

from typing import Any

import numpy as np

from quantbench.explore.trace import inputs
from quantbench.latency.gemm.cost_model import Shapes, Values, clock_loss
from quantbench.latency.gemm.model import GemmModel
from quantbench.explore.webassembly import Module
from quantbench.latency.gemm.trees import watched_columns

_SIZES = ("m", "n", "k", "batch", "layout")


def gemm_wasm(model: GemmModel, name: str) -> str:
    """Writes the cost models of a GEMM model's members, with the inputs of their trees, as JavaScript."""
    ensemble = model.ensemble
    shapes = Shapes(ensemble.machine, ensemble.menu, *inputs(*_SIZES))
    watched = watched_columns(shapes)
    outputs: list[Any] = []
    bounds: list[Any] = []
    count = 0
    for i, member in enumerate(ensemble.members):
        log_us, parts = member.physics(shapes)
        kernel = parts.log_time.argmin(axis=0)
        outputs += [log_us, kernel]
        bounds.append(parts.log_time + clock_loss(Values(member.parameters), shapes))
        if i == 0:
            named = (parts.arithmetic, parts.memory, parts.write, parts.l2, parts.joined, parts.log_time)
            first = [part.at(kernel) for part in named]
        columns = member.columns(ensemble.menu, shapes, log_us, parts, watched) if member.forest is not None else []
        count = len(columns)
        outputs += columns
    module = Module(len(outputs) + len(first))
    module.add("times", _SIZES, [*outputs, *first])
    module.add("bounds", _SIZES, bounds, by_kernel=True)
    return module.to_bytes(), count
