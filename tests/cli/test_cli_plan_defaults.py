"""Every default of `plan` that moves a layout's time by more than 5 % is on the screen."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from quantbench.cli.plan_options import PlanOptions
from quantbench.cli.plan_run import header_lines
from quantbench.cli.plan_setup import Setup
from quantbench.errors import QuantbenchError
from quantbench.planner.predict import Planner

#: option → other values than the default, and what the screen must say of the default
DEFAULTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "kv_heads": ((4,), r"\d+ of keys and values"),
    "gated": ((True,), r"MLP of|experts of"),
    "dtype": (("fp16",), r"dtype = bf16"),
    "attention": (("flash", "unfused"), r"(flash|unfused) attention"),
    "dropout": ((True, False), r"dropout"),
    "ffn": ((11008,), r"MLP of \d+"),
    "seq": ((1024, 4096), r"seq \d+"),
    "fp8_recipe": (("tensorwise",), r"bf16"),
    "untied": ((True,), r"vocab \d+ with (one matrix|two matrices)"),
    "head_dim": ((64,), r"heads of \d+"),
    "optimizer": (("adam", "adam_8bit"), r"fused Adam"),
    "library": (("torch",), r"library = \w+"),
    "stack": (("nemo", "torchtitan", "eager"), r"--stack \w|software of"),
    "cluster": (("generic",), r"as its system|jean-zay"),
    "gpus_per_node": ((4,), r"\d+ per node"),
    "node_gbit_per_s": ((200,), r"GB/s between nodes"),
    "link_gb_per_s": ((20,), r"GB/s inside a node"),
    "dp_overlap": ((0.0, 1.0), r"data-parallel traffic (not )?overlapping"),
    "allow_uneven": ((True,), r"stages of (equal|any) length"),
    "mbs": (("2",), r"mbs = 1"),
    "cp": (("2",), r"no context parallelism"),
    "zero": (("0", "3"), r"ZeRO-1"),
    "recompute": (("none", "selective"), r"full recomputation"),
    "interleave": (("2", "4"), r"no interleaving"),
    "sequence_parallel": ((True,), r"no sequence parallelism"),
    "ep": (("4",), r"all experts on each GPU|MLP of"),
}
#: what the user types: the model, the machines and files of his own; and the sizes of other modes
TYPED = {
    "model",
    "config",
    "hidden",
    "heads",
    "layers",
    "vocab",
    "gpus",
    "gpu",
    "gbs",
    "dp",
    "tp",
    "pp",
}
FILES = {"profile", "site"}
MODELS: dict[str, dict[str, Any]] = {
    "preset": {"model": "llama-3-8b", "gpu": "H100", "gpus": 16, "gbs": 64, "tp": "2", "pp": "2"},
    "sizes": {"hidden": 4096, "heads": 32, "layers": 32, "vocab": 51200, "gpu": "A100", "gpus": 64, "gbs": 256,
              "tp": "2", "pp": "2"},
    "experts": {"model": "qwen3-30b-a3b", "gpu": "H100", "gpus": 16, "gbs": 64, "tp": "2", "pp": "2"},
    "2022": {"model": "bloom-176b", "cluster": "jean-zay-a100", "gpus": 384, "gbs": 2048, "tp": "4", "pp": "12"},
}  # fmt: skip


def test_every_option_is_walked_over() -> None:
    named = [*DEFAULTS, *TYPED, *FILES]
    assert sorted(named) == sorted(field.name for field in fields(PlanOptions))


def checked_s(setup: Setup) -> float:
    job = setup.job()
    planner = Planner(job, setup.times_of(job.cluster.device), setup.calibration(job))
    return planner.predict(setup.layout()).sec_per_it


@pytest.mark.parametrize("name", MODELS)
def test_defaults_that_move_the_time_are_on_the_screen(name: str) -> None:
    base = MODELS[name]
    plain = Setup(PlanOptions(**base))
    before = checked_s(plain)
    said = "\n".join(map(str, header_lines(plain.job(), plain.assumed(one_layout=True))))
    compared, unnamed = 0, []
    for option, (values, text) in DEFAULTS.items():
        for value in values:
            if base.get(option):
                continue
            try:
                change = checked_s(Setup(PlanOptions(**{**base, option: value}))) / before - 1
            except QuantbenchError:  # not with this model, GPU or layout
                continue
            compared += 1
            if abs(change) > 0.05 and not re.search(text, said):
                unnamed.append(f"{option} = {value}: {change:+.0%}")
    assert compared > 15
    assert unnamed == []
