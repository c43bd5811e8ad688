"""Declares the options of `sweep`, converts them to `SweepOptions`, and rejects contradictions.

`SweepArguments` has the options as typed, and `options_on` converts them for a device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantbench.cli.model_options import GridOptions, assumed_words, held_and_dims
from quantbench.cli.options import option, percentage, typed_words
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.sweep.axes import Held, check_axes, parse_axis, with_defaults
from quantbench.units import parse_duration_s

if TYPE_CHECKING:
    from quantbench.sweep.options import SweepOptions
    from quantbench.sweep.plan import Plan
    from quantbench.workload import TransformerShape

# Default time for measuring, by device kind. With this budget, `make sweep` including installation
# takes less than three minutes on two cores, and less than five minutes on a GPU.
_BUDGET = {"cuda": "4m", "cpu": "60s"}
# Default precision, by device kind. Times of one thread on a shared CPU repeat only within 1 to
# 2 %, so a tighter target would cost time without a gain.
_PRECISION = {"cuda": "0.5%", "cpu": "1%"}
# Longest sampling time per point, in s, by device kind.
_MAX_TIME_S = {"cuda": 2.0, "cpu": 0.5}
# Options that control how points are measured and how many. Only these options are allowed with a
# file of transformer shapes.
_MEASUREMENT_OPTIONS = (
    "provider",
    "cache",
    "mode",
    "precision",
    "distribution",
    "budget",
    "points",
    "shard",
)
# Planners that --for knows.
_PLANNERS = ("aiconfigurator",)
RUN = "Run"
_timing = partial(option, panel="Timing")
run_option = partial(option, panel=RUN)


@dataclass(frozen=True, kw_only=True)
class SweepArguments(GridOptions):
    """The options of `sweep` as typed; "" for precision and budget means the device's default."""

    shapes: Path | None = option(
        None,
        "File of shapes, instead of --dim: CSV with columns m, n, k (single products), or JSON "
        "as written by "
        "advise --shapes-out (transformer shapes).",
    )
    for_: str = option(
        "",
        "Planner whose tables are measured for --model (several with commas) or --config, instead "
        "of --dim, the most informative points first: aiconfigurator.",
        "--for",
    )
    points: int = option(0, "Number of points to measure of the grid (0: all).", min=0)
    refine: bool = option(False, "After the points, bisect to the size of every step in the time.")
    provider: list[str] | None = option(
        None,
        "Libraries to measure, comma separated: torch (default), triton, torch.flash, "
        "triton.persistent@128x256, module:Class.",
    )
    cache: str = _timing("cold", "State of the last-level cache before a sample: cold or hot.")
    mode: str = _timing("auto", "Timing method: auto, events or graph.")
    precision: str = _timing(
        "", "Sample each point until its median is within ± this (default: 0.5%; CPU: 1%)."
    )
    distribution: str = _timing("normal", "Input values: normal, uniform, integers or zeros.")
    budget: str = run_option(
        "",
        "Time for measuring, start not counted: 8m, 90s or none (default: 4m; CPU: 60s; with "
        "--resume: none).",
    )
    shard: str = run_option("", "Part I/N of the points, for N jobs whose runs are merged later.")

    @property
    def listed(self) -> bool:
        """Whether --shapes or --for selects the points, so that no axis is needed."""
        return self.shapes is not None or bool(self.for_)

    @property
    def providers(self) -> tuple[str, ...]:
        """Names of the providers from all --provider options."""
        names = ",".join(self.provider or ["torch"]).split(",")
        return tuple(name.strip() for name in names)


def sweep_options(arguments: SweepArguments, device_kind: str) -> SweepOptions:
    """Converts the options, with the defaults for a device kind. Points of --for are not included.

    device_kind: cuda or cpu.
    Raises InputError for contradictory options, and for values that cannot be parsed.
    """
    from quantbench.sweep.options import SweepOptions
    from quantbench.sweep.shape_file import SUFFIX, read_shape_file, read_shapes
    from quantbench.timing.options import TimingOptions

    of_models = arguments.shapes is not None and arguments.shapes.suffix == SUFFIX
    about = _typed_except(arguments, "dim", "shapes", *_MEASUREMENT_OPTIONS)
    if of_models and about:  # a shape states its own sizes, ops and number formats
        typed = f"--shapes {arguments.shapes} with {about[0]}"
        raise InputError("sweep", typed, "shapes as the file describes them")
    held = Held()
    dims: tuple[str, ...] = ()
    if arguments.for_:
        _require_planner(arguments)
    else:
        held, dims = held_and_dims(arguments)
    budget = arguments.budget or _BUDGET[device_kind]
    precision = arguments.precision or _PRECISION[device_kind]
    shapes: dict[str, Any] = {}
    if arguments.shapes is not None and of_models:
        shapes["models"] = read_shape_file(arguments.shapes)
    elif arguments.shapes is not None:
        shapes["shapes"] = read_shapes(arguments.shapes)
    timing = TimingOptions(
        cache=arguments.cache,
        mode=arguments.mode,
        half_width=percentage("--precision", precision, above=True),
        max_time_s=_MAX_TIME_S[device_kind],
        distribution=arguments.distribution,
    )
    return SweepOptions(
        dims=dims,
        held=held,
        providers=arguments.providers,
        timing=timing,
        points=arguments.points,
        refine=arguments.refine,
        shard=_shard(arguments.shard),
        budget_s=_budget_s(budget),
        **shapes,
    )


