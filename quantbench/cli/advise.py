"""`quantbench advise`: what a shape costs on a GPU, what it wastes past edges, and better shapes near it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.console import Console

from quantbench.advice import Advice, Advised, Repair, Space, repaired
from quantbench.advice import advise as advice_on
from quantbench.advice.advise import TOP
from quantbench.advice.report import advice_to_json, named_shapes
from quantbench.advice.space import DIMENSIONS
from quantbench.cli import advise_print as show
from quantbench.cli.model_options import ShapeOptions, chosen_model, size_option
from quantbench.cli.options import AsJson, grouped, integers, percentage
from quantbench.cli.output import check_file, output, print_json, say
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import OpTimes
from quantbench.sweep.shape_file import SUFFIX, write_shape_file
from quantbench.workload import TransformerShape

_WHO = "advise"
_LARGEST = 2**31 - 1
_SEARCH, _GATE = "Search for better shapes", "Check in continuous integration"


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(ShapeOptions):
    """A shape, a GPU and the shapes to compare with, as typed; "" and None leave a thing open."""

    size_names: ClassVar[tuple[str, ...]] = (*ShapeOptions.size_names, "head_dim", "mbs", "tp")

    head_dim: Annotated[int | None, size_option("Width of a head (default: hidden / heads).")] = None
    mbs: Annotated[int | None, size_option("Micro-batch size, sequences (default: 1).")] = None
    tp: Annotated[int | None, size_option("Tensor-parallel degree (default: 1).")] = None
    gpu: Annotated[
        str, typer.Option(help="GPU: a name such as h100 or a100-40gb, or a slug of `quantbench devices`.")
    ] = ""
    profile: Annotated[
        Path | None, typer.Option(help="Measured profile (JSON file), instead of the models of --gpu.")
    ] = None
    tolerance: Annotated[
        str, typer.Option(help="Largest deviation from the shape's number of parameters.", rich_help_panel=_SEARCH)
    ] = "5%"
    top: Annotated[
        str,
        typer.Option(
            help="Number of shapes to show, including those not surely faster; 0: no search (default: up to 8 that "
            "are surely faster).",
            rich_help_panel=_SEARCH,
        ),
    ] = ""
    head_dims: Annotated[
        str, typer.Option(help="Head widths to try beside the shape's own, comma separated.", rich_help_panel=_SEARCH)
    ] = "64,128,256"
    replicate_kv: Annotated[
        bool,
        typer.Option(
            "--replicate-kv", help="Also try fewer key/value heads than tp, replicated.", rich_help_panel=_SEARCH
        ),
    ] = False
    keep: Annotated[
        str,
        typer.Option(
            help="Dimensions to keep, comma separated: hidden, heads, kv_heads, head_dim, ffn, vocab, layers, mbs.",
            rich_help_panel=_SEARCH,
        ),
    ] = ""
    keep_layers: Annotated[
        bool, typer.Option("--keep-layers", help="Same as --keep layers.", rich_help_panel=_SEARCH)
    ] = False
    shapes_out: Annotated[
        Path | None,
        typer.Option(
            "--shapes-out",
            "-o",
            help="JSON file for all shapes that were compared, for `sweep --shapes`.",
            rich_help_panel=_SEARCH,
        ),
    ] = None
    fail_over: Annotated[
        str,
        typer.Option(
            help="Largest share of time wasted past edges, such as 3%; else exit code 1.", rich_help_panel=_GATE
        ),
    ] = ""

    def device(self) -> DeviceSpec:
        """The GPU that is asked about by name."""
        if not self.gpu:
            raise InputError(_WHO, "no GPU", "--gpu (quantbench devices lists them) or --profile")
        spec = lookup(self.gpu)
        if spec.kind != "cuda":
            raise InputError(_WHO, f"--gpu {self.gpu}", "a GPU: on processors waves are not modelled")
        return spec

    def times(self) -> tuple[OpTimes, OpTimes]:
        """Where times come from, the profile or the models of the GPU; and where launches do, always the models."""
        if self.profile is None:
            models = ModelTimes(self.device())
            return models, models
        from quantbench.profile import Profile

        if self.gpu:
            raise InputError(_WHO, f"--gpu {self.gpu} and --profile {self.profile}", "one of them")
        profile = Profile.load(self.profile)
        if profile.device.kind != "cuda":
            raise InputError(_WHO, f"--profile {self.profile} of {profile.device.name}", "the profile of a GPU")
        return profile, ModelTimes(profile.device)

    def shape(self, device: DeviceSpec, space: Space) -> tuple[TransformerShape, Repair | None, tuple[str, ...]]:
        """The shape, from a preset or a config or from sizes alone; the shapes that stand in for it where tp cannot
        split it (its own tp is 1 then); and what had to be assumed, in words."""
        try:
            shape, assumed = chosen_model(_WHO, self, device)
            repair = None
        except InputError:
            if not self.tp or self.tp == 1:
                raise
            shape, assumed = chosen_model(_WHO, replace(self, tp=1), device)
            repair = repaired(shape, self.tp, space)
            if repair is None:
                raise
        of_one = (f"{name} = 1" for name in ("mbs", "tp") if not getattr(self, name))
        untimed = ["dropout is not timed"] if shape.dropout else []
        return shape, repair, (*assumed, *of_one, *untimed)

    def space(self) -> Space:
        """What neighbours are tried."""
        kept = [word.strip().replace("-", "_") for word in self.keep.split(",")] if self.keep else []
        for name in kept:
            require_choice(_WHO, "--keep", name, DIMENSIONS)
        if self.keep_layers:
            kept.append("layers")
        return Space(
            tolerance=percentage("--tolerance", self.tolerance, most=50),
            head_dims=tuple(sorted(set(integers("--head-dims", self.head_dims)))),
            replicate_kv=self.replicate_kv,
            keep=tuple(dict.fromkeys(kept)),
        )

    def count(self) -> int:
        """How many neighbours are looked for."""
        if not self.top:
            return TOP
        if not re.fullmatch("[0-9]{1,10}", self.top) or int(self.top) > _LARGEST:
            raise InputError("--top", repr(self.top), "an integer of at least 0")
        return int(self.top)

    def most_waste(self) -> float | None:
        """The share of the time that may be wasted; None where there is no gate."""
        return percentage("--fail-over", self.fail_over) if self.fail_over else None


@grouped
def advise(
    arguments: AdviseOptions,
    junit: Annotated[Path | None, typer.Option(help="File for the result as JUnit XML.", rich_help_panel=_GATE)] = None,
    as_json: AsJson = False,
) -> None:
    """Say what each product, softmax and attention of a shape costs, what is wasted past edges, and what is better."""
    most, top, space = arguments.most_waste(), arguments.count(), arguments.space()
    out = arguments.shapes_out
    if junit is not None:
        check_file("write JUnit", junit)
    if out is not None:
        if out.suffix != SUFFIX:
            raise InputError("--shapes-out", str(out), f"a name that ends in {SUFFIX}, by which sweep knows it")
        check_file("write shapes", out)
    times, kernels = arguments.times()
    shape, repair, assumed = arguments.shape(times.device, space)
    advice = advice_on(shape, times, space=space, top=top, repair=repair, kernels=kernels)
    failed = most is not None and advice.cost.waste_share > most
    if junit is not None:
        from quantbench.advice.junit import write_junit  # comes with scipy, which few runs need

        write_junit(advice.cost, most, junit)
    if out is not None:
        write_shape_file(out, named_shapes(advice))
    if as_json:
        answer = {**advice_to_json(advice), "assumed": list(assumed), "fail_over": most, "failed": failed}
        print_json(answer)
        _exit_if(failed)
        return
    console = output()
    _say(console, advice, assumed, every=bool(arguments.top))
    if most is not None:
        console.print()
        say(console, *show.gate_line(advice.cost, most))
    if junit is not None:
        say(console, f"JUnit: {junit!s}")
    console.print()
    for line in show.next_lines(advice, out):
        say(console, line)
    _exit_if(failed)


def _exit_if(failed: bool) -> None:
    if failed:
        raise typer.Exit(1)


def _say(console: Console, advice: Advice, assumed: Sequence[str], *, every: bool) -> None:
    """What it costs and what is better. every: shapes that are not surely faster are shown as well."""
    wide = console.width >= show.WIDE
    for line in (*show.unmeasured_lines(advice), *show.header_lines(advice, assumed)):
        say(console, line)
    if advice.repair is not None:
        console.print()
        say(console, f"repaired: {advice.repair.words}")
        say(console, show.repaired_line(advice))
        _say_advised(console, "the others, against it", advice.repaired, wide)
    console.print()
    if any(show.stands_out(advice.cost, ops) for ops in advice.cost.by_name.values()):
        console.print(show.cost_table(advice.cost, reasons=wide))
    for line in (*show.cost_lines(advice.cost, reasons=not wide), "", *show.waste_lines(advice.cost)):
        say(console, line)
    if not advice.tried:
        return
    say(console, f"\n{show.verdict_line(advice)}")
    named = {one.found.shape for one in advice.better}
    alone = [one for one in advice.better_alone if one.found.shape not in named]
    _say_advised(console, "better shapes (● best gain for the smallest change)", advice.better, wide, marks=True)
    _say_advised(console, "better with one change alone", alone, wide)
    if every:
        unsure = dict.fromkeys((*advice.neighbours, *advice.singles))
        rest = [one for one in unsure if not one.found.sure and one.found.shape not in named]
        _say_advised(console, "candidates, none of them surely faster: measure before you move", rest, wide)
    if advice.better or alone or every or advice.repaired:
        say(console, show.GAIN_LINE)


def _say_advised(console: Console, title: str, advised: Sequence[Advised], wide: bool, *, marks: bool = False) -> None:
    if not advised:
        return
    console.print()
    console.print(show.advised_table(title, advised, marks=marks, reasons=wide))
    if not wide:
        for line in show.reason_lines(advised):
            say(console, line)
