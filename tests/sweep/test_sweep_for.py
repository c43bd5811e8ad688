"""What `sweep --for` measures for a planner, and in which order."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from made_devices import CPU

from quantbench.cli.sweep_options import SweepArguments, assumed_of, options_on
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.sweep.options import options_from_json, options_to_json, plan_sweep
from quantbench.workload import Gemm
from quantbench.workload.serving import served

H100, V100 = lookup("h100-sxm5-80gb"), lookup("v100-sxm2-16gb")
ASKED = SweepArguments(for_="aiconfigurator", model="llama-3-8b", budget="10m")


def test_eight_rounds_have_every_product_and_all_heads_eight_times_over_their_range() -> None:
    options = options_on(ASKED, H100)
    wanted = served("sweep", "llama-3-8b", (), ())
    groups = defaultdict(list)
    size = 2 * len(wanted.products) + 2 * len(wanted.heads)  # two formats; prompts and decoding
    for work in options.works[: 8 * size]:
        if isinstance(work, Gemm):
            groups[work.dtype, work.n, work.k].append(work.m.bit_length() // 6)
        else:
            groups[work.heads, work.kv_heads, work.head_dim, work.causal].append(0)
    assert len(groups) == size
    for group, sizes in groups.items():
        assert len(sizes) == 8
        assert {0, 1, 2} <= set(sizes) or len(group) == 4
    _, plan = plan_sweep(options, H100)
    assert [point.workload for point in plan.points] == list(options.works[: len(plan.points)])
    assert plan.left_out
    assert options_from_json(json.loads(json.dumps(options_to_json(options)))) == options


def test_formats_providers_and_export_are_those_of_the_device() -> None:
    options = options_on(replace(ASKED, tp="1,2"), H100)
    assert {work.dtype for work in options.works} == {"bf16", "fp8"}
    assert options.export == "--format aiconfigurator --model llama-3-8b --tp 1,2"
    old = options_on(ASKED, V100)
    assert old.providers == ("torch.mm", "torch.efficient")
    assert old.export.endswith(" --dtype fp16")
    short = options_on(replace(ASKED, budget="20s"), CPU)
    _, plan = plan_sweep(short, CPU)
    assert max(point.estimate_s for point in plan.points) <= 1.0
    assert short.export == "--format csv"
    assert any("planners know GPUs" in said for said in assumed_of(ASKED, short, plan, CPU))


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
def test_contradictions_are_one_clear_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        options_on(replace(ASKED, **changes), H100)
