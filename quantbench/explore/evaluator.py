"""Packs the latency models of a GPU for a page: code as JavaScript, trees and tables as arrays.

The models run on symbols (`trace`), which record how the time and its interval follow from the
sizes. The page itself evaluates what symbols cannot express: forests and the Gaussian process.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.explore.javascript import module
from quantbench.explore.trace import call, inputs
from quantbench.latency.attention import UNSEEN_HALF_WIDTH, WIDEST_HEAD, AttentionModel
from quantbench.latency.attention_cost_model import AttentionShapes
from quantbench.latency.estimate import IntervalCalibration, bounded
from quantbench.latency.forest import Forest
from quantbench.latency.gemm.cost_model import LEAST_K, Sizes
from quantbench.latency.gemm.ensemble import Ensemble
from quantbench.latency.gemm.inputs import without_layout
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.moe import MoEModel
from quantbench.latency.moe_features import MOST_TOKENS, TILES, ExpertLoads, Layers
from quantbench.latency.softmax import SoftmaxModel, softmax_times

_GEMM = ("m", "n", "k", "batch", "layout")
_ATTENTION = ("batch", "heads", "kv_heads", "seq", "head_dim")
_LAYER = ("tokens", "hidden", "expert_ffn", "ffn", "width", "num_experts", "top_k", "ep")
_LOADS = ("rows", "active", "fullest", "median")
# numpy types of a forest's arrays in the page.
_PACKED = {"roots": "<i4", "feature": "u1", "number": "<f4", "right": "<i4"}


class Blobs:
    """Byte strings of a page, of which equal ones are stored once."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        self._end = 0

    def add(self, content: str | npt.NDArray[Any]) -> tuple[int, int]:
        """Stores a text or an array, and returns its offset and its length in bytes."""
        data = content.encode() if isinstance(content, str) else content.tobytes()
        if data not in self._places:
            self._places[data] = (self._end, len(data))
            # Padding makes every array start at a multiple of its items' size.
            padded = data + bytes(-len(data) % 8)
            self.parts.append(padded)
            self._end += len(padded)
        return self._places[data]


class _Forests:
    """Forests of one model, packed in the order in which the page evaluates them."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.packed: list[dict[str, Any]] = []

    def walked(self, forest: Forest) -> SimpleNamespace:
        """Packs a forest, and returns a forest whose `predict` records a call of the page."""
        name = f"forests[{len(self.packed)}]"
        arrays = forest.to_arrays()
        packed = {key: self._blobs.add(arrays[key].astype(_PACKED[key])) for key in _PACKED}
        self.packed.append(packed)
        return SimpleNamespace(predict=lambda columns: call(name, columns, 2))


def _mean_and_variance(values: Sequence[Any]) -> tuple[Any, Any]:
    mean = _mean(values)
    return mean, _mean([(value - mean) ** 2 for value in values])


def _mean(values: Sequence[Any]) -> Any:
    return sum(values) / len(values)


def _time(
    log_us: Any, variance: Any, interval: IntervalCalibration, fastest_us: Any
) -> tuple[Any, Any, Any]:
    """Returns the time and the ends of its interval in µs, none below `fastest_us`."""
    half = interval.half_width(variance)
    return bounded(np.exp(log_us), half, half, fastest_us)


def gemm_model(model: GemmModel, blobs: Blobs) -> dict[str, Any]:
    """Returns a GEMM model as JSON.

    Its functions compute the time, the interval and the kernel from sizes and layout.
    """
    ensemble = model.ensemble
    forests = _Forests(blobs)
    symbols: Any = inputs(*_GEMM)
    sizes = Sizes(*symbols)
    if not model.layouts:
        sizes = without_layout(ensemble.machine, sizes)
    peak_us = sizes.flop / ensemble.machine.flop_per_us
    log_us, variance, kernel = _product(ensemble, sizes, forests)
    times = [*_time(log_us, variance, model.interval, peak_us), kernel]
    # The trees see no k below LEAST_K, so GEMMs with a smaller k have a function of their own.
    deep = replace(sizes, k=np.maximum(sizes.k, LEAST_K))
    log_us, variance, kernel = _product(ensemble, deep, forests)
    log_us = log_us + _physics(ensemble, sizes) - _physics(ensemble, deep)
    short = [*_time(log_us, variance, model.interval, peak_us), kernel]
    each = ensemble.menu.each
    kernels = np.concatenate(
        [each.block_m, each.block_n, each.split_k, each.blocks_per_sm], axis=1
    )  # (kernels, 4)
    return {
        "code": blobs.add(module({"times": (_GEMM, times), "short": (_GEMM, short)})),
        "forests": forests.packed,
        "kernels": blobs.add(kernels.astype("<f8")),
        "least_k": LEAST_K,
        "in_waves": model.in_waves,
        "rows": model.rows,
        "unaligned": model.unaligned,
    }


def _product(ensemble: Ensemble, sizes: Sizes, forests: _Forests) -> tuple[Any, Any, Any]:
    """Returns the log time of a GEMM in µs, its variance, and the first member's fastest kernel."""
    shapes = ensemble.shapes(sizes)
    reference: Any = None
    if ensemble.reference is not None:
        predicted, _, _ = _product(ensemble.reference, sizes, forests)
        reference = predicted - _physics(ensemble.reference, sizes)
    logs = []
    within = []
    kernels = []
    for member in ensemble.members:
        log_us, parts = member.physics(shapes)
        kernels.append(parts.log_time.argmin(axis=0))
        columns: Any = member.columns(shapes, log_us, parts, reference)
        walked: Any = member.forest and forests.walked(member.forest)
        correction, spread = replace(member, forest=walked).correction(columns, reference)
        logs.append(log_us + correction)
        within.append(spread)
    mean, between = _mean_and_variance(logs)
    variance = between + _mean(within)
    return mean - variance, variance, kernels[0]


