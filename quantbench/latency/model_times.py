"""Predicts op times on one GPU with the shipped latency models, or with priors.

`ModelTimes` selects the model for each op and extrapolates batches that are larger than the models
support. `best_gemm_model` selects the GEMM model for a dtype. Notes name the sources of the times.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from quantbench.alignment_rules import misaligned_sides
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError
from quantbench.latency.attention import AttentionModel
from quantbench.latency.estimate import Estimate
from quantbench.latency.gemm.cost_model import resident_blocks
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.libraries import libraries_of, library_words, resolve_library
from quantbench.latency.moe import MoEModel
from quantbench.latency.op_times import UNMEASURED_COMMON, CachedTimes, OpTimes, peak_share
from quantbench.latency.softmax import SoftmaxModel
from quantbench.launch import Launch
from quantbench.quantization import credible_waves
from quantbench.workload import Attention, Gemm, MoE, Softmax
from quantbench.workload.kinds import Compute


class ModelTimes:
    """Op times from latency models, with the kernels that the models select; implements `OpTimes`.

    library: library whose kernels run GEMMs and experts; "" means the default for each dtype
        (`libraries.default_library`, `MoEModel.best`).
    gemm: function from a dtype to a GEMM model and a note on its source. The default is
        `best_gemm_model`.
    cache_write: whether the attention of prompts also writes keys and values to a cache, as in a
        serving engine.

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
        cache_write: bool = False,
    ) -> None:
        self.device = device
        self._cache_write = cache_write
        self._gemm_of = cache(gemm or (lambda dtype: best_gemm_model(device, dtype, library)))
        self._experts_of = cache(lambda dtype: MoEModel.best(device, dtype=dtype, library=library))
        self._softmax = SoftmaxModel.best(device)
        self._attention = AttentionModel.best(device)
        self._notes: dict[str, None] = {}

    @property
    def note(self) -> str:
        return "; ".join(filter(None, self._notes))

    def products(self, dtype: str) -> tuple[GemmModel, str]:
        """Returns the GEMM model for a dtype, and a note on the model's source."""
        return self._gemm_of(dtype)

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        """Returns one estimate per workload, in order.

        All workloads of one kind and dtype are predicted in one batch. Raises UnsupportedError for
        a workload without a model.
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
        found: dict[Compute, Estimate] = {}
        for (kind, dtype), works in groups.items():
            model = self._experts_of(dtype) if kind is MoE else self._gemm_of(dtype)[0]
            # For attention and softmax, too, the GPU counts as measured if the GEMM model is
            # fitted.
            if not model.rows:
                self.common_error = UNMEASURED_COMMON
            found.update(zip(works, answers[kind](works), strict=True))
        return [found[work] for work in workloads]

    def _products(self, works: list[Gemm]) -> list[Estimate]:
        """Returns the estimates of GEMMs of one dtype.

        Each estimate has the kernel and, if no measurement supports it, the reason.
        """
        dtype = works[0].dtype
        model, note = self._gemm_of(dtype)
        self._notes[note] = None
        in_waves = model.in_waves
        batched = model.batched
        estimates = []
        for found, work in zip(predict_within_reach(model, works), works, strict=True):
            launch, waves = _launch_and_waves(found, work, self.device, in_waves=in_waves)
            why = ""
            if not model.rows:
                why = _why_unmeasured(model, dtype)
            elif work.batch > 1 and not batched:
                why = "batched products: none measured"
            elif not model.unaligned and misaligned_sides(work):
                why = "products of unaligned rows: none measured"
            found = replace(found, launch=launch, waves=waves, note=note, unmeasured=why)
            estimates.append(found)
        return estimates

    def _attentions(self, works: list[Attention]) -> list[Estimate]:
        writes = [self._cache_write and work.causal for work in works]
        found = self._attention.predict(works, cache_write=writes)
        self._notes[self._attention.note] = None
        # The notes differ if some shapes are outside the measured kinds.
        if found.note != self._attention.note:
            beyond = "backward attention and unusual heads are beyond what was measured there"
            self._notes[beyond] = None
        reasons = map(self._unmeasured, works)
        return [replace(one, unmeasured=why) for one, why in zip(found, reasons, strict=True)]

    def _unmeasured(self, work: Attention) -> str:
        """Returns why no measurement supports an attention op's time; "" if one does."""
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
    """Cached `ModelTimes` of one library for each GPU; an `op_times.TimesOf`."""

    def __init__(self, library: str = "") -> None:
        self._library = library
        self._times: dict[str, OpTimes] = {}

    def __call__(self, device: DeviceSpec) -> OpTimes:
        if device.name not in self._times:
            self._times[device.name] = CachedTimes(ModelTimes(device, self._library))
        return self._times[device.name]


#: Pairs of dtypes with the same element size and tiles and, on most GPUs, the same peak.
TWINS = {"bf16": "fp16", "fp16": "bf16"}