def options_on(arguments: SweepArguments, spec: DeviceSpec) -> SweepOptions:
    """Converts the options for a device. With --for, the result includes the planner's points."""
    options = sweep_options(arguments, spec.torch_kind)
    if not arguments.for_:
        return options
    from quantbench.cli.sweep_for import with_points

    return with_points(options, arguments.for_, arguments, spec)


def _require_planner(arguments: SweepArguments) -> None:
    """Raises InputError if --for is unknown, has no model, or has options that select points."""
    planner = require_choice("sweep", "--for", arguments.for_, _PLANNERS)
    allowed = ("for_", "model", "config", "tp", "dtype", *_MEASUREMENT_OPTIONS)
    others = _typed_except(arguments, *allowed)
    if others:
        expected = "points that the planner needs: --model, --config, --tp and --dtype at most"
        raise InputError("sweep", f"--for {planner} with {others[0]}", expected)
    if not arguments.model and arguments.config is None:
        raise InputError("sweep", f"--for {planner} without a model", "--model or --config")


def assumed_of(
    arguments: SweepArguments, options: SweepOptions, plan: Plan, spec: DeviceSpec
) -> tuple[str, ...]:
    """Returns the assumptions that change the result of a planned sweep, one text each."""
    if options.works:
        from quantbench.cli.sweep_for import planner_assumptions

        return planner_assumptions(options, spec)
    if options.models:
        return _stated_words([one.shape for one in options.models])
    held = with_defaults(options.held, spec, options.dims)
    ops = {place.op.partition(".")[0] for point in plan.points for place in point.places}
    return assumed_words(arguments, held, ops, spec)


def _stated_words(shapes: Sequence[TransformerShape]) -> tuple[str, ...]:
    """Returns the settings that all shapes from a file have in common, one text each."""
    names = ["dtype", "attention", "seq", "mbs", "tp"]
    if any(shape.experts for shape in shapes):
        names += ["ep", "routing"]
    words = []
    for name in names:
        values = {getattr(shape, name) for shape in shapes}
        if len(values) == 1:
            words.append(f"{name} = {values.pop()}")
    return (*words, "all as the file says")


def check_words(arguments: SweepArguments, on: str, resume: Path | None, gpu: str) -> None:
    """Raises InputError for contradictory or impossible options, before a worker is started.

    on, resume, gpu: values of the options --on, --resume and --gpu.
    """
    from quantbench.providers.catalog import expand
    from quantbench.sweep.session import resumed_options

    if on:
        require_choice("sweep", "--on", on, ("ray",))
    if gpu:
        expected = "a sweep of the device at hand, or --dry-run"
        raise InputError("sweep", f"--gpu {gpu} without --dry-run", expected)
    if resume is None:
        options = sweep_options(arguments, "cuda")
        expand(options.providers)
        if options.dims:
            check_axes(tuple(parse_axis(dim if "=" in dim else f"{dim}=1") for dim in options.dims))
        return
    given = _typed_except(arguments, "budget")
    if given:
        expected = "the run's own options: --resume, with --budget at most"
        raise InputError("sweep", f"--resume {resume} with {given[0]}", expected)
    resumed_options(resume, budget_of(arguments))


def budget_of(arguments: SweepArguments) -> float | None:
    """Returns the budget of a resumed run, in s; None for no limit."""
    return _budget_s(arguments.budget or "none")


def _budget_s(text: str) -> float | None:
    """Parses a budget to seconds; `none` becomes None, which means no limit."""
    return None if text == "none" else parse_duration_s("--budget", text)


def _typed_except(arguments: SweepArguments, *names: str) -> list[str]:
    """Formats the typed options except those in `names`, one text each.

    names: field names of the options to leave out.
    """
    others = [field.name for field in fields(arguments) if field.name not in names]
    return typed_words(arguments, others)


def _shard(text: str) -> tuple[int, ...]:
    """Parses a shard: `2/8` becomes (2, 8), and "" becomes (). Raises InputError otherwise."""
    if not text:
        return ()
    found = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text)
    shard = tuple(map(int, found.groups())) if found else (0, 0)
    if not 1 <= shard[0] <= shard[1]:
        expected = "PART/PARTS from 1/PARTS to PARTS/PARTS, such as 2/8"
        raise InputError("--shard", repr(text), expected)
    return shard