def _physics(ensemble: Ensemble, sizes: Sizes) -> Any:
    """Returns the mean log time in µs by the members' cost models."""
    shapes = ensemble.shapes(sizes)
    return _mean([member.physics(shapes)[0] for member in ensemble.members])


def attention_model(model: AttentionModel, dtype: str, blobs: Blobs) -> dict[str, Any]:
    """Returns an attention model for one dtype as JSON.

    Its functions compute the time and the interval from the sizes of causal attention.
    """
    functions = {
        "forward": (_ATTENTION, _attention(model, dtype, backward=False)),
        "backward": (_ATTENTION, _attention(model, dtype, backward=True)),
    }
    process: dict[str, Any] | None = None
    learner = model.prefill.learner
    if learner is not None:
        process = {}
        for field in fields(learner):
            value = getattr(learner, field.name)
            process[field.name] = value if np.isscalar(value) else blobs.add(value.astype("<f8"))
    return {"code": blobs.add(module(functions)), "process": process}


def _attention(model: AttentionModel, dtype: str, *, backward: bool) -> tuple[Any, Any, Any]:
    """Returns the time of causal attention and its interval in µs."""
    batch, heads, kv_heads, seq, head_dim = inputs(*_ATTENTION)
    causal: Any = np.array(True)
    sizes: Any = (batch, heads, kv_heads, seq, seq, head_dim, causal, np.array(backward), dtype)
    shapes = AttentionShapes(*sizes)
    part = model.prefill
    terms = part.physics.cost(shapes, np.zeros(1, dtype=bool))(part.physics.parameters)
    seen: Any = np.array(False)
    if "causal" in model.masks and dtype in (model.dtype, "fp16", "bf16"):
        # As in `AttentionModel`: heads of whole 16-byte vectors of 16-bit elements, not too wide.
        seen = (head_dim % 8 == 0) & (head_dim <= WIDEST_HEAD)
    shift: Any = np.zeros(1)
    deviation: Any = np.zeros(1)
    if part.learner is not None:
        features: Any = part.physics.features(shapes, terms)
        found: Any = call("process", features, 2)
        shift = np.where(seen, found[0], 0.0)
        deviation = np.where(seen, found[1], 0.0)
    more = UNSEEN_HALF_WIDTH if backward else np.where(seen, 0.0, UNSEEN_HALF_WIDTH)
    half = part.interval.half_width(deviation**2) + more
    fastest_us = shapes.flops / ((model.device.peak(dtype) or 0.0) * 1e6)
    factor = model.backward_cost if backward else 1.0
    latency_us = terms.latency_us * np.exp(shift) * factor
    return bounded(latency_us, half + part.below, half + part.above, fastest_us)


def softmax_model(device: DeviceSpec, blobs: Blobs) -> dict[str, Any]:
    """Returns the model of Megatron's fused softmax as JSON."""
    model = SoftmaxModel.best(device)
    names = ("bytes", "rows", "columns")
    moved, rows, columns = inputs(*names)

    def latency_us(parameters: Sequence[float]) -> Any:
        return softmax_times(device, moved, rows, columns, parameters, 1.0, model.library)[0]

    fast, slow = model.extremes
    by = np.exp(model.half_width or 0.0)
    times = [latency_us(model.parameters), latency_us(fast) / by, latency_us(slow) * by]
    return {"code": blobs.add(module({"times": (names, times)}))}


def experts_model(model: MoEModel, blobs: Blobs) -> dict[str, Any]:
    """Returns a model of experts as JSON.

    Its function computes the time and the interval from sizes and loads.

    Raises InputError for a model whose forests need references. No shipped model has such forests.
    """
    sizes: dict[str, Any] = dict(zip(_LAYER, inputs(*_LAYER), strict=True))
    loads: dict[str, Any] = dict(zip(_LOADS, inputs(*_LOADS), strict=True))
    of_tiles = [f"tiles{tile}" for tile in TILES]
    tiles: Any = inputs(*of_tiles)
    layers = Layers(dtype=model.dtype, **sizes, loads=ExpertLoads(**loads, tiles=tiles))
    forests = _Forests(blobs)
    # The corrections come from the forests of a fitted model, or from the references of a prior.
    # The mean of the corrections corrects the roofline, and their variance gives the interval.
    corrections: list[Any] = []
    for one in [model] if model.learners else model.references:
        if one.references or not one.learners:
            what = f"experts of {one.device.name} with references"
            raise InputError("explore", what, "a model of its own rows")
        columns = layers.columns(one.device)
        found: list[Any] = []
        for learner in one.learners:
            for forest in learner.forests:
                logs = forests.walked(forest).predict(columns)[0]
                found.append(float(learner.slopes[0]) + logs)
        corrections += found if model.learners else [_mean(found)]
    mean, variance = _mean_and_variance(corrections or [0.0])
    fastest_us = layers.compute_us(model.device)
    outputs = _time(layers.roofline(model.device) + mean, variance, model.interval, fastest_us)
    return {
        "code": blobs.add(module({"times": ((*_LAYER, *_LOADS, *of_tiles), outputs)})),
        "forests": forests.packed,
        "tiles": TILES,
        "rows": model.rows,
        "most_tokens": MOST_TOKENS,
        "library": model.library if model.rows else "",
    }
