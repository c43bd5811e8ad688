"""Predicts op times of one GPU with the shipped latency models, or their priors if none is shipped.

It selects the model of each dtype and extrapolates to batches larger than the models support.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError
from quantbench.latency.attention import AttentionModel
from quantbench.latency.estimate import Estimate
from quantbench.latency.gemm.cost_model import resident_blocks
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.libraries import library_words, resolve_library
from quantbench.latency.moe import MoEModel
from quantbench.latency.op_times import UNMEASURED_COMMON, OpTimes, RememberedTimes, peak_share
from quantbench.latency.softmax import SoftmaxModel
from quantbench.launch import Launch
from quantbench.quantization import credible_waves
from quantbench.workload import Attention, Gemm, MoE, Softmax
from quantbench.workload.kinds import Compute


class ModelTimes:
    """Op times from latency models, with the kernels that they select; implements `OpTimes`.

    library: whose kernels run products, "" for the default of each dtype
        (`libraries.default_library`).
    gemm: function from a dtype to a GEMM model and its note; default `best_gemm_model`.

    >>> from quantbench.device import lookup
    >>> times = ModelTimes(lookup("a100-sxm4-80gb"))
    >>> times.estimates([Gemm(m=4096, n=4096, k=4096)])[0].source
    'modelled'
    """

    common_error: float = 0.0

    def __init__(
        self,
        device: DeviceSpec,
        library: str = "",
        *,
        gemm: Callable[[str], tuple[GemmModel, str]] | None = None,
    ) -> None:
        self.device = device
        self._gemm_of = cache(gemm or (lambda dtype: best_gemm_model(device, dtype, library)))
        self._experts_of = cache(lambda dtype: MoEModel.best(device, dtype=dtype, library=library))
        self._softmax = SoftmaxModel.best(device)
        self._attention = AttentionModel.best(device)
        self._notes: dict[str, None] = {}

    @property
    def note(self) -> str:
        return "; ".join(filter(None, self._notes))

    def products(self, dtype: str) -> tuple[GemmModel, str]:
        """Returns the model of a dtype's products and a note on its source."""
        return self._gemm_of(dtype)

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        """Returns one estimate per workload, in order; predicts all workloads of one kind and dtype
        in one batch.
        """
        answers: dict[type[Any], Callable[[list[Any]], list[Estimate]]] = {
            Gemm: self._products,
            Attention: self._attentions,
            Softmax: self._softmaxes,
            MoE: self._experts,
        }
        groups: dict[tuple[type[Compute], str], list[Compute]] = defaultdict(list)
        for work in dict.fromkeys(workloads):
            if type(work) not in answers:
                raise UnsupportedError(
                    "predict", str(work), "products, attention, softmax or experts: no model of it"
                )
            groups[type(work), work.dtype].append(work)
        known: dict[Compute, Estimate] = {}
        for (kind, dtype), works in groups.items():
            model = self._experts_of(dtype) if kind is MoE else self._gemm_of(dtype)[0]
            if not model.rows:
                self.common_error = UNMEASURED_COMMON
            known.update(zip(works, answers[kind](works), strict=True))
        return [known[work] for work in workloads]

    def _products(self, works: list[Gemm]) -> list[Estimate]:
        model, note = self._gemm_of(works[0].dtype)
        self._notes[note] = None
        single = (
            "" if model.rows else f"{works[0].dtype} products: none measured on {self.device.name}"
        )
        batched = single or ("" if model.batched else "batched products: none measured")
        in_waves = model.in_waves
        out = []
        for found, work in zip(predict_within_reach(model, works), works, strict=True):
            launch, waves = _launch_and_waves(found, work, self.device, in_waves=in_waves)
            why = batched if work.batch > 1 else single
            out.append(replace(found, launch=launch, waves=waves, note=note, unmeasured=why))
        return out

    def _attentions(self, works: list[Attention]) -> list[Estimate]:
        found = self._attention.predict(works)
        self._notes[self._attention.note] = None
        # The model's note for a batch differs if shapes are outside the measured kinds.
        if found.note != self._attention.note:
            self._notes[
                "backward attention and unusual heads are beyond what was measured there"
            ] = None
        return [
            replace(one, unmeasured=self._unmeasured(work))
            for one, work in zip(found, works, strict=True)
        ]

    def _unmeasured(self, work: Attention) -> str:
        if not self._attention.fitted:
            return f"attention: none measured on {self.device.name}"
        if self._attention.knows(work):
            return ""
        if work.direction == "backward":
            return "backward attention: only forward passes measured"
        return "attention: no such heads, mask or number format measured"

    def _experts(self, works: list[MoE]) -> list[Estimate]:
        model = self._experts_of(works[0].dtype)
        self._notes[model.note] = None
        why = "" if model.rows else f"experts in {model.dtype}: none measured on {self.device.name}"
        return [replace(one, unmeasured=why) for one in model.predict(works)]

    def _softmaxes(self, works: list[Softmax]) -> list[Estimate]:
        found = self._softmax.predict(works)
        self._notes[found.note] = None
        why = f"softmax: none measured on {self.device.name}"
        if self._softmax.half_width is not None:
            why = f"Megatron's softmax: on {self.device.name}, PyTorch's was measured"
        return [replace(one, unmeasured=why) for one in found]


