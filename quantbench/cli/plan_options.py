"""The options of `quantbench plan` as the planner's own types."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isfinite, isinf
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.cli.model_options import ModelOptions, chosen_model
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.interconnect import Cluster, cluster, reference_cluster
from quantbench.latency.op_times import OpTimes, RememberedTimes, TimesOf
from quantbench.planner.calibration import shipped
from quantbench.planner.context import Given
from quantbench.planner.formulas import RECOMPUTATIONS, parameters
from quantbench.planner.layout import Job, Layout, padded_vocab
from quantbench.planner.measured_links import with_measured_links
from quantbench.planner.search import Space
from quantbench.planner.shape_search import ShapeSpace
from quantbench.workload import TransformerShape
from quantbench.workload.transformer import ATTENTIONS, SOFTMAXES

if TYPE_CHECKING:
    from quantbench.profile import Profile

_WHO = "plan"
_BITS_PER_BYTE = 8
_WHAT_IT_IS = {"gpus": "how many there are", "gbs": "the global batch size in sequences, such as 2048"}


@dataclass(frozen=True)
class PlanArguments:
    """What was typed. 0, "" and None leave a thing open."""

    model: str
    config: Path | None
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    layers: int
    seq: int
    vocab: int
    dtype: str
    attention: str
    dropout: bool | None
    softmax: str
    optimizer: str
    gpus: int
    gpu: str
    profile: Path | None
    cluster: str
    gpus_per_node: int
    node_gbit_per_s: float
    link_gb_per_s: float
    gbs: int
    rampup_step: int
    dp_overlap: float
    dp: str
    tp: str
    pp: str
    mbs: str
    interleave: str
    zero: str
    recompute: str
    sequence_parallel: bool | None
    allow_uneven: bool
    params: float
    tolerance: float
    aspect: str
    head_dim: str
    as_typed: bool

    @cached_property
    def _model(self) -> tuple[TransformerShape, tuple[str, ...]]:
        names = ("hidden", "heads", "kv_heads", "ffn", "layers", "seq", "vocab")
        typed = {name: getattr(self, name) for name in names if getattr(self, name)}
        options = ModelOptions(
            self.model, self.config, typed, self.gated, self.dtype, self.attention, self.dropout, self.softmax
        )
        return chosen_model(_WHO, options, self.where().device, needed=("hidden", "heads", "layers", "vocab"))

    def shape(self) -> TransformerShape:
        """The model, from a preset or a config, changed by what else was typed."""
        return self._model[0]

    def assumed(self, *, one_layout: bool = False) -> tuple[str, ...]:
        """What moves the result and was not typed, in words. one_layout: that of the checked layout as well."""
        shape, words = self._model
        where = [] if self.cluster else [f"{self.where().name} as its system"]
        optimizer = [] if self.optimizer else ["fused Adam"]
        per_tp = _integers("--tp", self.tp) or (self.where().gpus_per_node,)
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
            self.shape(), self.where(), gpus or self.gpus, self.gbs, optimizer=self.optimizer or "fused_adam",
            dp_overlap=self.dp_overlap, rampup_step=self.rampup_step,
        )  # fmt: skip

    def space(self) -> Space:
        """What may vary in a search."""
        kinds = tuple(self.recompute.split(",")) if self.recompute else RECOMPUTATIONS
        return Space(
            dp=_integers("--dp", self.dp), tp=_integers("--tp", self.tp), pp=_integers("--pp", self.pp),
            mbs=_integers("--mbs", self.mbs), interleave=_integers("--interleave", self.interleave),
            zero=_integers("--zero", self.zero, low=0, high=3) or (0, 1, 2, 3), recompute=kinds,
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
        layers = self.shape().layers
        if layers % pp == 0:
            return found
        if (layers + 2) % pp == 0:
            return replace(found, partition="embedding")
        return replace(found, partition="uneven" if self.allow_uneven else "layers")

    def _one(self, name: str, *, default: int = 0, low: int = 1) -> int:
        values = _integers(f"--{name}", getattr(self, name), low=low)
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
            values = _integers(f"--{name}", getattr(self, name), low=0)
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


def _integers(option: str, text: str, *, low: int = 1, high: int = 2**31 - 1) -> tuple[int, ...]:
    if not text:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,10}", word) and low <= int(word) <= high for word in words):
        bounds = f"of at least {low}" if high == 2**31 - 1 else f"from {low} to {high}"
        raise InputError(option, repr(text), f"integers {bounds}, comma separated")
    return tuple(int(word) for word in words)


def _range(option: str, text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        values = float(low), float(high)
    except ValueError:
        values = (0.0, 0.0)
    if not colon or not 0 < values[0] <= values[1] < inf:
        raise InputError(option, repr(text), "from:to, both above 0 and finite")
    return values
