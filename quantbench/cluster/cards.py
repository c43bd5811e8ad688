"""Compares the devices of a run: each measures the same reference workloads, and the times show which are slow.

`reference_set` selects the references, `compare_cards` compares the devices and `card_lines` says the result. Works on
records alone, of which `source` names the device; called by `sweep --on ray` and `merge`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from statistics import median_high, median_low

from quantbench.stats import median, noise
from quantbench.store.record import Measured, Record
from quantbench.sweep.plan import Plan, PlanPoint
from quantbench.workload import Gemm

# Devices of one kind differ by 1 to 2 % in clock at the same power; one that differs by more is named.
_SLOW = 0.03
# Standard errors that the difference must exceed as well; that of a median is √(π/2) of a mean's, and the usual
# device's figure has one too.
_SURE = 3.0
_ERROR_FACTOR = sqrt(pi / 2) * sqrt(2)


@dataclass(frozen=True)
class Card:
    """One device of a run.

    slowdown: its time over the usual device's, minus 1, over the references that both measured.
    error: standard error of the slowdown.
    clock_mhz, usual_clock_mhz: medians at the references, its own and the usual device's; None where unknown.
    throttled: reasons that it reported.
    """

    label: str
    slowdown: float
    error: float
    repeats: int
    clock_mhz: float | None
    usual_clock_mhz: float | None
    throttled: tuple[str, ...] = ()

    @property
    def slow(self) -> bool:
        """Slower than devices of one kind usually are, and than its own scatter explains."""
        return self.slowdown > max(_SLOW, _SURE * self.error)

    def __str__(self) -> str:
        text = f"{self.label} is {self.slowdown:.0%} slower".replace("%", " %")
        if self.clock_mhz is not None and self.usual_clock_mhz is not None:
            text += f", clock {self.clock_mhz:.0f} of {self.usual_clock_mhz:.0f} MHz"
        return text + (f" ({', '.join(self.throttled)})" if self.throttled else "")


def reference_set(plan: Plan) -> tuple[PlanPoint, ...]:
    """What every device measures besides the plan's reference.

    These are the largest product (heat, power limit) and the one with the fewest operations per byte (memory).
    """
    if plan.reference is None:
        return ()
    products = [point for point in plan.points if isinstance(point.workload, Gemm)]
    largest = max(products, key=lambda p: (p.workload.flops, p.key), default=plan.reference)
    thinnest = min(products, key=lambda p: (p.workload.flops / p.workload.min_bytes, p.key), default=plan.reference)
    found = {point.key: point for point in (largest, thinnest) if point.key != plan.reference.key}
    return tuple(found.values())


def compare_cards(records: Iterable[Record]) -> tuple[Card, ...]:
    """Every device of a run against the usual one, slowest first; empty where only one device measured."""
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    clocks: dict[str, list[float]] = defaultdict(list)
    reasons: dict[str, set[str]] = defaultdict(set)
    for record in records:
        if record.role == "reference" and record.origin != "imported" and isinstance(record.outcome, Measured):
            measurement = record.outcome.measurement
            times[record.source][record.key].append(median(measurement.samples_us))
            clocks[record.source].extend(measurement.clocks_mhz)
            reasons[record.source].update(measurement.state_after.throttle_reasons)
    if len(times) < 2:
        return ()
    # The usual device is the middle one; of two, the faster one.
    keys = {key for of_card in times.values() for key in of_card}
    usual_us = {key: median_low([median(of[key]) for of in times.values() if key in of]) for key in keys}
    own_clock = {label: median(values) for label, values in clocks.items() if values}
    usual_clock = median_high(own_clock.values()) if own_clock else None
    scatter = _scatter(times)
    cards = []
    for label, of_card in times.items():
        slowdown = median([median(repeated) / usual_us[key] for key, repeated in of_card.items()]) - 1
        repeats = sum(map(len, of_card.values()))
        error = _ERROR_FACTOR * scatter / sqrt(repeats)
        throttled = tuple(sorted(reasons[label]))
        cards.append(Card(label, slowdown, error, repeats, own_clock.get(label), usual_clock, throttled))
    return tuple(sorted(cards, key=lambda card: -card.slowdown))


def _scatter(times: dict[str, dict[str, list[float]]]) -> float:
    """Relative standard deviation of one repetition against the others of its reference on its device, over all."""
    groups = [repeats for of_card in times.values() for repeats in of_card.values() if len(repeats) > 1]
    ratios = [us / median(repeats) for repeats in groups for us in repeats]
    # Each group's own median takes one of its repetitions.
    return noise(ratios) * sqrt(len(ratios) / (len(ratios) - len(groups))) if ratios else 0.0


def card_lines(cards: Sequence[Card]) -> tuple[str, ...]:
    """The slow devices by name, or one line that there are none."""
    if not cards:
        return ()
    slow = tuple(str(card) for card in cards if card.slow)
    alike = (f"{len(cards)} devices agree: the slowest is {max(0.0, cards[0].slowdown):.1%} behind the usual one",)
    return slow or alike