class BestTimes:
    """Cached `ModelTimes` per GPU, of one library; an `op_times.TimesOf`."""

    def __init__(self, library: str = "") -> None:
        self._library = library
        self._known: dict[str, OpTimes] = {}

    def __call__(self, device: DeviceSpec) -> OpTimes:
        if device.name not in self._known:
            self._known[device.name] = RememberedTimes(ModelTimes(device, self._library))
        return self._known[device.name]


#: formats of the same bytes and tiles and, on most GPUs, the same peak
TWINS = {"bf16": "fp16", "fp16": "bf16"}


def best_gemm_model(
    device: DeviceSpec,
    dtype: str,
    library: str = "",
    known: Callable[[str], GemmModel | None] = lambda dtype: None,
) -> tuple[GemmModel, str]:
    """Returns a model of a dtype's products and a note on its source: a model of the dtype, or of
    its twin (`TWINS`) if both have the same peak, or else the prior from the spec sheet.

    known: function from a dtype to a model that comes before the shipped ones, such as that of a
        profile.
    """

    def shipped(name: str) -> GemmModel | None:
        return shipped_model(device.name, name, resolve_library(device.name, name, library))

    twin = TWINS.get(dtype, "")
    for find in (known, shipped):
        own = find(dtype)
        if own is not None:
            return own, own.note or _origin(own)
        other = find(twin) if twin and device.peak(twin) == device.peak(dtype) else None
        if other is not None:
            addition = f"; {dtype} is taken to run as the {twin} that was measured on {device.name}"
            return other, (other.note or _origin(other)) + addition
    model = GemmModel.best(device, dtype=dtype, library=library)
    return model, model.note


def chosen_libraries(
    device: DeviceSpec, dtype: str, asked: str, operation: str, *, experts: bool
) -> str:
    """Returns whose products `ModelTimes` predicts and why (`libraries.library_words`), and whose
    experts if another's.

    experts: whether there are any.
    """
    words = library_words(device.name, dtype, asked, operation)
    whose = MoEModel.best(device, dtype=dtype, library=asked).library if experts else ""
    return (
        f"{words}; experts: {whose}"
        if whose not in ("", resolve_library(device.name, dtype, asked))
        else words
    )


def _origin(model: GemmModel) -> str:
    words = f"products on {model.device.name}: fitted on {model.rows:,} measured shapes"
    of = model.provenance
    if "held_out" in of:
        median = of["held_out"]["median_pct"]
        words += f" of {of['framework']} {of['framework_version']}, {median:.1f} % off (median) on others"
    return words


def require_reach(m: int, n: int, k: int) -> None:
    """Raises InputError for a GEMM with a side above LARGEST_SIDE."""
    beyond = [
        f"{name} = {size}" for name, size in (("m", m), ("n", n), ("k", k)) if size > LARGEST_SIDE
    ]
    if beyond:
        what = f"at most {LARGEST_SIDE}: no time is predicted of larger products"
        raise InputError(f"product {m}×{n}×{k}", beyond[0], what)


def predict_within_reach(model: GemmModel, gemms: Sequence[Gemm]) -> list[Estimate]:
    """Predicts GEMMs, in order, ignoring their dtype in favour of the model's.

    The time of a batch with more than LARGEST_SIDE rows is scaled up from the largest supported
    batch. Raises InputError for a GEMM with a side above LARGEST_SIDE.
    """
    asked, factors = [], []
    for gemm in gemms:
        require_reach(gemm.m, gemm.n, gemm.k)
        batch = min(gemm.batch, LARGEST_SIDE // gemm.m)
        factors.append(gemm.batch / batch)
        if gemm.dtype != model.dtype:
            gemm = replace(gemm, dtype=model.dtype, accumulate="")
        asked.append(gemm if batch == gemm.batch else replace(gemm, batch=batch))
    return [
        one
        if factor == 1.0
        else replace(
            one.scaled(factor), waves=None if one.waves is None else round(factor * one.waves)
        )
        for one, factor in zip(model.predict_gemms(asked), factors, strict=True)
    ]


_resident_blocks = cache(resident_blocks)


def _launch_and_waves(
    found: Estimate, gemm: Gemm, device: DeviceSpec, *, in_waves: bool
) -> tuple[Launch | None, int | None]:
    """Returns the launch with its blocks per SM, and the waves (`quantization.credible_waves`),
    None if unknown.

    in_waves: whether GEMMs run in waves by the model; if not, blocks per SM and waves are unknown.
    """
    launch = found.launch
    if launch is None or launch.tile is None:
        return launch, None
    if not in_waves:
        return replace(launch, blocks_per_sm=None), None
    held = int(_resident_blocks(launch.tile.block_m, launch.tile.block_n))
    share = peak_share(gemm, found.latency_us, device)
    quantized = credible_waves(gemm, launch.tile, device.sm_count, held, share)
    return replace(launch, blocks_per_sm=held), None if quantized is None else quantized.num_waves
