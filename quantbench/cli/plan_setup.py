"""Converts the options of `plan` to the inputs of the planner (`Setup`).

The inputs are the model, cluster, software stack, op times and job, and the layouts to search or
check. The module also lists the assumptions about values that were not typed.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property
from math import isinf
from typing import Any

from quantbench.cli.model_options import chosen_model
from quantbench.cli.options import integers, typed_words
from quantbench.cli.plan_options import LAYOUT_OPTIONS, PlanOptions
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.interconnect import Cluster, cluster, reference_cluster
from quantbench.latency.libraries import library_words
from quantbench.latency.model_times import BestTimes
from quantbench.latency.op_times import CachedTimes, OpTimes, TimesOf
from quantbench.planner.calibration import (
    STACKS,
    Calibration,
    Calibrations,
    load_site,
    shipped,
    software,
    with_measured_links,
)
from quantbench.planner.layout import RECOMPUTATIONS, Job, Layout, partition_of
from quantbench.planner.rows import Given, TableRow
from quantbench.planner.search import LayoutSpace
from quantbench.profile import Profile
from quantbench.quantization import divisors
from quantbench.workload import TransformerShape
from quantbench.workload.parameters import padded_vocab
from quantbench.workload.transformer import ATTENTIONS

_WHO = "plan"
_BITS_PER_BYTE = 8
# Assumptions about a checked layout, by the option that replaces the assumption.
_USUAL = {
    "mbs": "mbs = 1",
    "zero": "ZeRO-1",
    "recompute": "full recomputation",
    "interleave": "no interleaving",
    "sequence_parallel": "no sequence parallelism",
    "cp": "no context parallelism",
    "ep": "all experts on each GPU",
}


class Setup:
    """Model, cluster, software, op times and job that the options of `plan` describe.

    Every property and method raises InputError if the options that it needs are missing or
    contradictory.
    """

    def __init__(self, options: PlanOptions) -> None:
        self.options = options

    @cached_property
    def profile(self) -> Profile | None:
        """Profile from --profile; None if the option was not typed."""
        if self.options.profile is None:
            return None
        if self.options.library:
            typed = f"--library {self.options.library} and --profile {self.options.profile}"
            raise InputError(_WHO, typed, "one of them")
        return Profile.load(self.options.profile)

    @cached_property
    def where(self) -> Cluster:
        """Cluster that --cluster names; by default the GPU's reference system.

        Link rates measured in --profile replace the cluster's rates. Typed rates replace either.
        """
        o = self.options
        device = None
        if o.gpu:
            device = lookup(o.gpu)
        elif not o.cluster and self.profile is not None:
            device = lookup(self.profile.device.name)
        if o.cluster:
            found = cluster(o.cluster, device)
        elif device is not None:
            found = reference_cluster(device)
        else:
            raise InputError(_WHO, "no GPU", "--gpu (quantbench devices lists them) or --cluster")
        if self.profile is not None:
            collectives = self.profile.tables["collective"]
            measured = zip(collectives.workloads(), collectives["latency_us"].tolist(), strict=True)
            fitted = self.calibrations.of(found, o.stack).fitted
            found = with_measured_links(found, measured, str(o.profile), between_nodes=not fitted)
        return found.changed(**rates(o))

    @cached_property
    def model(self) -> tuple[TransformerShape, tuple[str, ...]]:
        """Shape of the model, and the assumptions about the shape as text."""
        return chosen_model(self.options, self.where.device)

    @property
    def shape(self) -> TransformerShape:
        """Shape of the model, without the assumptions."""
        return self.model[0]

    @cached_property
    def calibrations(self) -> Calibrations:
        """Fitted factors that the package ships, overridden by those from --site."""
        if self.options.stack:
            require_choice(_WHO, "--stack", self.options.stack, tuple(STACKS))
        if self.options.site is None:
            return shipped()
        return replace(shipped(), chosen=load_site(self.options.site))

    @cached_property
    def stack(self) -> str:
        """Name of the software stack, from --stack or else from --site.

        Without these options, the name is "" if the package has factors fitted to the cluster.
        Otherwise it is the usual stack for the model.
        """
        if self.options.stack:
            return self.options.stack
        if self.calibrations.chosen is not None:
            return str(self.calibrations.chosen.provenance.get("stack", ""))
        if self.where.name in self.calibrations.sites:
            return ""
        return "megatron-bridge" if self.shape.experts or self.options.fp8_recipe else "megatron"

    @property
    def uneven(self) -> bool:
        """Whether pipeline stages may have different numbers of layers.

        The value of --allow-uneven counts if typed. Otherwise only megatron-bridge allows uneven
        stages, because Megatron's pipeline layouts divide layers unevenly.
        """
        typed = self.options.allow_uneven
        return self.stack == "megatron-bridge" if typed is None else typed

    @property
    def overlap(self) -> float:
        """Fraction of data-parallel traffic that overlaps with computation, 0 to 1.

        The value of --dp-overlap counts if typed. Otherwise the stack's usual fraction is used.
        """
        if self.options.dp_overlap is not None:
            return self.options.dp_overlap
        return float(software(self.stack).overlaps)

    def calibration(self, job: Job) -> Calibration:
        """Returns the fitted factors for a job's cluster and software stack."""
        return self.calibrations.of(job.cluster, job.stack)

    @cached_property
    def times_of(self) -> TimesOf:
        """Function that returns a device's op times, measured in --profile or predicted by models.

        With --profile, the function raises InputError for any device but the profile's.
        """
        profile = self.profile
        if profile is None:
            return BestTimes(self.options.library)
        measured = CachedTimes(profile)

        def times(device: DeviceSpec) -> OpTimes:
            if device.name != profile.device.name:
                what = f"{self.options.profile} is of {profile.device.name}"
                raise InputError("--profile", what, f"one of {device.name}")
            return measured

        return times

    def job(self, gpus: int = 0) -> Job:
        """Builds the training job.

        gpus: number of GPUs; 0 means --gpus.
        Raises InputError if the number of GPUs or the global batch size is missing.
        """
        o = self.options
        gpus = gpus or o.gpus or 0
        if not gpus:
            raise InputError(_WHO, "no --gpus", "--gpus, how many there are")
        if not o.gbs:
            expected = "--gbs, the global batch size in sequences, such as 2048"
            raise InputError(_WHO, "no --gbs", expected)
        return Job(
            self.shape,
            self.where,
            gpus,
            o.gbs,
            optimizer=o.optimizer or "fused_adam",
            dp_overlap=self.overlap,
            stack=self.stack,
        )

    def space(self) -> LayoutSpace:
        """Returns the layouts to search, limited by the typed options."""
        o = self.options
        degrees: dict[str, Any] = {}
        for name in ("dp", "tp", "pp", "cp", "mbs", "interleave"):
            degrees[name] = integers(f"--{name}", getattr(o, name))
        sequence_parallel: tuple[bool, ...] = (False, True)
        if o.sequence_parallel is not None:
            sequence_parallel = (o.sequence_parallel,)
        return LayoutSpace(
            **degrees,
            zero=integers("--zero", o.zero, low=0, high=3) or (0, 1, 2, 3),
            recompute=tuple(filter(None, o.recompute.split(","))),
            sequence_parallel=sequence_parallel,
            uneven=self.uneven,
            ep=integers("--ep", o.ep) or tuple(divisors(self.shape.experts or 1)),
        )

    def layout(self) -> Layout:
        """Returns the layout that --check examines.

        Without --dp, the data-parallel degree follows from --gpus.

        Raises InputError if an option has several values, if --tp or --pp is missing, or if --dp
        and --gpus are both missing.
        """
        o = self.options
        tp = self._one("tp")
        pp = self._one("pp")
        one = {name: self._one(name, 1) for name in ("cp", "mbs", "interleave", "ep")}
        rest = max(1, o.gpus // (tp * pp * one["cp"])) if o.gpus else None
        return Layout(
            **one,
            dp=self._one("dp", rest),
            tp=tp,
            pp=pp,
            zero=self._one("zero", 1, low=0),
            recompute=o.recompute or "full",
            sequence_parallel=bool(o.sequence_parallel),
            partition=partition_of(self.shape.layers, pp, uneven=self.uneven),
        )

    def _one(self, name: str, default: int | None = None, *, low: int = 1) -> int:
        """Returns the single value of a layout option; `default` if no value was typed.

        low: smallest allowed value.
        Raises InputError for several values, and if both the value and the default are missing.
        """
        text = getattr(self.options, name)
        values = integers(f"--{name}", text, low=low)
        if not values and default is not None:
            return default
        if len(values) != 1:
            typed = f"--{name} {text}" if values else f"no --{name}"
            raise InputError(f"{_WHO} --check", typed, f"one value of --{name}")
        return values[0]

    def assumed(self, *, one_layout: bool = False) -> list[str]:
        """Returns the assumptions that change the result, one text each.

        one_layout: whether to include the assumptions about the layout that --check examines.
        """
        assumed = [*self.model[1], *self._job_assumptions()]
        if one_layout:
            for name, words in _USUAL.items():
                if not getattr(self.options, name) and (name != "ep" or self.shape.experts):
                    assumed.append(words)
        return assumed

    def _job_assumptions(self) -> Iterator[str]:
        """Yields the assumptions about vocabulary, experts, optimizer, machines and software."""
        o, shape = self.options, self.shape
        # Without --tp, the padding is listed if it would be needed for tp = 8.
        degrees = integers("--tp", o.tp) or (8,)
        if any(padded_vocab(shape.vocab, tp) != shape.vocab for tp in degrees):
            yield f"vocab {shape.vocab} padded to multiples of 128 · tp"
        if shape.experts:
            how = "one batch and a fitted factor, balanced, whole on each GPU"
            yield f"experts not measured in training: {how}"
            yield "exchange between experts at the links' rates (not measured)"
        if not o.optimizer:
            yield "fused Adam"
        if o.allow_uneven is None:
            yield f"stages of {'any' if self.uneven else 'equal'} length"
        if not o.cluster:
            yield f"{self.where.name} as its system"
        if not o.stack and not o.site:
            why = ""
            if self.stack == "megatron-bridge":
                why = " (factors of experts and of 8-bit products are fitted to it; else megatron)"
            yield f"--stack {self.stack}{why}" if self.stack else f"software of {self.where.name}"
        if o.dp_overlap is None:
            overlapping = "overlapping" if self.overlap else "not overlapping"
            yield f"data-parallel traffic {overlapping} with computation"
        fitted = o.site or self.stack in self.calibrations.provenance
        stack = software(self.stack)
        if stack.fp32_gradients and shape.attention_dtype == "bf16":
            yield "gradients kept in fp32"
        if shape.fp8_recipe:
            kept = f"copies in {shape.dtype} beside weights in {shape.attention_dtype}"
            if shape.fp8_recipe in stack.narrow_weights:
                kept = f"weights of linear layers kept in {shape.dtype} alone"
            yield kept
        if (shape.experts or shape.fp8_recipe) and not fitted:
            yield "nothing fitted to 8-bit products or experts of that software"
        if o.profile is None:
            yield library_words(self.where.device.name, shape.dtype, o.library, _WHO)


def rates(o: PlanOptions) -> dict[str, Any]:
    """Returns the typed GPUs per node and link rates (GB/s) as arguments of `Cluster.changed`.

    Raises InputError for an infinite rate.
    """
    for name in ("node_gbit_per_s", "link_gb_per_s"):
        if isinf(getattr(o, name)):
            raise InputError(_WHO, typed_words(o, [name])[0], "a rate that is finite")
    found = {
        "gpus_per_node": o.gpus_per_node,
        "node_gb_per_s": o.node_gbit_per_s / _BITS_PER_BYTE,
        "link_gb_per_s": o.link_gb_per_s,
    }
    return {name: value for name, value in found.items() if value}


def given(o: PlanOptions) -> Given:
    """Returns the typed options as values for empty cells in a table of layouts.

    Raises InputError for --model and --config, and for an option with several values.
    """
    for typed in typed_words(o, ("model", "config")):
        raise InputError(f"{_WHO} --rows", typed, "models as the rows name them")
    cells: dict[str, Any] = {one.name: getattr(o, one.name, None) for one in fields(TableRow)}
    for name in LAYOUT_OPTIONS[: LAYOUT_OPTIONS.index("recompute")]:
        values = integers(f"--{name}", getattr(o, name), low=0)
        if len(values) > 1:
            typed = f"--{name} {getattr(o, name)}"
            raise InputError(f"{_WHO} --rows", typed, "one value for rows without it")
        cells[name] = values[0] if values else None
    require_choice(_WHO, "--attention", o.attention, ("", *ATTENTIONS))
    require_choice(_WHO, "--recompute", o.recompute, ("", *RECOMPUTATIONS))
    cells["precision"] = o.dtype
    cells["gated"] = o.gated or None
    if o.untied:
        cells["tied"] = False
    return Given(cells, rates(o))
