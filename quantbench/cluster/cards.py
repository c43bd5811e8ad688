"""Compares the devices of a run by the reference workloads that every device measures, and finds
slow ones.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from statistics import median_high, median_low

from quantbench.stats import median, noise
from quantbench.store.record import Measured, Record
from quantbench.sweep.plan import Plan, PlanPoint
from quantbench.units import percent
from quantbench.workload import Gemm

# Devices of one kind differ by 1 to 2 % in clock at the same power; one that differs by more is
# named.
_SLOW = 0.03
# Number of standard errors that the difference must exceed as well. A median's is √(π/2) times a
# mean's; √2 because the median device's time has an error too.
_SURE_ERRORS = 3.0
_ERROR_FACTOR = sqrt(pi / 2) * sqrt(2)


@dataclass(frozen=True)
class Card:
    """Comparison of one device with the median device of its run.

    slowdown: median over the references of time / median device's time, minus 1.
    error: standard error of the slowdown.
    clock_mhz, usual_clock_mhz: median clocks during the references, of this and the median device;
        None if unknown.
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
        """Whether the slowdown exceeds both 3 % and three standard errors."""
        return self.slowdown > max(_SLOW, _SURE_ERRORS * self.error)

    def __str__(self) -> str:
        text = f"{self.label} is {100 * self.slowdown:.0f} % slower"
        if self.clock_mhz is not None and self.usual_clock_mhz is not None:
            text += f", clock {self.clock_mhz:.0f} of {self.usual_clock_mhz:.0f} MHz"
        if self.throttled:
            text += f" ({', '.join(self.throttled)})"
        return text


def reference_set(plan: Plan) -> tuple[PlanPoint, ...]:
    """Selects the workloads that every device measures besides the plan's reference.

    These are the largest GEMM (heat, power limit) and the one with the fewest operations per byte
    (memory).
    """
    if plan.reference is None:
        return ()
    products = [point for point in plan.points if isinstance(point.workload, Gemm)]
    products = products or [plan.reference]
    largest = max(products, key=lambda point: (point.workload.flops, point.key))
    thinnest = min(
        products, key=lambda point: (point.workload.flops / point.workload.min_bytes, point.key)
    )
    found = {point.key: point for point in (largest, thinnest) if point.key != plan.reference.key}
    return tuple(found.values())


def compare_cards(records: Iterable[Record]) -> tuple[Card, ...]:
    """Compares each device with the median (of two, the faster), slowest first; empty for one
    device.
    """
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    clocks: dict[str, list[float]] = defaultdict(list)
    reasons: dict[str, set[str]] = defaultdict(set)
    for record in records:
        is_reference = record.role == "reference" and record.origin != "imported"
        if is_reference and isinstance(record.outcome, Measured):
            measurement = record.outcome.measurement
            times[record.source][record.key].append(measurement.stated.latency_us)
            clocks[record.source].extend(measurement.clocks_mhz)
            reasons[record.source].update(measurement.state_after.throttle_reasons)
    if len(times) < 2:
        return ()
    # The usual device is the median one; of two, the faster one. The noise is the relative standard
    # deviation of repeated references on one device, pooled over all; each group's median uses up
    # one degree of freedom.
    own_us: dict[str, list[float]] = defaultdict(list)
    groups = 0
    ratios: list[float] = []
    for of_card in times.values():
        for key, repeated in of_card.items():
            middle_us = median(repeated)
            own_us[key].append(middle_us)
            if len(repeated) > 1:
                groups += 1
                ratios += [us / middle_us for us in repeated]
    usual_us = {key: median_low(medians) for key, medians in own_us.items()}
    own_clock = {label: median(values) for label, values in clocks.items() if values}
    usual_clock = median_high(own_clock.values()) if own_clock else None
    scatter = 0.0
    if ratios:
        scatter = noise(ratios) * sqrt(len(ratios) / (len(ratios) - groups))
    cards = []
    for label, of_card in times.items():
        slower = [median(repeated) / usual_us[key] for key, repeated in of_card.items()]
        repeats = sum(map(len, of_card.values()))
        cards.append(
            Card(
                label,
                median(slower) - 1,
                _ERROR_FACTOR * scatter / sqrt(repeats),
                repeats,
                own_clock.get(label),
                usual_clock,
                tuple(sorted(reasons[label])),
            )
        )
    return tuple(sorted(cards, key=lambda card: -card.slowdown))


def card_lines(cards: Sequence[Card]) -> tuple[str, ...]:
    """Formats one line per slow device, or one line that the devices agree; empty without
    `cards`.
    """
    if not cards:
        return ()
    slow = tuple(str(card) for card in cards if card.slow)
    behind = percent(max(0.0, cards[0].slowdown))
    return slow or (f"{len(cards)} devices agree: the slowest is {behind} behind the usual one",)
