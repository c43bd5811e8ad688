"""Defines the options of a sweep, and builds a device's plan from them (`plan_sweep`)."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_int
from quantbench.launch import Tile
from quantbench.providers.catalog import expand, gemm_tiles
from quantbench.store.typed import decode, encode
from quantbench.sweep.axes import SHAPE_DIM, Axis, Held, with_defaults
from quantbench.sweep.edges import parse_grid
from quantbench.sweep.plan import GridPoint, Plan, build_plan, lay_out, num_fitting
from quantbench.sweep.shape_file import NamedShape, named_shapes
from quantbench.sweep.sizes import GEMM_DIMS
from quantbench.timing.options import TimingOptions
from quantbench.workload import Attention, Gemm, Op


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep, from which `plan_sweep` builds the plan for a device.

    Exactly one of dims, shapes, models and works is set, and selects what is measured.

    dims: axes as the user typed them, `hidden` or `hidden=1024:4096`.
    held: sizes and options that no axis varies.
    providers: names of providers, or of provider groups such as `torch`.
    timing: options of the timer.
    budget_s: time for the whole sweep, in s; None for no limit.
    limit_s: time after which a point counts as hanging, in s; None to derive it from the point's
        estimate.
    shapes: (m, n, k, batch) of each GEMM to measure.
    models: transformer shapes; all their ops are measured, forward and backward.
    works: workloads, in the order in which they are measured.
    export: for `works`, the options with which `profile export` writes a planner's files from the
        run; "" for none.
    points: maximum number of points to measure; 0 for all points. Grid points are selected at
        random, each with all its ops.
    refine: whether to bisect to every edge that the points of the plan show.
    shard: (number, count) of the shard to measure, such as (2, 8) for the second of eight shards;
        () for the whole plan.
    tiles: tile that each user-defined provider declares, by provider name. The provider's edges are
        predicted for this tile.
    """

    dims: tuple[str, ...]
    held: Held = field(default_factory=Held)
    providers: tuple[str, ...] = ("torch",)
    timing: TimingOptions = field(default_factory=TimingOptions)
    budget_s: float | None = None
    limit_s: float | None = None
    shapes: tuple[tuple[int, int, int, int], ...] = ()
    models: tuple[NamedShape, ...] = ()
    works: tuple[Gemm | Attention, ...] = ()
    export: str = ""
    points: int = 0
    refine: bool = False
    shard: tuple[int, ...] = ()
    tiles: dict[str, Tile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        listed = self.shapes or self.models
        if self.refine and listed:
            raise InputError(
                "sweep",
                "--refine with --shapes",
                "--refine along --dim, all of its points measured",
            )
        if self.shard:
            if len(self.shard) != 2:
                raise InputError(
                    "sweep", f"shard = {self.shard}", "a part and how many parts there are"
                )
            parts = require_int("sweep", "parts of the plan", self.shard[1])
            require_int("sweep", "part of the plan", self.shard[0], high=parts)
        require_int("sweep", "points", self.points, low=0)
        if self.shard and self.refine:
            raise InputError(
                "sweep", "--shard with --refine", "--shard of a plan that is known beforehand"
            )
        if self.dims and listed:
            raise InputError("sweep", f"--shapes with --dim {self.dims[0]}", "one or the other")


def options_to_json(options: SweepOptions) -> dict[str, Any]:
    """Encodes options for the file of a run (`run.json`)."""
    encoded: dict[str, Any] = encode(options)
    return encoded


def options_from_json(data: object) -> SweepOptions:
    """Decodes options that `options_to_json` encoded. Raises InputError for other content."""
    if not isinstance(data, dict):
        raise InputError("options", repr(data)[:80], "a JSON object")
    models = named_shapes(data["models"]) if data.get("models") else ()
    return decode(SweepOptions, {**data, "models": models})


def plan_sweep(
    options: SweepOptions, spec: DeviceSpec, done: Collection[str] = ()
) -> tuple[tuple[Axis, ...], Plan]:
    """Returns the axes of a sweep, and its plan limited to `points`, the shard and the budget.

    Groups beyond the budget stay in `Plan.left_out`. Bisection (`refine`) adds its points later.

    done: keys of points that were measured before; the plan leaves these points out.
    Raises InputError if the options have no valid plan.
    """
    axes, plan = whole_plan(options, spec)
    if options.points:
        # If `points` is set, every grid point is its own group (`whole_plan`), in random order.
        count = num_fitting(plan.groups, options.points, lambda point: 1)
        plan = replace(plan, groups=plan.groups[:count])
    if options.shard:
        part, parts = options.shard
        if part > len(plan.groups):
            raise InputError(
                "--shard",
                f"{part}/{parts}",
                f"at most {len(plan.groups)} parts: sizes that stay together",
            )
        # The shard is taken before measured points and the budget change the groups, so that a
        # resumed shard has the same groups.
        plan = replace(plan, groups=plan.groups[part - 1 :: parts])
    return axes, plan.without(done).within(options.budget_s)


def whole_plan(options: SweepOptions, spec: DeviceSpec) -> tuple[tuple[Axis, ...], Plan]:
    """Returns the axes with their edges added, and the plan of all points.

    A list of GEMMs has the axes m, n, k and batch. A list of transformer shapes or of workloads has
    one axis, `shape`, which numbers the list from 1.
    """
    held = with_defaults(options.held, spec, options.dims)
    providers = expand(options.providers)
    if options.shapes:
        columns = zip(GEMM_DIMS, zip(*options.shapes, strict=True), strict=True)
        axes = tuple(Axis(dim, tuple(sorted(set(sizes)))) for dim, sizes in columns)
        points = []
        for m, n, k, batch in options.shapes:
            gemm = Gemm(m, n, k, batch, held.dtype, held.layout)
            sizes = {"m": m, "n": n, "k": k, "batch": batch}
            points.append(GridPoint(sizes, (Op("gemm", "forward", gemm, 1),)))
        return axes, lay_out(points, providers, options.timing, spec)
    if options.models:
        axes = (Axis(SHAPE_DIM, tuple(range(1, len(options.models) + 1))),)
        points = []
        for number, named in enumerate(options.models, 1):
            ops = [op for op in named.shape.ops() if op.workload.kind != "cast"]
            points.append(GridPoint({SHAPE_DIM: number}, tuple(ops)))
        return axes, lay_out(points, providers, options.timing, spec)
    if options.works:
        axes = (Axis(SHAPE_DIM, tuple(range(1, len(options.works) + 1))),)
        points = []
        for number, work in enumerate(options.works, 1):
            op = Op(work.kind, "forward", work, 1)
            points.append(GridPoint({SHAPE_DIM: number}, (op,), rank=number))
        return axes, lay_out(points, providers, options.timing, spec)
    tiles = gemm_tiles(providers, options.tiles)
    axes = parse_grid(options.dims, held, spec, tiles=tiles)
    grouped = None if options.points else tiles
    plan = build_plan(axes, held, providers, options.timing, spec, grouped)
    return axes, plan
