"""Packs a GPU's latency models for the explorer page: code as JavaScript, and trees as arrays.

To obtain the JavaScript, the Python code of a model runs on symbols (`trace`). They record how the
time and its interval follow from the sizes. Forests and the Gaussian process cannot be recorded in
this way, so the page has its own JavaScript for them (`templates/model.js`).
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
# Fields of a forest's arrays, with their numpy types in the page.
_PACKED = {"roots": "<i4", "feature": "u1", "number": "<f4", "right": "<i4"}


class Blobs:
    """Collects the texts and arrays of a page as bytes. Equal contents are stored only once."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        self._end = 0

    def add(self, content: str | npt.NDArray[Any]) -> tuple[int, int]:
        """Stores a text or an array, and returns its offset and its length in bytes."""
        data = content.encode() if isinstance(content, str) else content.tobytes()
        if data not in self._places:
            self._places[data] = (self._end, len(data))
            # Padding to 8 bytes makes every array start at a multiple of its element size.
            padded = data + bytes(-len(data) % 8)
            self.parts.append(padded)
            self._end += len(padded)
        return self._places[data]


class _Forests:
    """Packs the forests of one model for the page, in the order in which it evaluates them."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.packed: list[dict[str, Any]] = []

    def walked(self, forest: Forest) -> SimpleNamespace:
        """Packs a forest, and returns a stand-in for it.

        Its method `predict` records the call of a JavaScript function, which evaluates the forest
        in the page.
        """
        name = f"forests[{len(self.packed)}]"
        arrays = forest.to_arrays()
        packed = {key: self._blobs.add(arrays[key].astype(_PACKED[key])) for key in _PACKED}
        self.packed.append(packed)
        return SimpleNamespace(predict=lambda columns: call(name, columns, 2))


def _mean_and_variance(values: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the mean and the variance of numbers or nodes."""
    mean = _mean(values)
    return mean, _mean([(value - mean) ** 2 for value in values])


def _mean(values: Sequence[Any]) -> Any:
    """Returns the mean of numbers or nodes."""
    return sum(values) / len(values)


def _time(
    log_us: Any, variance: Any, interval: IntervalCalibration, fastest_us: Any
) -> tuple[Any, Any, Any]:
    """Returns the time and the bounds of its interval, in µs.

    log_us, variance: predicted log time in µs and its variance.
    interval: converts the variance to a half-width of the interval in log time.
    fastest_us: floor in µs, below which no result gets.
    """
    half = interval.half_width(variance)
    return bounded(np.exp(log_us), half, half, fastest_us)


def gemm_model(model: GemmModel, blobs: Blobs) -> dict[str, Any]:
    """Packs a GEMM model as a JSON object.

    Its JavaScript functions compute the time, the interval and the kernel from sizes and layout.
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
    # In the forests' features, k is at least LEAST_K. The page calls `short` for GEMMs with a
    # smaller k. It takes the corrections at LEAST_K and the physics at k.
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
    """Returns a GEMM's log time in µs, its variance, and the first member's fastest kernel."""
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
    """Returns the mean log time in µs by the members' cost models, without their forests."""
    shapes = ensemble.shapes(sizes)
    return _mean([member.physics(shapes)[0] for member in ensemble.members])


def attention_model(model: AttentionModel, dtype: str, blobs: Blobs) -> dict[str, Any]:
    """Packs an attention model for one dtype as a JSON object.

    Its JavaScript functions compute the time and the interval of causal attention, forward and
    backward, from the sizes.
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
    """Returns the time of causal attention and the bounds of its interval, in µs, as nodes."""
    batch, heads, kv_heads, seq, head_dim = inputs(*_ATTENTION)
    causal: Any = np.array(True)
    sizes: Any = (batch, heads, kv_heads, seq, seq, head_dim, causal, np.array(backward), dtype)
    shapes = AttentionShapes(*sizes)
    part = model.prefill
    terms = part.physics.cost(shapes, np.zeros(1, dtype=bool))(part.physics.parameters)
    seen: Any = np.array(False)
    if "causal" in model.masks and dtype in (model.dtype, "fp16", "bf16"):
        # The same condition as in `AttentionModel`: each head is a whole number of 16-byte vectors
        # (8 elements of 16 bits), and has at most WIDEST_HEAD elements.
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
    """Packs the model of Megatron-LM's fused softmax as a JSON object."""
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
    """Packs a model of MoE experts as a JSON object.

    Its JavaScript function computes the time and the interval from the sizes and the loads, which
    are the numbers of rows of the experts.

    Raises InputError for a model whose forests need references, which are models of other GPUs. No
    shipped model has such forests.
    """
    sizes: dict[str, Any] = dict(zip(_LAYER, inputs(*_LAYER), strict=True))
    loads: dict[str, Any] = dict(zip(_LOADS, inputs(*_LOADS), strict=True))
    of_tiles = [f"tiles{tile}" for tile in TILES]
    tiles: Any = inputs(*of_tiles)
    layers = Layers(dtype=model.dtype, **sizes, loads=ExpertLoads(**loads, tiles=tiles))
    forests = _Forests(blobs)
    # A fitted model corrects the roofline by its own forests. A prior, which has no forests, is
    # corrected by those of its references. The mean of the corrections is added to the log
    # roofline, and their variance gives the interval.
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
