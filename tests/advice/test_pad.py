"""Padding: what is tried, what copies and memory cost, when it is advised, and the command `pad` as
it is typed.
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import refused, run, run_json

from quantbench.advice.pad import NOISE, padding_verdict
from quantbench.alignment_rules import RULES
from quantbench.device import lookup
from quantbench.latency.estimate import Estimate
from quantbench.latency.op_times import copy_us
from quantbench.workload import Gemm
from quantbench.workload.kinds import Compute

A100, H100 = lookup("a100-sxm4-80gb"), lookup("h100-sxm5-80gb")
PAGE = Path(__file__).parents[2] / "docs" / "padding.md"
COMMANDS = re.findall(r"^quantbench pad (.*)$", PAGE.read_text(encoding="utf-8"), re.M)


class Times:
    """Times by a rule: 100 µs, `slow` times that where m, n or k is no multiple of 64. error:
    relative half-width.
    """

    note, common_error, device = "made up", 0.0, A100

    def __init__(self, slow: float, error: float = 0.02) -> None:
        self._slow, self._error = slow, error

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        return [self._one(work) for work in workloads]

    def _one(self, work: Compute) -> Estimate:
        rough = isinstance(work, Gemm) and any(size % 64 for size in (work.m, work.n, work.k))
        us = 100.0 * (self._slow if rough else 1.0)
        return Estimate(us, us / (1 + self._error), us * (1 + self._error))


def test_the_weights_are_padded_once_and_tokens_are_copied_in_every_call() -> None:
    gemm = Gemm(1000, 4096, 4096, layout="nt")
    best = padding_verdict(gemm, A100, times=Times(2.0)).best
    assert best.words == "m 1000 → 1024"
    assert best.sure
    moved = (1000 + 1024) * 4096 * 2
    assert best.copy_bytes == moved
    assert best.copy_us == copy_us(moved, A100)
    assert best.saving == pytest.approx(1 - (100 + best.copy_us) / 200)
    assert best.more_bytes == 24 * (4096 + 4096) * 2
    once = padding_verdict(Gemm(1024, 4000, 4096, layout="nt"), A100, times=Times(2.0)).best
    assert once.copy_bytes == 0
    assert once.words == "n 4000 → 4096"


def test_a_saving_within_the_noise_or_less_than_the_copy_is_not_advised() -> None:
    gemm = Gemm(1024, 4000, 4096, layout="nt")
    assert padding_verdict(gemm, A100, times=Times(1 + 0.9 * NOISE)).best is None
    rows = Gemm(1000, 4096, 4096, layout="nt")
    assert padding_verdict(rows, A100, times=Times(1.02)).best is None  # the copy takes longer
    unsure = padding_verdict(gemm, A100, times=Times(1.05, error=0.2)).best
    assert not unsure.sure
    assert unsure.low < 0 < unsure.saving < unsure.high


def test_what_crashes_is_padded_even_at_a_loss() -> None:
    gemm = Gemm(1024, 4090, 4096, dtype="fp8", layout="nt")
    best = padding_verdict(gemm, H100, library="torch", times=Times(1.0)).best
    assert best.repairs
    assert not best.crashes
    assert padding_verdict(gemm, H100, library="vllm", times=Times(1.0)).best is None


def test_the_page_has_all_rules_and_its_examples_are_right() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(source in page for rule in RULES for source in rule.sources)
    assert doctest.testfile(str(PAGE), module_relative=False).failed == 0


@pytest.mark.parametrize("words", COMMANDS)
def test_each_command_of_the_page_answers(words: str) -> None:
    assert "saving" in run(f"pad {words}")


def test_the_command_says_what_the_function_says() -> None:
    data = run_json("pad -m 4096 -n 50257 -k 1600 --gpu a100")
    verdict = padding_verdict(Gemm(4096, 50257, 1600, layout="nt"), A100)
    assert data["advised"][0] == verdict.best.words == "n 50257 → 50304"
    assert data["options"][0]["saving"] == verdict.options[0].saving


@pytest.mark.parametrize(
    ("words", "sides"),
    [
        ("-m 4096 -n 4096 -k 4096", "m, n and k are multiples of 256"),
        (
            "-m 2097151 -n 256 -k 256",
            "m, n and k are multiples of 256 or have no larger one up to 2097151, the largest size",
        ),
    ],
)
def test_nothing_to_pad_is_said_once_and_of_the_sides_that_are_tried(
    words: str, sides: str
) -> None:
    said = run(f"pad {words} --gpu {A100.name}")
    assert f"{sides}: nothing to pad" in " ".join(said.split())
    assert "keep" not in said
    assert "m=4096,4096" not in said


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--dtype fp8", "--dtype fp8 on a100-sxm4-80gb"),
        ("--library cublas", "--library = 'cublas'"),
        ("--layout tt", "layout = 'tt'"),
    ],
)
def test_wrong_use_is_refused(words: str, value: str) -> None:
    assert refused(f"pad -m 1 -n 2 -k 3 --gpu a100 {words}").value == value
