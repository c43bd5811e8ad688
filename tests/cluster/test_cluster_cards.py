"""Slow cards are named from the references that every device measured: literals, and cards of known
slowness.
"""

from dataclasses import replace

import numpy as np
import pytest
from made_runs import STATE, measurement, record
from sweep_doubles import plan_of

from quantbench.cluster.cards import card_lines, compare_devices, reference_set
from quantbench.measurement import Grade
from quantbench.store.record import Measured, Record
from quantbench.workload import Gemm

GEMMS = (Gemm(4096, 4096, 4096), Gemm(8192, 8192, 8192), Gemm(64, 4096, 4096))


def references(
    label: str, us: float, *, clock_mhz: float = 1755.0, noise: float = 0.002, repeats: int = 6, seed: int = 0,
    reasons: tuple[str, ...] = (), works: tuple[Gemm, ...] = GEMMS,
) -> list[Record]:  # fmt: skip
    chance = np.random.default_rng(seed)
    made = []
    for number, work in enumerate(works, start=1):
        for _ in range(repeats):
            state = type(STATE)(sm_clock_mhz=clock_mhz, throttle_reasons=reasons)
            timed = measurement(
                [us * number * (1 + chance.normal(0, noise))] * 10,
                clocks_mhz=(clock_mhz,) * 10,
                state_after=state,
            )
            outcome = Measured(timed, Grade("A"))
            made.append(record(work, outcome, {}, role="reference", places=(), source=label))
    return made


def node(slow: dict[int, float], seed: int = 0, **changes: object) -> list[Record]:
    """Eight cards, some of them slower by the given shares."""
    found = []
    for number in range(8):
        us = 100 * (1 + slow.get(number, 0.0))
        found += references(f"GPU {number} on node3", us, seed=seed + number, **changes)  # type: ignore[arg-type]
    return found


def test_a_throttled_card_is_named_with_its_clock() -> None:
    records = [r for r in node({}) if r.source != "GPU 5 on node3"]
    records += references(
        "GPU 5 on node3", 107.0, clock_mhz=1410.0, reasons=("sw_thermal_slowdown",)
    )
    assert card_lines(compare_devices(records)) == (
        "GPU 5 on node3 is 7 % slower, clock 1410 of 1755 MHz (sw_thermal_slowdown)",
    )


def test_a_card_slow_at_full_clock_is_named_too() -> None:
    assert card_lines(compare_devices(node({2: 0.12, 6: 0.04}))) == (
        "GPU 2 on node3 is 12 % slower, clock 1755 of 1755 MHz",
        "GPU 6 on node3 is 4 % slower, clock 1755 of 1755 MHz",
    )


def test_cards_as_alike_as_cards_are_give_one_line() -> None:
    lines = card_lines(compare_devices(node({2: 0.015})))
    assert lines == ("8 devices agree: the slowest is 1.5 % behind the usual one",)


@pytest.mark.parametrize("seed", range(20))
def test_noise_names_nobody(seed: int) -> None:
    records = node({}, 100 * seed, noise=0.05, repeats=2)
    assert not any(card.slow for card in compare_devices(records) if card.slowdown < 0.06)


def test_without_clocks_the_line_has_none() -> None:
    records = [*references("CPU 0 on a", 100.0), *references("CPU 0 on b", 110.0)]
    silent = []
    for one in records:
        quiet = replace(one.outcome.measurement, clocks_mhz=())
        silent.append(replace(one, outcome=Measured(quiet, Grade("A"))))
    assert card_lines(compare_devices(silent)) == ("CPU 0 on b is 10 % slower",)


def test_one_device_alone_is_not_compared() -> None:
    assert compare_devices(references("GPU 0 on a", 100.0)) == ()
    assert card_lines(()) == ()


def test_a_card_that_measured_one_reference_alone_is_held_against_that_one() -> None:
    records = [*node({}), *references("GPU 9 on node4", 120.0, works=GEMMS[:1])]
    assert compare_devices(records)[0].label == "GPU 9 on node4"
    assert compare_devices(records)[0].slowdown == pytest.approx(0.2, abs=0.01)


def test_the_reference_set_holds_the_largest_and_the_thinnest_product() -> None:
    plan = plan_of(20)
    found = reference_set(plan)
    works = [p.workload for p in plan.points if isinstance(p.workload, Gemm)]
    works.sort(key=lambda work: work.n)
    assert {p.workload for p in found} == {works[0], works[-1]}
    assert plan.reference not in found
