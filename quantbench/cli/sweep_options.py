"""The options of `quantbench sweep`, the SweepOptions that they give on a kind of device, and what was not typed.

`sweep`, `sweep --on` and the experiments of `check` use them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli.grid_options import GridOptions, assumed_words, held_and_dims
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.providers.catalog import expand
from quantbench.sweep.axes import check_axes, parse_axis, with_defaults
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.plan import Plan
from quantbench.sweep.session import resumed_options
from quantbench.sweep.shape_file import SUFFIX, NamedShape, read_shape_file, read_shapes
from quantbench.timing.options import TimingOptions
from quantbench.units import parse_duration_s

# With the installation before it, `make sweep` so stays under three minutes on two cores and under five on a GPU.
_BUDGET = {"cuda": "4m", "cpu": "75s"}
# One thread of a shared processor repeats within 1 to 2 %; asking more of it only takes time.
_HALF_WIDTH = {"cuda": 0.005, "cpu": 0.01}
_MAX_TIME = {"cuda": "2s", "cpu": "500ms"}
# Options that go with a file of transformer shapes: how to measure them, not what they are.
_BESIDE_MODELS = (
    "shapes", "provider", "cache", "mode", "half-width", "min-samples", "max-time", "distribution", "seed", "budget",
    "point-limit", "points", "shard",
)  # fmt: skip


_TIMING, _RUN = "Timing", "Run"


@dataclass(frozen=True, kw_only=True)
class SweepArguments(GridOptions):
    """The options as typed. half_width None, max_time "" and budget "" stand for the default of the device."""

    shapes: Annotated[
        Path | None,
        typer.Option(
            help="File of shapes, instead of --dim: CSV with columns m, n, k (single products), or JSON as written by "
            "advise --shapes-out (transformer shapes)."
        ),
    ] = None
    points: Annotated[int, typer.Option(min=0, help="Number of points to measure of the grid (0: all).")] = 0
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Choose --points where a fitted model is least certain.")
    ] = False
    refine: Annotated[
        bool, typer.Option("--refine", help="After the points, bisect to the exact size of every step in the time.")
    ] = False
    provider: Annotated[
        str,
        typer.Option(help="Libraries to measure, comma separated: torch, triton, torch.flash, my.module:Class."),
    ] = "torch"
    cache: Annotated[
        str, typer.Option(help="State of the last-level cache before a sample: cold or hot.", rich_help_panel=_TIMING)
    ] = "cold"
    mode: Annotated[str, typer.Option(help="Timing method: auto, events or graph.", rich_help_panel=_TIMING)] = "auto"
    half_width: Annotated[
        float | None,
        typer.Option(
            help="Target precision: relative half-width of the median's interval (default: 0.005; CPU: 0.01).",
            rich_help_panel=_TIMING,
        ),
    ] = None
    min_samples: Annotated[int, typer.Option(help="Least number of samples per point.", rich_help_panel=_TIMING)] = 10
    max_time: Annotated[
        str, typer.Option(help="Longest sampling time per point (default: 2s; CPU: 500ms).", rich_help_panel=_TIMING)
    ] = ""
    distribution: Annotated[
        str, typer.Option(help="Input values: normal, uniform, integers or zeros.", rich_help_panel=_TIMING)
    ] = "normal"
    seed: Annotated[int, typer.Option(help="Random seed of the order of points.", rich_help_panel=_TIMING)] = 0
    budget: Annotated[
        str,
        typer.Option(
            help="Time limit of the whole run: 8m, 90s or none (default: 4m; CPU: 75s; with --resume: none).",
            rich_help_panel=_RUN,
        ),
    ] = ""
    point_limit: Annotated[
        str, typer.Option(help="Time after which a point is stopped as hanging, such as 60s.", rich_help_panel=_RUN)
    ] = ""
    shard: Annotated[
        str,
        typer.Option(help="Part I/N of the points, for N jobs whose runs are merged later.", rich_help_panel=_RUN),
    ] = ""


def given_words(arguments: SweepArguments) -> tuple[str, ...]:
    """The options that are not as they are without any words, such as `--budget`."""
    changed = (
        field.name.replace("_", "-")
        for field in fields(SweepArguments)
        if field.name != "dim" and getattr(arguments, field.name) != field.default
    )
    return tuple(f"--{name}" for name in changed)


def sweep_options(arguments: SweepArguments, device_kind: str) -> SweepOptions:
    """Everything that was asked for, with the defaults of a kind of device."""
    held, dims = held_and_dims(arguments, listed=arguments.shapes is not None)
    models = _models(arguments)
    budget = arguments.budget or _BUDGET[device_kind]
    timing = TimingOptions(
        cache=arguments.cache,
        mode=arguments.mode,
        half_width=_HALF_WIDTH[device_kind] if arguments.half_width is None else arguments.half_width,
        min_samples=arguments.min_samples,
        max_samples=max(2000, arguments.min_samples),
        max_time_s=parse_duration_s("--max-time", arguments.max_time or _MAX_TIME[device_kind]),
        distribution=arguments.distribution,
        seed=arguments.seed,
    )
    return SweepOptions(
        dims=dims,
        held=held,
        providers=tuple(name.strip() for name in arguments.provider.split(",")),
        timing=timing,
        skip_impossible=arguments.skip_impossible,
        points=arguments.points,
        adaptive=arguments.adaptive,
        refine=arguments.refine,
        shard=_shard(arguments.shard),
        shapes=() if arguments.shapes is None or models else read_shapes(arguments.shapes),
        models=models,
        budget_s=None if budget == "none" else parse_duration_s("--budget", budget),
        limit_s=parse_duration_s("--point-limit", arguments.point_limit) if arguments.point_limit else None,
    )


def assumed_of(arguments: SweepArguments, options: SweepOptions, plan: Plan, spec: DeviceSpec) -> tuple[str, ...]:
    """What of a plan was not typed, in words."""
    held = with_defaults(options.held, spec)
    ops = {place.op.partition(".")[0] for point in plan.points for place in point.places}
    return assumed_words(arguments, held, ops, spec, listed=arguments.shapes is not None)


def check_words(arguments: SweepArguments, resume: Path | None, gpu: str) -> None:
    """Raise InputError for options that contradict each other or cannot be, before a worker is started."""
    if gpu:
        raise InputError("sweep", f"--gpu {gpu} without --dry-run", "a sweep of the device at hand, or --dry-run")
    if resume is not None and (arguments.dims or arguments.shapes):
        raise InputError(
            "sweep",
            f"--resume {resume} with --dim or --shapes",
            "the run's own points: --resume, with --budget at most",
        )
    if resume is None:
        options = sweep_options(arguments, "cuda")
        expand(options.providers)
        if options.dims:
            check_axes(tuple(parse_axis(dim if "=" in dim else f"{dim}=1") for dim in options.dims))
        return
    if given := [word for word in given_words(arguments) if word != "--budget"]:
        expected = "the run's own options: --resume, with --budget at most"
        raise InputError("sweep", f"--resume {resume} with {given[0]}", expected)
    resumed_options(resume, budget_of(arguments))


def budget_of(arguments: SweepArguments) -> float | None:
    """The budget of a resumed run in seconds: what was typed, else none."""
    return None if arguments.budget in ("", "none") else parse_duration_s("--budget", arguments.budget)


def _models(arguments: SweepArguments) -> tuple[NamedShape, ...]:
    """The transformer shapes of a JSON file; () for a CSV file of products. A shape says all about itself, so that
    options about sizes, ops and number formats are refused."""
    if arguments.shapes is None or arguments.shapes.suffix != SUFFIX:
        return ()
    about = [word for word in given_words(arguments) if word.removeprefix("--") not in _BESIDE_MODELS]
    if about:
        raise InputError("sweep", f"--shapes {arguments.shapes} with {about[0]}", "shapes as the file describes them")
    return read_shape_file(arguments.shapes)


def _shard(text: str) -> tuple[int, ...]:
    """`2/8` as (2, 8); () where none was given."""
    if not text:
        return ()
    part, _, parts = text.partition("/")
    if not all(re.fullmatch("[0-9]{1,9}", number) for number in (part, parts)) or not 1 <= int(part) <= int(parts):
        raise InputError("--shard", repr(text), "PART/PARTS from 1/PARTS to PARTS/PARTS, such as 2/8")
    return int(part), int(parts)
