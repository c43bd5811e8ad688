"""The plan: deduplicated, seeded, with a reference, within a budget."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from made_devices import A100

from quantbench.errors import InputError
from quantbench.launch import Tile
from quantbench.sweep.axes import Held, ops_at, parse_axis, with_defaults
from quantbench.sweep.edges import neighbour_groups, parse_grid, predicted_edges, predicted_jump
from quantbench.sweep.options import SweepOptions, whole_plan
from quantbench.sweep.plan import Group, Plan, PlanPoint, build_plan, num_fitting
from quantbench.timing.options import TimingOptions

HELD = with_defaults(Held(), A100)


def plan(
    *dims: str, held: Held = HELD, timing: TimingOptions | None = None, **options: object
) -> Plan:
    axes = tuple(parse_axis(d) for d in dims)
    return build_plan(axes, held, ("torch.mm",), timing or TimingOptions(), A100, **options)  # type: ignore[arg-type]


def test_the_same_options_give_the_same_plan() -> None:
    assert plan("hidden=1024:4096:256") == plan("hidden=1024:4096:256")


def test_another_seed_gives_another_order_of_the_same_work() -> None:
    one, two = (
        plan("hidden=1024:4096:256"),
        plan("hidden=1024:4096:256", timing=TimingOptions(seed=1)),
    )
    work = [[(str(p.workload), p.provider) for p in each.points] for each in (one, two)]
    assert work[0] != work[1]
    assert sorted(work[0]) == sorted(work[1])


def test_the_reference_of_experts_is_of_a_provider_that_runs_anywhere() -> None:
    held, providers = (
        with_defaults(Held(), A100, ("experts",)),
        ("torch.grouped_loop", "torch.grouped_mm"),
    )
    made = build_plan((parse_axis("experts=8,16"),), held, providers, TimingOptions(), A100)
    assert made.reference.provider == "torch.grouped_loop"


def test_one_workload_at_two_places_is_measured_once() -> None:
    # ffn = hidden: up and down are the same product.
    held = replace(HELD, ffn=1024, ops=("mlp_up", "mlp_down"))
    (point,) = plan("hidden=1024", held=held).points
    assert [place.op for place in point.places] == ["mlp_up", "mlp_down"]


def test_several_dims_make_a_grid() -> None:
    held = replace(HELD, ops=("proj",))
    places = {
        tuple(p.places[0].axes.values())
        for p in plan("hidden=1024,2048", "mbs=1,2,4", held=held).points
    }
    assert places == {(h, b) for h in (1024, 2048) for b in (1, 2, 4)}


def test_the_reference_is_a_product_of_the_plan_and_counts_into_its_time() -> None:
    made = plan("hidden=1024:4096:128")
    assert made.reference in made.points
    alone = sum(p.estimate_s for p in made.points)
    repeats = 1 + len(made.points) // made.reference_every
    assert made.estimate_s == pytest.approx(alone + repeats * made.reference.estimate_s)


def sizes_of(groups: Iterable[Group], axis: str = "n") -> list[int]:
    return sorted(
        {place.axes[axis] for group in groups for point in group.points for place in point.places}
    )


EDGES = ("hidden=1024:16384:64@edges",)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.25, 0.5, 0.9])
def test_a_short_budget_splits_no_edge_and_leaves_backward_passes_out(share: float) -> None:
    held = replace(HELD, direction="both")
    grid = parse_grid(EDGES, held, A100)
    sizes = grid[0].values
    edges = set(predicted_edges(grid, 0, held, A100))
    edges = [a for a, b in pairwise(sizes) if a in edges and b == a + 64]
    whole = build_plan(grid, held, ("torch.mm",), TimingOptions(), A100)
    forward = sum(p.estimate_s for p in whole.points if "." not in p.places[0].op)
    part = whole.within(share * forward)
    kept = sizes_of(part.groups, "hidden")
    assert 0 < len(kept) < len(sizes)
    split = [edge for edge in edges if (edge in kept) != (edge + 64 in kept)]
    assert len(split) <= 1 < len(edges) / 50  # rows of more than four edges are split somewhere
    assert all("." not in place.op for point in part.points for place in point.places)
    wide = whole.within(2 * forward)
    assert sizes_of(wide.groups, "hidden") == list(
        sizes
    )  # forward over the whole range, then backward
    assert any("." in point.places[0].op for point in wide.points)


def test_a_run_that_is_cut_off_has_a_coarse_grid_of_neighbours() -> None:
    whole = plan("n=1024:16384:32")
    assert len(whole.points) == 481
    sizes = sizes_of(whole.groups[: len(whole.groups) // 8])
    assert (sizes[0], sizes[-1]) == (1024, 16384)
    gaps = [b - a for a, b in itertools.pairwise(sizes)]
    assert gaps.count(32) >= len(sizes) // 2 - 1  # nearly every size has a neighbour
    assert max(gaps) <= 8 * (16384 - 1024) / len(sizes)  # and they are spread over the whole axis


def test_groups_stand_across_the_predicted_edges() -> None:
    def jump(low: int, high: int) -> float:
        before, after = (ops_at((parse_axis("n=1"),), {"n": size}, HELD)[0] for size in (low, high))
        return predicted_jump(before, after, A100)

    whole = plan("n=1024:8192:32")
    first = [sizes_of([group]) for group in whole.groups[: len(whole.groups) // 4]]
    edges = [pair for pair in itertools.pairwise(sizes_of(whole.groups)) if jump(*pair) > 0.02]
    assert 0 < len(edges) < 0.1 * len(whole.points)
    assert sum(any(set(pair) <= set(sizes) for sizes in first) for pair in edges) >= 0.8 * len(
        edges
    )


def test_edges_are_those_of_the_tiles_that_the_providers_name() -> None:
    def edges(*providers: str, tiles: dict[str, Tile] | None = None) -> set[int]:
        options = SweepOptions(
            dims=("n=1024:4096:1024@edges",),
            held=Held(m=1000),
            providers=providers,
            tiles=tiles or {},
        )
        (axis,), _ = whole_plan(options, A100)
        return {n for n in axis.values if n % 1024}

    waves = {n: -(-(1000 // 64 + 1) * n // 64 // A100.sm_count) for n in range(1024, 4097, 64)}
    rises = [n for n in range(1024, 4096, 64) if waves[n + 64] > waves[n]]
    small = {side for n in rises for side in (n, n + 64) if side % 1024}
    assert edges("triton.persistent@64x64") == small
    assert edges("torch") == edges("triton.persistent") != small
    assert edges("torch", "triton.persistent@64x64") == edges("torch") | small
    assert edges("torch", "triton.flash@64x64") == edges("torch")
    # A user's class declares its tile.
    assert edges("mine:Gemm") == edges("torch")
    assert edges("mine:Gemm", tiles={"mine:Gemm": Tile(64, 64)}) == small


def test_both_sides_of_an_edge_that_was_asked_for_stay_together() -> None:
    (edged,) = parse_grid(("n=1024:8192:1024@edges",), HELD, A100)
    whole = build_plan((edged,), HELD, ("torch.mm",), TimingOptions(), A100)
    of_size = {size: i for i, group in enumerate(whole.groups) for size in sizes_of([group])}
    edges = [size for size in edged.values if size + 64 in edged.values]
    assert len(edges) >= 5
    assert all(of_size[edge] == of_size[edge + 64] for edge in edges)


def rows(point: PlanPoint) -> list[tuple[int, ...]]:
    return [tuple(place.axes.values()) for place in point.places]


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dims", [("hidden=1024:4096:64",), ("mbs=1:8:1", "seq=512:4096:512")])
def test_a_budget_keeps_whole_rows_of_the_same_sizes_for_every_provider(
    dims: tuple[str, ...], share: float
) -> None:
    axes = tuple(parse_axis(dim) for dim in dims)
    providers = ("torch.mm", "triton.data_parallel", "triton.stream_k")
    whole = build_plan(
        axes, replace(HELD, ops=("qkv", "proj", "mlp_up")), providers, TimingOptions(), A100
    )
    part = whole.within(whole.estimate_s * share)
    keys = {point.key for point in part.points}
    asked = {rows(point)[0] for point in part.points}
    assert 0 < len(asked) < len(set().union(*map(rows, whole.points)))
    for point in whole.points:
        assert point.key in keys or asked.isdisjoint(rows(point)), point


def test_what_groups_share_counts_once() -> None:
    # mbs × seq is all that linear layers see: (1, 1024) and (2, 512) are the same products.
    axes = (parse_axis("mbs=1,2"), parse_axis("seq=512,1024"))
    whole = build_plan(
        axes,
        replace(HELD, ops=("qkv", "attention")),
        ("torch.mm", "torch.flash"),
        TimingOptions(),
        A100,
    )
    cost = len({p.key for g in whole.groups for p in g.points})
    assert sum(len(g.points) for g in whole.groups) > cost
    assert num_fitting(whole.groups, cost, lambda point: 1) == len(whole.groups)


def test_groups_run_one_after_another() -> None:
    made = plan("hidden=1024:4096:256")
    hidden = [p.places[0].axes["hidden"] for p in made.points]
    assert (
        len([a for a, b in itertools.pairwise(hidden) if a != b]) == len(set(hidden)) - 1
    )  # each row in one go


def test_without_a_budget_everything_runs() -> None:
    whole = plan("n=1024:5120:128")
    assert whole.within(1.0).within(None).total == whole.total == len(whole.points) == 33
    assert sorted(p.key for p in whole.within(1.0).within(None).points) == sorted(
        p.key for p in whole.points
    )


def test_a_tiny_budget_still_measures_something() -> None:
    assert len(plan("n=1024:5120:128").within(1e-6).points) == 1


def test_what_is_measured_already_takes_nothing_of_the_budget() -> None:
    whole = plan("n=1024:5120:128")
    done = {point.key for point in whole.points[:20]}
    rest = whole.without(done)
    assert [p.key for p in rest.points] == [p.key for p in whole.points if p.key not in done]
    assert rest.within(rest.estimate_s).left_out == ()


@pytest.mark.parametrize(
    ("jumps", "expected"),
    [
        ([], [[0]]),
        ([0.0, 0.0, 0.0], [[0], [1, 2], [3]]),
        ([0.0, 0.0, 0.5, 0.0], [[0], [1], [2, 3], [4]]),
        ([0.5, 0.4, 0.0, 0.0], [[0, 1, 2], [3], [4]]),
        ([0.5, 0.4, 0.3, 0.2, 0.1], [[0, 1, 2, 3], [4, 5]]),
    ],
)
def test_few_values_make_few_groups(jumps: list[float], expected: list[list[int]]) -> None:
    assert [list(indices) for indices, _ in neighbour_groups(jumps)] == expected


@pytest.mark.parametrize("count", [2, 3, 7, 50, 433])
def test_every_value_is_in_one_group(count: int) -> None:
    chance = random.Random(count)
    groups = neighbour_groups([chance.random() for _ in range(count - 1)])
    assert [i for indices, _ in groups for i in indices] == list(range(count))


def test_impossible_sizes_are_left_out_unless_there_is_no_other() -> None:
    held = replace(HELD, heads=16)
    with pytest.raises(InputError, match="hidden = 1032 with heads = 16"):
        plan("hidden=1032", held=held)
    made = plan("hidden=1024,1032", held=held)
    assert made.impossible == (
        "sweep: hidden = 1032 with heads = 16; expected hidden divisible by heads, best into "
        "multiples of 8: 1024 or 1152",
    )


def test_nothing_in_common_is_said() -> None:
    with pytest.raises(InputError, match="no point is left to measure"):
        plan("hidden=1024", held=replace(HELD, ops=("attention",)))
