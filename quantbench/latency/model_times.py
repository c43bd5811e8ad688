"""The latency models of one GPU as a source of op times: the shipped ones, else what is expected of the GPU.

Entry point: `ModelTimes`, which `advise`, `plan` (by `BestTimes`) and `predict` use. It selects the model of each
number format and extends it to batches with more rows than models know.

Only products, softmax and attention are in it: norms, residual additions, activations, embeddings, optimizer and
communication are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.attention import AttentionModel
from quantbench.latency.estimate import Estimate
from quantbench.latency.gemm.menu import Menu
from quantbench.latency.gemm.model import LARGEST_SIDE, GemmModel, shipped_model
from quantbench.latency.op_times import (
    CORRELATION,
    UNMEASURED_COMMON,
    UNMEASURED_CORRELATION,
    OpEstimate,
    OpTimes,
    RememberedTimes,
    ShapeEstimate,
    runs_separately,
    total,
)
from quantbench.latency.roofline import peak_share
from quantbench.latency.softmax import SoftmaxModel
from quantbench.quantization import credible_waves
from quantbench.workload import Attention, Gemm, Op, Softmax, TransformerShape
from quantbench.workload.ops import Compute


class ModelTimes:
    """Estimates of latency models, with the kernels that they select; implements `OpTimes`.

    device: the GPU.
    gemm: the model of products of a number format and what to know of it; the best known unless given.

    >>> from quantbench.device import lookup
    >>> times = ModelTimes(lookup("a100-sxm4-80gb"))
    >>> times.estimates([Gemm(m=4096, n=4096, k=4096)])[0].source
    'modelled'
    """

    common_error: float = 0.0

    def __init__(self, device: DeviceSpec, gemm: Callable[[str], tuple[GemmModel, str]] | None = None) -> None:
        self.device = device
        self._gemm_of = gemm or (lambda dtype: best_gemm_model(device, dtype))
        self._gemm: dict[str, tuple[GemmModel, str]] = {}
        self._softmax = SoftmaxModel.prior(device)
        self._attention = AttentionModel.best(device)
        self._notes: dict[str, None] = {}

    @property
    def note(self) -> str:
        """What the times that were asked for so far are based on."""
        return "; ".join(filter(None, self._notes))

    def gemm_model(self, dtype: str) -> GemmModel:
        """The model that answers products of a number format."""
        return self._model(dtype)[0]

    def correlation(self, dtype: str) -> float:
        """Correlation of the errors of a sum of ops. dtype: that of the linear layers, by whose model it is judged."""
        return CORRELATION if self.gemm_model(dtype).rows else UNMEASURED_CORRELATION

    def predict(self, shape: TransformerShape, *, backward: bool = True) -> ShapeEstimate:
        """The time of one micro-batch through all layers of `shape` on one GPU, op by op."""
        return total(self.predict_ops(shape.ops(backward=backward)), self.correlation(shape.dtype))

    def predict_ops(self, ops: Sequence[Op], *, softmax: str = "") -> tuple[OpEstimate, ...]:
        """Each op's estimate, in order. Equal work is asked for once, and all of one kind together.

        softmax: see `op_times.runs_separately`; the separate kernels are predicted by the softmax model.
        """
        works = list(dict.fromkeys(op.workload for op in ops))
        known = dict(zip(works, self.estimates(works), strict=True))
        separate = [work for work in works if isinstance(work, Softmax) and runs_separately(work, softmax)]
        if separate:
            known.update(zip(separate, self._softmax.predict(separate, fused=False), strict=True))
        return tuple(OpEstimate(op, known[op.workload]) for op in ops)

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        """One estimate per workload, in their order; those of one kind and number format are asked for together."""
        groups: dict[tuple[type[Compute], str], list[Compute]] = defaultdict(list)
        for work in dict.fromkeys(workloads):
            groups[type(work), work.dtype].append(work)
        known: dict[Compute, Estimate] = {}
        for (_, dtype), works in groups.items():
            if not self.gemm_model(dtype).rows:
                self.common_error = UNMEASURED_COMMON
            known.update(zip(works, self._of_one_format(dtype, works), strict=True))
        return [known[work] for work in workloads]

    def _of_one_format(self, dtype: str, works: list[Compute]) -> list[Estimate]:
        """Estimates of distinct works of one kind and number format."""
        device, name = self.device, self.device.name
        gemms = [work for work in works if isinstance(work, Gemm)]
        if gemms:
            model, note = self._model(dtype)
            self._notes[note] = None
            single = "" if model.rows else f"{dtype} products: none measured on {name}"
            batched = single or "batched products: none measured"
            in_waves = model.in_waves
            return [
                _finished(one, gemm, device, note, batched if gemm.batch > 1 else single, in_waves=in_waves)
                for one, gemm in zip(predict_within_reach(model, gemms), gemms, strict=True)
            ]
        attentions = [work for work in works if isinstance(work, Attention)]
        if attentions:
            found = self._attention.predict(attentions)
            self._note_attention(found.note)
            unmeasured = map(self._unmeasured_attention, attentions)
            return [replace(one, unmeasured=why) for one, why in zip(found, unmeasured, strict=True)]
        found = self._softmax.predict([work for work in works if isinstance(work, Softmax)])
        self._notes[found.note] = None
        why = "" if self._softmax.rows else f"softmax: none measured on {name}"
        return [replace(one, unmeasured=why) for one in found]

    def _note_attention(self, note: str) -> None:
        """Keep a note. The attention model adds to its own how many of a batch are beyond what was measured."""
        own = self._attention.note
        self._notes[own] = None
        if note != own:
            self._notes["backward attention and unusual heads are beyond what was measured there"] = None

    def _unmeasured_attention(self, work: Attention) -> str:
        if not self._attention.fitted:
            return f"attention: none measured on {self.device.name}"
        if self._attention.knows(work):
            return ""
        if work.direction == "backward":
            return "backward attention: only forward passes measured"
        return "attention: no such heads, mask or number format measured"

    def _model(self, dtype: str) -> tuple[GemmModel, str]:
        if dtype not in self._gemm:
            self._gemm[dtype] = self._gemm_of(dtype)
        return self._gemm[dtype]


class BestTimes:
    """The best that is known of each GPU without measuring it, remembered; an `op_times.TimesOf`."""

    def __init__(self) -> None:
        self._known: dict[str, OpTimes] = {}

    def __call__(self, device: DeviceSpec) -> OpTimes:
        """The times of a GPU."""
        if device.name not in self._known:
            self._known[device.name] = RememberedTimes(ModelTimes(device))
        return self._known[device.name]


def best_gemm_model(device: DeviceSpec, dtype: str) -> tuple[GemmModel, str]:
    """The shipped model of products of a number format, else the expected one, and what to know of it."""
    if dtype == "fp16" and device.peak("bf16") == device.peak("fp16"):
        # The same bytes at the same peak, by kernels of the same tiles.
        measured = shipped_model(device.name, "bf16")
        if measured is not None:
            addition = f"; fp16 is taken to run as the bf16 that was measured on {device.name}"
            return measured, (measured.note or _origin(measured)) + addition
    model = GemmModel.best(device, dtype=dtype)
    return model, model.note or _origin(model)


def _origin(model: GemmModel) -> str:
    """Where a fitted model comes from, for people."""
    said = f"products on {model.device.name}: fitted on {model.rows:,} measured shapes"
    of = model.provenance
    if "held_out" in of:
        median = of["held_out"]["median_pct"]
        said += f" of {of['framework']} {of['framework_version']}, {median:.1f} % off (median) on others"
    return said


def require_reach(m: int, n: int, k: int) -> None:
    """Raise InputError for a product with a side that no model of products knows."""
    beyond = [f"{name} = {size}" for name, size in (("m", m), ("n", n), ("k", k)) if size > LARGEST_SIDE]
    if beyond:
        what = f"at most {LARGEST_SIDE}: no time is predicted of larger products"
        raise InputError(f"product {m}×{n}×{k}", beyond[0], what)


def predict_within_reach(model: GemmModel, gemms: Sequence[Gemm]) -> list[Estimate]:
    """A model's estimates of products, in order, of any number format as if they were of the model's own.

    The time of a batch with more rows than the model knows grows in proportion from the longest batch that it knows.
    Raises InputError for a product with a larger side.
    """
    asked = [_within_reach(gemm) for gemm in gemms]
    own = model.dtype
    found = model.predict_gemms(
        [part if part.dtype == own else replace(part, dtype=own, accumulate="") for part, _ in asked]
    )
    return [_extended(one, factor) for one, (_, factor) in zip(found, asked, strict=True)]


def _within_reach(gemm: Gemm) -> tuple[Gemm, float]:
    """The product that is asked for in place of another, and by how much its time is multiplied."""
    require_reach(gemm.m, gemm.n, gemm.k)
    if gemm.batch * gemm.m <= LARGEST_SIDE:
        return gemm, 1.0
    most = LARGEST_SIDE // gemm.m
    return replace(gemm, batch=most), gemm.batch / most


def _extended(found: Estimate, factor: float) -> Estimate:
    if factor == 1.0:
        return found
    return replace(found.times(factor), waves=None if found.waves is None else round(factor * found.waves))


@cache
def _blocks_per_sm(block_m: int, block_n: int) -> int:
    return int(Menu.of(((block_m, block_n),)).blocks_per_sm[0])


def _finished(
    found: Estimate, gemm: Gemm, device: DeviceSpec, note: str, unmeasured: str, *, in_waves: bool
) -> Estimate:
    """With the note and the reason, and with waves and blocks per SM only where the model knows them.

    in_waves: whether the model finds that the device runs in waves; else it knows no blocks per SM. Waves: see
    `quantization.credible_waves`.
    """
    launch, waves = found.launch, None
    if launch is not None and launch.tile is not None:
        held = None
        if in_waves:
            held = _blocks_per_sm(launch.tile.block_m, launch.tile.block_n)
            share = peak_share(gemm, found.latency_us, device)
            quantized = credible_waves(gemm, launch.tile, device.sm_count, held, share)
            waves = None if quantized is None else quantized.num_waves
        launch = replace(launch, blocks_per_sm=held)
    return replace(found, launch=launch, waves=waves, note=note, unmeasured=unmeasured)
