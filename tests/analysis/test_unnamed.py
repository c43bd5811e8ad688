"""Points without a kernel's name are told, with the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quantbench.cli.sweep_run import unnamed_line
from quantbench.device import lookup
from quantbench.launch import Launch

GPU = lookup("h200-sxm-141gb")


def points(*named: bool) -> Any:
    return [SimpleNamespace(launch=Launch("nvjet") if each else None) for each in named]


def test_missing_names_are_counted_with_what_may_help() -> None:
    assert unnamed_line(points(True, False, False), GPU, {}) == (
        "2 of 3 points have no kernel name, so their causes cannot be determined; where one process alone "
        "may use the GPU, set QUANTBENCH_KERNEL_NAMES=here"
    )
    said = unnamed_line(points(False), GPU, {"QUANTBENCH_KERNEL_NAMES": "here"})
    assert said == "1 of 1 points have no kernel name, so their causes cannot be determined"


def test_nothing_is_said_where_names_are_there_or_unwanted() -> None:
    assert unnamed_line(points(True, True), GPU, {}) is None
    assert unnamed_line(points(False), GPU, {"QUANTBENCH_KERNEL_NAMES": "off"}) is None
    assert unnamed_line([], GPU, {}) is None
