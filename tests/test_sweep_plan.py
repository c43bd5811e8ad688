"""The plan: deduplicated, seeded, with a reference, within a budget."""

import itertools
from dataclasses import replace

import pytest

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.sweep.axes import parse_axis
from quantbench.sweep.plan import REFERENCE_EVERY, Plan, build_plan
from quantbench.sweep.shapes import Held, with_defaults
from quantbench.timing.options import TimingOptions

A100 = DeviceSpec("a100-test", "cuda", 108, 1410, 40 * 2**20, 164 * 2**10, 80 * 2**30, 2039, {"bf16": 312}, (8, 0))
HELD = with_defaults(Held(), "cuda", "bf16")


def plan(*dims: str, held: Held = HELD, timing: TimingOptions | None = None, **options: object) -> Plan:
    axes = tuple(parse_axis(d) for d in dims)
    return build_plan(axes, held, ("torch.mm",), timing or TimingOptions(), A100, **options)  # type: ignore[arg-type]


def test_the_same_options_give_the_same_plan() -> None:
    assert plan("hidden=1024:4096:256") == plan("hidden=1024:4096:256")


def test_another_seed_gives_another_order_of_the_same_work() -> None:
    one, two = plan("hidden=1024:4096:256"), plan("hidden=1024:4096:256", timing=TimingOptions(seed=1))
    work = [[(str(p.workload), p.provider) for p in each.points] for each in (one, two)]
    assert work[0] != work[1]
    assert sorted(work[0]) == sorted(work[1])


def test_the_order_is_not_that_of_the_axis() -> None:
    sizes = [p.places[0].axes["hidden"] for p in plan("hidden=1024:8192:64").points]
    assert sizes != sorted(sizes)


def test_one_workload_at_two_places_is_measured_once() -> None:
    # ffn = hidden: up and down are the same product.
    held = replace(HELD, ffn=1024, ops=("mlp_up", "mlp_down"))
    (point,) = plan("hidden=1024", held=held).points
    assert [place.op for place in point.places] == ["mlp_up", "mlp_down"]


def test_several_dims_make_a_grid() -> None:
    held = replace(HELD, ops=("proj",))
    places = {tuple(p.places[0].axes.values()) for p in plan("hidden=1024,2048", "mbs=1,2,4", held=held).points}
    assert places == {(h, b) for h in (1024, 2048) for b in (1, 2, 4)}


def test_the_reference_is_a_product_of_the_plan_and_counts_into_its_time() -> None:
    made = plan("hidden=1024:4096:128")
    assert made.reference in made.points
    alone = sum(p.estimate_s for p in made.points)
    repeats = 1 + len(made.points) // REFERENCE_EVERY
    assert made.reference is not None
    assert made.estimate_s == pytest.approx(alone + repeats * made.reference.estimate_s)


def test_a_budget_keeps_the_most_informative_points() -> None:
    whole = plan("n=1024:5120:128")
    part = plan("n=1024:5120:128", budget_s=whole.estimate_s / 3)
    sizes = sorted(p.places[0].axes["n"] for p in part.points)
    assert part.dropped == len(whole.points) - len(part.points) > 0
    assert part.estimate_s <= whole.estimate_s / 3 + part.points[0].estimate_s
    assert sizes[0] == 1024
    assert sizes[-1] == 5120
    gaps = [b - a for a, b in itertools.pairwise(sizes)]
    assert max(gaps) <= 2 * min(gaps)  # spread over the whole range, not its beginning


def test_a_tiny_budget_still_measures_something() -> None:
    assert len(plan("n=1024:5120:128", budget_s=1e-6).points) == 1


def test_impossible_sizes_are_refused_unless_told_otherwise() -> None:
    held = replace(HELD, heads=16)
    with pytest.raises(InputError, match="hidden = 1032 with heads = 16"):
        plan("hidden=1024,1032", held=held)
    made = plan("hidden=1024,1032", held=held, skip_impossible=True)
    assert made.impossible == ("TransformerShape: hidden = 1032 with heads = 16; expected hidden divisible by heads",)


def test_nothing_in_common_is_said() -> None:
    with pytest.raises(InputError, match="no point is left to measure"):
        plan("hidden=1024", held=replace(HELD, ops=("attention",)))
