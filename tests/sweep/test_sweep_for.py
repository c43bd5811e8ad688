"""What `sweep --for` measures for a planner, and in which order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from made_devices import CPU

from quantbench.cli.sweep_for import planner_groups
from quantbench.cli.sweep_options import SweepArguments, assumed_of, options_on
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.sweep.options import options_from_json, options_to_json, plan_sweep
from quantbench.workload.serving import served

H100, V100 = lookup("h100-sxm5-80gb"), lookup("v100-sxm2-16gb")
ASKED = SweepArguments(for_="aiconfigurator", model="llama-3-8b", budget="10m")


def test_eight_rounds_spread_eight_points_over_each_product_and_all_heads() -> None:
    options = options_on(ASKED, H100)
    groups = planner_groups(served("sweep", "llama-3-8b", (), ()), ("bf16", "fp8"))
    first = set(options.works[: 8 * len(groups)])
    for group in groups:
        kept = [i for i, work in enumerate(group) if work in first]
        assert len(kept) == 8
        assert max(b - a for a, b in pairwise([0, *kept, len(group)])) < len(group) / 3
    _, plan = plan_sweep(options, H100)
    works = tuple(dict.fromkeys(point.workload for point in plan.points))
    assert works == options.works[: len(works)]
    assert options_from_json(options_to_json(options)) == options


def test_formats_providers_and_export_are_those_of_the_device() -> None:
    export = options_on(replace(ASKED, tp="1,2"), H100).export
    assert export == "--format aiconfigurator --model llama-3-8b --tp 1,2"
    assert options_on(ASKED, H100).providers == ("torch.mm", "torch.cudnn", "torch.flash")
    old = options_on(ASKED, V100)
    assert old.providers == ("torch.mm", "torch.efficient")
    assert old.export.endswith(" --dtype fp16")
    short = options_on(replace(ASKED, budget="20s"), CPU)
    _, plan = plan_sweep(short, CPU)
    assert max(point.estimate_s for point in plan.points) <= 1.0
    assert short.export == "--format csv"
    assert "planners know GPUs only" in str(assumed_of(ASKED, short, plan, CPU))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"for_": "vidur"}, r"--for = 'vidur'; expected one of aiconfigurator"),
        ({"model": ""}, "--for aiconfigurator without a model; expected --model or --config"),
        ({"dtype": "fp32"}, "--dtype = 'fp32'; expected one of bf16, fp8, fp16"),
        ({"dim": ["n=64"]}, "--for aiconfigurator with --dim n=64"),
        ({"budget": "1ms"}, "no point of --for aiconfigurator fits into 0.001 s"),
    ],
)
def test_contradictions_are_one_clear_line(changes: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        options_on(replace(ASKED, **changes), H100)
