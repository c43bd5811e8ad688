"""Command `plan`: ranks the layouts of a training job over GPUs, or predicts the rows of a table of layouts.

Entry points: `plan`, loaded by `app`; its options `PlanOptions`, used by `plan_run`, which runs each mode.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from quantbench.cli.model_options import ShapeOptions, chosen_model
from quantbench.cli.options import (
    command,
    gpu_option,
    integers,
    json_option,
    library_option,
    option,
    profile_option,
)
from quantbench.cli.output import print_result
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.interconnect import Cluster, cluster, reference_cluster
from quantbench.latency.libraries import library_words
from quantbench.planner.calibration import STACKS, Calibration, Calibrations, load_site, shipped, with_measured_links
from quantbench.planner.layout import RECOMPUTATIONS, Job, Layout, partition_of
from quantbench.workload import TransformerShape
from quantbench.workload.parameters import padded_vocab
from quantbench.workload.transformer import ATTENTIONS, SOFTMAXES

if TYPE_CHECKING:
    from quantbench.latency.op_times import OpTimes, TimesOf
    from quantbench.planner.rows import Given
    from quantbench.planner.search import Space
    from quantbench.profile import Profile

_WHO = "plan"
_SITE = Path("site.json")
# Number of results of a search that are printed unless said otherwise.
_TOP = 20
_BITS_PER_BYTE = 8
_WHAT_IT_IS = {"gpus": "how many there are", "gbs": "the global batch size in sequences, such as 2048"}
# Defaults that are not searched over, by option; those of one layout, which a search tries all values of, before them.
_FIXED = (("cp", "no context parallelism"),)
_OF_ONE_LAYOUT = (
    ("mbs", "mbs = 1"), ("zero", "ZeRO-1"), ("recompute", "full recomputation"), ("interleave", "no interleaving"),
    ("sequence_parallel", "no sequence parallelism"), ("ep", "all experts on each GPU"),
)  # fmt: skip
_MACHINES = "Machines"
_machines = partial(option, panel=_MACHINES)
_layout = partial(option, panel="Layout (comma separated lists)")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ShapeOptions):
    """The options of `plan` as typed; 0, "" and None stand for the default."""

    plans: ClassVar[bool] = True

    untied: bool = option(False, "Separate matrices for embedding and logits.", panel="Model")
    optimizer: str = option("", "Optimizer: fused_adam, adam or adam_8bit (default: fused_adam).", panel="Model")
    gpus: int | None = _machines(None, "Number of GPUs.", min=1)
    gpu: str = gpu_option("", _MACHINES)
    library: str = library_option(_MACHINES)
    profile: Path | None = profile_option(_MACHINES)
    stack: str = _machines(
        "", f"Software: {', '.join(STACKS)} (default: the site's, else megatron; megatron-bridge for experts and FP8)."
    )
    site: Path | None = _machines(None, "Factors of your site (JSON file, from --fit); they replace the stack's.")
    cluster: str = _machines("", "Known system: jean-zay-a100, dgx-a100, … (default: the GPU's reference system).")
    gpus_per_node: int = _machines(0, "GPUs per node (0: the system's).", min=0)
    node_gbit_per_s: float = _machines(
        0, "Bandwidth of a node's network, Gbit/s, all adapters together (0: the system's).", min=0
    )
    link_gb_per_s: float = _machines(0, "Bus bandwidth of all-reduce inside a node, GB/s (0: the system's).", min=0)
    gbs: int | None = _machines(None, "Global batch size, sequences.", min=1)
    dp_overlap: float | None = _machines(
        None, "Share of data-parallel traffic that overlaps with computation (default: the stack's).", min=0, max=1
    )
    dp: str = _layout("", "Data-parallel degrees (default: all).")
    tp: str = _layout("", "Tensor-parallel degrees (default: all).")
    pp: str = _layout("", "Pipeline-parallel degrees (default: all).")
    mbs: str = _layout("", "Micro-batch sizes, sequences (default: all).")
    interleave: str = _layout("", "Model chunks per pipeline stage (default: all).")
    zero: str = _layout("", "ZeRO stages, 0 to 3 (default: all).")
    recompute: str = _layout(
        "",
        "Activation recomputation: full, none, selective (default: all; selective without flash attention only).",
    )
    cp: str = _layout("", "Context-parallel degrees (default: 1).")
    ep: str = _layout("", "Expert-parallel degrees of a model with experts (default: all).")
    sequence_parallel: bool | None = _layout(
        None, "Only layouts with sequence parallelism, or only without (default: both)."
    )
    allow_uneven: bool | None = _layout(
        None,
        "Also try pipeline stages with different numbers of layers (default: with megatron-bridge).",
        "--allow-uneven/--no-allow-uneven",
    )
    head_dim: int = option(0, "Width of a head (0: hidden / heads).", panel="Model", min=0)

    @cached_property
    def _model(self) -> tuple[TransformerShape, tuple[str, ...]]:
        shape, words = chosen_model(_WHO, self, self.where().device, needed=("hidden", "heads", "layers", "vocab"))
        if self.untied:
            shape = replace(shape, tied=False)
        if self.head_dim:
            shape = replace(shape, head_dim=self.head_dim)
        return shape, words

    def shape(self) -> TransformerShape:
        """Returns the model: a preset or configuration with the typed sizes, or the typed sizes alone."""
        return self._model[0]

    def assumed(self, *, one_layout: bool = False) -> tuple[str, ...]:
        """Lists the assumptions that change the result, as text. one_layout: include those about the checked layout."""
        shape, words = self._model
        per_tp = integers("--tp", self.tp) or (self.where().gpus_per_node,)
        padded = any(padded_vocab(shape.vocab, tp) != shape.vocab for tp in per_tp)
        usual = _OF_ONE_LAYOUT if one_layout else ()
        stages = ("allow_uneven", f"stages of {'any' if self.uneven else 'equal'} length")
        after = (("optimizer", "fused Adam"), *_FIXED, stages, ("cluster", f"{self.where().name} as its system"))
        vocab = [f"vocab {shape.vocab} padded to multiples of 128 · tp"] if padded else []
        if shape.experts:
            said = ["experts not measured in training: one batch and a fitted factor", "balanced routing"]
            said += ["whole experts on each GPU"]
            words = (*words, *said, "exchange between experts at the links' rates (not measured)")
        site = self.where().name if not self.used_stack else ""
        stack = [] if self.stack or self.site else [f"software of {site}" if site else f"--stack {self.used_stack}"]
        overlaps = "overlapping" if self.overlap else "not overlapping"
        stack += [f"data-parallel traffic {overlaps} with computation"] if self.dp_overlap is None else []
        models = self.profile is None
        apart = self.used_stack and self.used_stack in self.calibrations.provenance
        if (shape.experts or shape.fp8_recipe) and not apart and self.site is None:
            stack += ["nothing fitted to 8-bit products or experts of that software"]
        whose = [library_words(self.where().device.name, shape.dtype, self.library, _WHO)] if models else []
        return (
            *words,
            *vocab,
            *(word for name, word in (*usual, *after) if not getattr(self, name) and (name != "ep" or shape.experts)),
            *stack,
            *whose,
        )

    @cached_property
    def calibrations(self) -> Calibrations:
        """The shipped factors, or those of --site."""
        found = shipped() if self.site is None else replace(shipped(), chosen=load_site(self.site))
        if self.stack:
            require_choice(_WHO, "--stack", self.stack, tuple(STACKS))
        return found

    @cached_property
    def used_stack(self) -> str:
        """--stack, or that of --site; "" if the cluster's own factors are used; else megatron-bridge for experts and
        8-bit products, megatron for other models."""
        if self.stack or self.calibrations.chosen is not None:
            chosen = self.calibrations.chosen
            return self.stack or str(chosen.provenance.get("stack", "") if chosen else "")
        if self.where().name in self.calibrations.sites:
            return ""
        return "megatron-bridge" if self.shape().experts or self.fp8_recipe else "megatron"

    @property
    def uneven(self) -> bool:
        """--allow-uneven, or whether the stack usually divides layers that way (Megatron's pipeline layouts)."""
        return self.used_stack == "megatron-bridge" if self.allow_uneven is None else self.allow_uneven

    @property
    def overlap(self) -> float:
        """--dp-overlap, or what is usual for the stack."""
        if self.dp_overlap is not None:
            return self.dp_overlap
        return float(self.used_stack in STACKS and STACKS[self.used_stack].overlaps)

    def calibration(self, job: Job, stack: str | None = None) -> Calibration:
        """Returns the factors for a job. stack: another stack than the job's."""
        return self.calibrations.of(job.cluster, job.stack if stack is None else stack)

    @cached_property
    def times(self) -> TimesOf:
        """Function from a device to the times of its ops: those of --profile, else of the best models of the device."""
        from quantbench.latency.model_times import BestTimes
        from quantbench.latency.op_times import RememberedTimes

        profile = self._profile
        if profile is not None and self.library:
            raise InputError(_WHO, f"--library {self.library} and --profile {self.profile}", "one of them")
        if profile is None:
            return BestTimes(self.library)
        measured = RememberedTimes(profile)

        def times(device: DeviceSpec) -> OpTimes:
            if device.name != profile.device.name:
                raise InputError("--profile", f"{self.profile} is of {profile.device.name}", f"one of {device.name}")
            return measured

        return times

    @cached_property
    def _profile(self) -> Profile | None:
        from quantbench.profile import Profile

        return None if self.profile is None else Profile.load(self.profile)

    def where(self) -> Cluster:
        """Returns --cluster or the GPU's reference system, with the rates of --profile and the typed ones."""
        if not self.gpu and not self.cluster and self._profile is None:
            raise InputError(_WHO, "no GPU", "--gpu (quantbench devices lists them) or --cluster")
        gpu = self.gpu or (self._profile.device.name if self._profile is not None and not self.cluster else "")
        device = lookup(gpu) if gpu else None
        found = cluster(self.cluster, device) if self.cluster or device is None else reference_cluster(device)
        if self._profile is not None:
            collectives = self._profile.tables["collective"]
            measured = zip(collectives.workloads(), collectives["latency_us"].tolist(), strict=True)
            fitted = self.calibrations.of(found, self.stack).fitted
            found = with_measured_links(found, measured, str(self.profile), between_nodes=not fitted)
        for name, rate in (("--node-gbit-per-s", self.node_gbit_per_s), ("--link-gb-per-s", self.link_gb_per_s)):
            if isinf(rate):
                raise InputError(_WHO, f"{name} {rate}", "a rate that is finite")
        return found.changed(
            gpus_per_node=self.gpus_per_node or None, node_gb_per_s=self.node_gbit_per_s / _BITS_PER_BYTE or None,
            link_gb_per_s=self.link_gb_per_s or None,
        )  # fmt: skip

    def job(self, gpus: int = 0) -> Job:
        """Builds the training job. gpus: number of GPUs (0: --gpus)."""
        for name, value in (("gpus", gpus or self.gpus), ("gbs", self.gbs)):
            if not value:
                raise InputError(_WHO, f"no --{name}", f"--{name}, {_WHAT_IT_IS[name]}")
        return Job(
            self.shape(), self.where(), gpus or self.gpus or 0, self.gbs or 0, optimizer=self.optimizer or "fused_adam",
            dp_overlap=self.overlap, stack=self.used_stack,
        )  # fmt: skip

    def space(self) -> Space:
        from quantbench.planner.search import Space
        from quantbench.quantization import divisors

        return Space(
            dp=integers("--dp", self.dp),
            tp=integers("--tp", self.tp),
            pp=integers("--pp", self.pp),
            mbs=integers("--mbs", self.mbs),
            interleave=integers("--interleave", self.interleave),
            zero=integers("--zero", self.zero, low=0, high=3) or (0, 1, 2, 3),
            recompute=self._recomputations(),
            sequence_parallel=self.sequence_parallel,
            uneven=self.uneven,
            cp=integers("--cp", self.cp) or (1,),
            ep=integers("--ep", self.ep) or tuple(divisors(self.shape().experts or 1)),
        )

    def _recomputations(self) -> tuple[str, ...]:
        """Returns the typed kinds of recomputation."""
        return tuple(self.recompute.split(",")) if self.recompute else ()

    def layout(self) -> Layout:
        tp, pp, cp = self._one("tp"), self._one("pp"), self._one("cp", default=1)
        dp = self._one("dp", default=max(1, self.gpus // (tp * pp * cp)) if self.gpus else 0)
        found = Layout(
            dp=dp,
            tp=tp,
            pp=pp,
            mbs=self._one("mbs", default=1),
            interleave=self._one("interleave", default=1),
            zero=self._one("zero", default=1, low=0),
            recompute=self.recompute or "full",
            sequence_parallel=bool(self.sequence_parallel),
            cp=cp,
            ep=self._one("ep", default=1),
        )
        return replace(found, partition=partition_of(self.shape().layers, pp, uneven=self.uneven))

    def _one(self, name: str, *, default: int = 0, low: int = 1) -> int:
        values = integers(f"--{name}", getattr(self, name), low=low)
        if not values and default >= low:
            return default
        if len(values) != 1:
            typed = f"--{name} {getattr(self, name)}" if values else f"no --{name}"
            raise InputError(f"{_WHO} --check", typed, f"one value of --{name}")
        return values[0]

    def given(self) -> Given:
        """Returns default values for the cells that rows of a table leave empty."""
        from quantbench.planner.rows import Given

        for name in ("model", "config"):
            if getattr(self, name):
                raise InputError(f"{_WHO} --rows", f"--{name} {getattr(self, name)}", "models as the rows name them")
        cells = {
            name: getattr(self, name)
            for name in (
                "hidden", "heads", "kv_heads", "layers", "seq", "vocab", "gpus", "gbs", "optimizer", "recompute", "ffn",
                "gated", "sequence_parallel", "fp8_recipe", "head_dim",
            )
            if getattr(self, name)
        }  # fmt: skip
        for name in ("dp", "tp", "pp", "cp", "ep", "mbs", "interleave", "zero"):
            values = integers(f"--{name}", getattr(self, name), low=0)
            if len(values) > 1:
                raise InputError(f"{_WHO} --rows", f"--{name} {getattr(self, name)}", "one value for rows without it")
            if values:
                cells[name] = values[0]
        cells |= {"precision": self.dtype, "dropout": self.dropout, "tied": False if self.untied else None}
        cells["dp_overlap"] = self.dp_overlap
        for name, choices in (("attention", ATTENTIONS), ("softmax", SOFTMAXES)):
            cells[name] = require_choice(_WHO, f"--{name}", getattr(self, name), ("", *choices))
        if self.recompute:
            require_choice(_WHO, "--recompute", self.recompute, RECOMPUTATIONS)
        return Given(
            cells=cells, cluster=self.cluster, gpu=self.gpu, gpus_per_node=self.gpus_per_node or None,
            node_gb_per_s=self.node_gbit_per_s / _BITS_PER_BYTE or None, link_gb_per_s=self.link_gb_per_s or None,
            stack=self.stack,
        )  # fmt: skip


@command
def plan(
    arguments: PlanOptions,
    rows: Path | None = option(None, "CSV table of layouts to predict row by row (columns as in bloom_tables.csv)."),
    check: bool = option(False, "Check one layout, or with --rows a table; exit code 1 if anything is wrong."),
    fit: Path | None = option(None, "CSV table of your site's runs: fit the factors to it and write them to --output."),
    output: Path = option(_SITE, "File for --fit.", "--output", "-o"),
    memory: bool = option(False, "Show the memory of the best layouts by part."),
    top: int = option(_TOP, "Number of results to print.", min=1),
    as_json: bool = json_option(),
) -> None:
    """Rank all layouts (DP, TP, PP, MBS, interleaving, ZeRO, recomputation) of a job by predicted time."""
    from quantbench.cli import plan_run
    from quantbench.planner.predict import provenance

    modes = (("--fit", fit is not None), ("--rows", rows is not None), ("--check", check))
    asked = [word for word, typed in modes if typed]
    if len(asked) > 1 and asked != ["--rows", "--check"]:
        raise InputError(_WHO, f"{asked[1]} with {asked[0]}", "one of them")
    if fit is None and output != _SITE:
        raise InputError(_WHO, f"--output {output} without --fit", "--fit with it")
    if memory and asked not in ([], ["--check"]):
        raise InputError(_WHO, f"--memory with {asked[0]}", "a search over layouts, or --check of one")
    if top != _TOP and asked:
        raise InputError(_WHO, f"--top {top} with {asked[0]}", "a search")
    if fit is not None:
        found, answer, lines = plan_run.fit_table(arguments, fit, output)
    elif rows is not None:
        mode = plan_run.check_table if check else plan_run.predict_table
        found, answer, lines = mode(arguments, rows)
    elif check:
        found, answer, lines = plan_run.check_layout(arguments, memory=memory)
    else:
        found, answer, lines = plan_run.search_layouts(arguments, top, memory=memory)
    print_result(as_json, lambda: {**provenance(sys.argv[1:]), **answer()}, lines)
    if found:
        raise typer.Exit(1)