def best_gemm_model(
    device: DeviceSpec,
    dtype: str,
    library: str = "",
    preferred: Callable[[str], GemmModel | None] = lambda dtype: None,
) -> tuple[GemmModel, str]:
    """Returns a GEMM model for a dtype, and a note on the model's source.

    The model was fitted to the dtype, or to its twin (`TWINS`) if the twin has the same peak.
    Without such a model, the result is the prior.

    preferred: function from a dtype to a model that takes precedence over the shipped model, such
        as a profile's; the function returns None if it has no model for the dtype.
    """

    def shipped(name: str) -> GemmModel | None:
        return shipped_model(device.name, name, resolve_library(device.name, name, library))

    names = [dtype]
    if dtype in TWINS and device.peak(TWINS[dtype]) == device.peak(dtype):
        names.append(TWINS[dtype])
    for find in (preferred, shipped):
        for name in names:
            model = find(name)
            if model is not None:
                note = model.note or _origin(model)
                if name != dtype:
                    note += f"; {dtype} is taken to run as the {name} that was measured on"
                    note += f" {device.name}"
                return model, note
    model = GemmModel.best(device, dtype=dtype, library=library)
    return model, model.note


def chosen_libraries(
    device: DeviceSpec, dtype: str, requested: str, operation: str, *, experts: bool
) -> str:
    """Returns a line that names the library whose GEMMs `ModelTimes` predicts, and why.

    The line also names the library that runs the experts if it is another one.

    requested: name of the library that the user asked for, or "".
    operation: the caller's name for error messages.
    experts: whether the workloads include experts.
    """
    words = library_words(device.name, dtype, requested, operation)
    if experts:
        library = MoEModel.best(device, dtype=dtype, library=requested).library
        if library != resolve_library(device.name, dtype, requested):
            words += f"; experts: {library}"
    return words


def _origin(model: GemmModel) -> str:
    """Returns the note on a fitted model: its device, fitted rows, and error on held-out rows."""
    words = f"products on {model.device.name}: fitted on {model.rows:,} measured shapes"
    of = model.provenance
    if "held_out" in of:
        median = of["held_out"]["median_pct"]
        words += f" of {of['framework']} {of['framework_version']}"
        words += f", {median:.1f} % off (median) on others"
    return words


def _why_unmeasured(model: GemmModel, dtype: str) -> str:
    """Returns why no measurement supports the times of a prior."""
    measured = libraries_of(model.device.name, dtype)
    if model.library in measured:
        return f"{dtype} products of {model.library}: no model of its public table is shipped"
    whose = f" of {model.library}" if measured else ""
    return f"{dtype} products{whose}: none measured on {model.device.name}"


def require_reach(m: int, n: int, k: int) -> None:
    """Raises InputError if a side of a GEMM is above LARGEST_SIDE."""
    for name, size in {"m": m, "n": n, "k": k}.items():
        if size > LARGEST_SIDE:
            expected = f"at most {LARGEST_SIDE}: no time is predicted of larger products"
            raise InputError(f"product {m}×{n}×{k}", f"{name} = {size}", expected)


def predict_within_reach(model: GemmModel, gemms: Sequence[Gemm]) -> list[Estimate]:
    """Returns one estimate per GEMM, in order, as if each GEMM had the model's dtype.

    The models support batches of up to LARGEST_SIDE rows (batch · m). The time of a larger batch is
    the time of the largest supported batch, multiplied by the ratio of the two batch sizes. Raises
    InputError for a GEMM with a side above LARGEST_SIDE.
    """
    smaller = []
    factors = []
    for gemm in gemms:
        require_reach(gemm.m, gemm.n, gemm.k)
        batch = min(gemm.batch, LARGEST_SIDE // gemm.m)
        factors.append(gemm.batch / batch)
        if gemm.dtype != model.dtype:
            gemm = replace(gemm, dtype=model.dtype, accumulate="")
        smaller.append(replace(gemm, batch=batch))
    estimates = []
    for one, factor in zip(model.predict_gemms(smaller), factors, strict=True):
        waves = one.waves
        if factor != 1.0 and waves is not None:
            waves = round(factor * waves)
        estimates.append(replace(one.scaled(factor), waves=waves))
    return estimates


_resident_blocks = cache(resident_blocks)


def _launch_and_waves(
    found: Estimate, gemm: Gemm, device: DeviceSpec, *, in_waves: bool
) -> tuple[Launch | None, int | None]:
    """Returns an estimate's launch with its blocks per SM, and the number of waves.

    The number of waves is None if it cannot be determined (`quantization.credible_waves`).

    in_waves: whether GEMMs run in waves, according to the model. If not, the blocks per SM and the
        number of waves are unknown.
    """
    launch = found.launch
    if launch is None or launch.tile is None:
        return launch, None
    if not in_waves:
        return replace(launch, blocks_per_sm=None), None
    tile = launch.tile
    blocks = int(_resident_blocks(tile.block_m, tile.block_n))
    share = peak_share(gemm, found.latency_us, device)
    waves = credible_waves(gemm, tile, device.sm_count, blocks, share)
    return replace(launch, blocks_per_sm=blocks), None if waves is None else waves.num_waves
