"""The options of `quantbench plan`, and the planner's types that they give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite, isinf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantbench.cli.model_options import ShapeOptions, chosen_model
from quantbench.cli.options import integers
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.interconnect import Cluster, cluster, reference_cluster
from quantbench.latency.op_times import OpTimes, RememberedTimes, TimesOf
from quantbench.planner.calibration import shipped, with_measured_links
from quantbench.planner.formulas import parameters
from quantbench.planner.layout import RECOMPUTATIONS, Job, Layout, padded_vocab, partition_of
from quantbench.planner.rows import Given
from quantbench.planner.search import ShapeSpace, Space
from quantbench.workload import TransformerShape
from quantbench.workload.transformer import ATTENTIONS, SOFTMAXES

if TYPE_CHECKING:
    from quantbench.profile import Profile

_WHO = "plan"
_BITS_PER_BYTE = 8
_WHAT_IT_IS = {"gpus": "how many there are", "gbs": "the global batch size in sequences, such as 2048"}


_MACHINES, _LAYOUT, _SHAPES = "Machines", "Layout (comma separated lists)", "Shape search"


def _in(panel: str, help_text: str, *names: str, **limits: float) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **limits)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ShapeOptions):
    """A model, machines, the layouts to try and the shapes to search, as typed. 0, "" and None leave a thing open."""

    optimizer: Annotated[str, _in("Model", "Optimizer: fused_adam, adam or adam_8bit (default: fused_adam).")] = ""
    gpus: Annotated[int | None, _in(_MACHINES, "Number of GPUs.", min=1)] = None
    gpu: Annotated[str, _in(_MACHINES, "GPU: a name such as h100 or a100-40gb, or a slug of `quantbench devices`.")] = (
        ""
    )
    profile: Annotated[
        Path | None, _in(_MACHINES, "Profile of the GPU (JSON file); its times replace the models'.")
    ] = None
    cluster: Annotated[
        str, _in(_MACHINES, "Known system: jean-zay-a100, dgx-a100, … (default: the GPU's reference system).")
    ] = ""
    gpus_per_node: Annotated[int, _in(_MACHINES, "GPUs per node (0: the system's).", min=0)] = 0
    node_gbit_per_s: Annotated[
        float, _in(_MACHINES, "Bandwidth of a node's network, Gbit/s, all adapters together (0: the system's).", min=0)
    ] = 0
    link_gb_per_s: Annotated[
        float, _in(_MACHINES, "Bus bandwidth of all-reduce inside a node, GB/s (0: the system's).", min=0)
    ] = 0
    gbs: Annotated[int | None, _in(_MACHINES, "Global batch size, sequences.", min=1)] = None
    rampup_step: Annotated[
        int, _in(_MACHINES, "Increment of the batch-size ramp-up, sequences (0: no ramp-up).", min=0)
    ] = 0
    dp_overlap: Annotated[
        float, _in(_MACHINES, "Share of data-parallel traffic that overlaps with computation.", min=0, max=1)
    ] = 0.0
    dp: Annotated[str, _in(_LAYOUT, "Data-parallel degrees (default: all).")] = ""
    tp: Annotated[str, _in(_LAYOUT, "Tensor-parallel degrees (default: all).")] = ""
    pp: Annotated[str, _in(_LAYOUT, "Pipeline-parallel degrees (default: all).")] = ""
    mbs: Annotated[str, _in(_LAYOUT, "Micro-batch sizes, sequences (default: all).")] = ""
    interleave: Annotated[str, _in(_LAYOUT, "Model chunks per pipeline stage (default: all).")] = ""
    zero: Annotated[str, _in(_LAYOUT, "ZeRO stages, 0 to 3 (default: all).")] = ""
    recompute: Annotated[str, _in(_LAYOUT, "Activation recomputation: full, selective, none (default: all).")] = ""
    sequence_parallel: Annotated[
        bool | None, _in(_LAYOUT, "Only layouts with sequence parallelism, or only without (default: both).")
    ] = None
    allow_uneven: Annotated[
        bool, _in(_LAYOUT, "Also try pipeline stages with different numbers of layers.", "--allow-uneven")
    ] = False
    params: Annotated[float, _in(_SHAPES, "Target number of parameters (0: the model's).", min=0)] = 0
    tolerance: Annotated[float, _in(_SHAPES, "Largest relative deviation from --params.", min=0, max=0.5)] = 0.03
    aspect: Annotated[str, _in(_SHAPES, "Range of hidden / layers, from:to.")] = "125:205"
    head_dim: Annotated[str, _in(_SHAPES, "Range of head_dim, from:to.")] = "64:256"
    as_typed: Annotated[
        bool, typer.Option("--as-typed", help="With --rows: leave known typing errors uncorrected.")
    ] = False

    @cached_property
    def _model(self) -> tuple[TransformerShape, tuple[str, ...]]:
        return chosen_model(_WHO, self, self.where().device, needed=("hidden", "heads", "layers", "vocab"))

    def shape(self) -> TransformerShape:
        """The model, from a preset or a config, changed by what else was typed."""
        return self._model[0]

    def assumed(self, *, one_layout: bool = False) -> tuple[str, ...]:
        """What moves the result and was not typed, in words. one_layout: that of the checked layout as well."""
        shape, words = self._model
        where = [] if self.cluster else [f"{self.where().name} as its system"]
        optimizer = [] if self.optimizer else ["fused Adam"]
        per_tp = integers("--tp", self.tp) or (self.where().gpus_per_node,)
        padded = any(padded_vocab(shape.vocab, tp) != shape.vocab for tp in per_tp)
        vocab = [f"vocab {shape.vocab} padded to multiples of 128 · tp"] if padded else []
        overlap = [] if self.dp_overlap else ["no overlap of data-parallel traffic with computation"]
        usual = (("mbs", "mbs = 1"), ("zero", "ZeRO-1"), ("recompute", "full recomputation"))
        layout = [word for name, word in usual if one_layout and not getattr(self, name)]
        return (*words, *vocab, *layout, *optimizer, *overlap, *where)

    @cached_property
    def times(self) -> TimesOf:
        """Where times of operations come from: the profile that was named, else the best known of each GPU."""
        profile = self._profile
        if profile is None:
            from quantbench.latency.model_times import BestTimes

            return BestTimes()
        measured = RememberedTimes(profile)

        def times(device: DeviceSpec) -> OpTimes:
            if device.name != profile.device.name:
                raise InputError("--profile", f"{self.profile} is of {profile.device.name}", f"one of {device.name}")
            return measured

        return times

    @cached_property
    def _profile(self) -> Profile | None:
        if self.profile is None:
            return None
        from quantbench.profile import Profile

        return Profile.load(self.profile)

    def where(self) -> Cluster:
        """The cluster: by name, or the reference system of the GPU."""
        if not self.gpu and not self.cluster and self._profile is not None:
            return replace(self, gpu=self._profile.device.name).where()
        if not self.gpu and not self.cluster:
            raise InputError(_WHO, "no GPU", "--gpu (quantbench devices lists them) or --cluster")
        device = lookup(self.gpu) if self.gpu else None
        found = cluster(self.cluster, device) if self.cluster or device is None else reference_cluster(device)
        if self._profile is not None:
            collectives = self._profile.tables["collective"]
            measured = zip(collectives.workloads(), collectives["latency_us"].tolist(), strict=True)
            fitted = shipped().of(found).fitted
            found = with_measured_links(found, measured, str(self.profile), between_nodes=not fitted)
        for option, rate in (("--node-gbit-per-s", self.node_gbit_per_s), ("--link-gb-per-s", self.link_gb_per_s)):
            if isinf(rate):
                raise InputError(_WHO, f"{option} {rate}", "a rate that is finite")
        node_gb_per_s = self.node_gbit_per_s / _BITS_PER_BYTE
        return found.changed(
            gpus_per_node=self.gpus_per_node or None, node_gb_per_s=node_gb_per_s or None,
            link_gb_per_s=self.link_gb_per_s or None,
        )  # fmt: skip

    def job(self, gpus: int = 0) -> Job:
        """What is planned for."""
        for name, value in (("gpus", gpus or self.gpus), ("gbs", self.gbs)):
            if not value:
                raise InputError(_WHO, f"no --{name}", f"--{name}, {_WHAT_IT_IS[name]}")
        return Job(
            self.shape(), self.where(), gpus or self.gpus or 0, self.gbs or 0, optimizer=self.optimizer or "fused_adam",
            dp_overlap=self.dp_overlap, rampup_step=self.rampup_step,
        )  # fmt: skip

    def space(self) -> Space:
        """What may vary in a search."""
        kinds = tuple(self.recompute.split(",")) if self.recompute else RECOMPUTATIONS
        return Space(
            dp=integers("--dp", self.dp), tp=integers("--tp", self.tp), pp=integers("--pp", self.pp),
            mbs=integers("--mbs", self.mbs), interleave=integers("--interleave", self.interleave),
            zero=integers("--zero", self.zero, low=0, high=3) or (0, 1, 2, 3), recompute=kinds,
            sequence_parallel=self.sequence_parallel, uneven=self.allow_uneven,
        )  # fmt: skip

    def layout(self) -> Layout:
        """The one layout that is to be checked."""
        tp, pp = self._one("tp"), self._one("pp")
        dp = self._one("dp", default=max(1, self.gpus // (tp * pp)) if self.gpus else 0)
        found = Layout(
            dp=dp, tp=tp, pp=pp, mbs=self._one("mbs", default=1), interleave=self._one("interleave", default=1),
            zero=self._one("zero", default=1, low=0), recompute=self.recompute or "full",
            sequence_parallel=bool(self.sequence_parallel),
        )  # fmt: skip
        return replace(found, partition=partition_of(self.shape().layers, pp, uneven=self.allow_uneven))

    def _one(self, name: str, *, default: int = 0, low: int = 1) -> int:
        values = integers(f"--{name}", getattr(self, name), low=low)
        if not values and default >= low:
            return default
        if len(values) != 1:
            typed = f"--{name} {getattr(self, name)}" if values else f"no --{name}"
            raise InputError(f"{_WHO} --check", typed, f"one value of --{name}")
        return values[0]

    def given(self) -> Given:
        """What the options say about rows that do not say it themselves."""
        for name in ("model", "config"):
            if getattr(self, name):
                raise InputError(f"{_WHO} --rows", f"--{name} {getattr(self, name)}", "models as the rows name them")
        cells = {
            name: getattr(self, name)
            for name in (
                "hidden", "heads", "kv_heads", "layers", "seq", "vocab", "gpus", "gbs", "optimizer", "recompute", "ffn",
                "gated", "sequence_parallel",
            )
            if getattr(self, name)
        }  # fmt: skip
        for name in ("dp", "tp", "pp", "mbs", "interleave", "zero"):
            values = integers(f"--{name}", getattr(self, name), low=0)
            if len(values) > 1:
                raise InputError(f"{_WHO} --rows", f"--{name} {getattr(self, name)}", "one value for rows without it")
            if values:
                cells[name] = values[0]
        if self.dtype:
            cells["precision"] = self.dtype
        if self.dropout is not None:
            cells["dropout"] = self.dropout
        for name, choices in (("attention", ATTENTIONS), ("softmax", SOFTMAXES)):
            if getattr(self, name):
                cells[name] = require_choice(_WHO, f"--{name}", getattr(self, name), choices)
        if "recompute" in cells:
            require_choice(_WHO, "recompute", cells["recompute"], RECOMPUTATIONS)
        return Given(
            cells=cells, cluster=self.cluster, gpu=self.gpu, gpus_per_node=self.gpus_per_node or None,
            node_gb_per_s=self.node_gbit_per_s / _BITS_PER_BYTE or None, link_gb_per_s=self.link_gb_per_s or None,
            dp_overlap=self.dp_overlap, as_typed=self.as_typed,
        )  # fmt: skip

    def shape_space(self) -> ShapeSpace:
        """What shapes are tried."""
        low, high = _range("--aspect", self.aspect)
        narrow, wide = _range("--head-dim", self.head_dim)
        if not isfinite(self.params):
            raise InputError(f"{_WHO} --shape-search", f"--params {self.params}", "a finite number of parameters")
        return ShapeSpace(
            parameters=self.params or parameters(self.shape()), tolerance=self.tolerance, aspect=(low, high),
            head_dim=(int(narrow), int(wide)),
        )  # fmt: skip


def _range(option: str, text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        values = float(low), float(high)
    except ValueError:
        values = (0.0, 0.0)
    if not colon or not 0 < values[0] <= values[1] < inf:
        raise InputError(option, repr(text), "from:to, both above 0 and finite")
    return values
