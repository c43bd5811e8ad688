"""Finds devices of a cluster that are slower than the others.

Every device of a run measures the same few reference workloads, and its times are compared with
those of the median device.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_high, median_low

from quantbench.stats import median, median_interval
from quantbench.store.record import Measured, Record
from quantbench.sweep.plan import Plan, PlanPoint
from quantbench.units import percent
from quantbench.workload import Gemm

# A device is called slow if it is slower than the median device by surely more than this fraction.
# The limit is above the usual difference: at the same power, the SM clocks of devices of one kind
# differ by 1 to 2 %.
_SLOW = 0.03


@dataclass(frozen=True)
class Card:
    """Comparison of one device with the median device of its run.

    label: name of the device and of its node.
    slowdown: relative excess of the device's times over those of the median device, as the median
        over its reference measurements (0.03 means 3 % slower).
    slow: whether the device is surely more than 3 % slower, because the lower end of the 95 %
        interval of the slowdown is above 3 %.
    clock_mhz: median SM clock of the device during its reference measurements; None if the clock is
        unknown.
    usual_clock_mhz: median of the known `clock_mhz` of all devices; None if none is known.
    throttled: reasons for a lowered SM clock that the device reported after these measurements.
    """

    label: str
    slowdown: float
    slow: bool
    clock_mhz: float | None
    usual_clock_mhz: float | None
    throttled: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.label} is {100 * self.slowdown:.0f} % slower"
        if self.clock_mhz is not None and self.usual_clock_mhz is not None:
            text += f", clock {self.clock_mhz:.0f} of {self.usual_clock_mhz:.0f} MHz"
        if self.throttled:
            text += f" ({', '.join(self.throttled)})"
        return text


def reference_set(plan: Plan) -> tuple[PlanPoint, ...]:
    """Selects the workloads that every device measures besides the plan's reference.

    These are the GEMM with the most operations, which shows limits of heat and power, and the GEMM
    with the fewest operations per byte, which shows slow memory. The result is empty if the plan
    has no GEMM or no reference.
    """
    products = [point for point in plan.points if isinstance(point.workload, Gemm)]
    if plan.reference is None or not products:
        return ()
    largest = max(products, key=lambda point: (point.workload.flops, point.key))
    thinnest = min(
        products, key=lambda point: (point.workload.flops / point.workload.min_bytes, point.key)
    )
    found = {point.key: point for point in (largest, thinnest) if point.key != plan.reference.key}
    return tuple(found.values())


def compare_cards(records: Iterable[Record]) -> tuple[Card, ...]:
    """Compares each device with the median device, and returns the slowest device first.

    The median device is chosen for each reference workload. Of an even number of devices, it is the
    faster of the two in the middle. The result is empty if the records come from fewer than two
    devices.
    """
    times_us: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    clocks: dict[str, list[float]] = defaultdict(list)
    reasons: dict[str, set[str]] = defaultdict(set)
    for record in records:
        is_reference = record.role == "reference" and record.origin != "imported"
        if is_reference and isinstance(record.outcome, Measured):
            measurement = record.outcome.measurement
            times_us[record.key][record.source].append(measurement.stated.latency_us)
            clocks[record.source].extend(measurement.clocks_mhz)
            reasons[record.source].update(measurement.state_after.throttle_reasons)
    if len(clocks) < 2:
        return ()
    ratios: dict[str, list[float]] = defaultdict(list)
    for by_card in times_us.values():
        usual_us = median_low(map(median, by_card.values()))
        for label, repeated in by_card.items():
            ratios[label] += [us / usual_us for us in repeated]
    own_mhz = {label: median(values) for label, values in clocks.items() if values}
    usual_mhz = median_high(own_mhz.values()) if own_mhz else None
    cards = []
    for label, of_card in ratios.items():
        cards.append(
            Card(
                label=label,
                slowdown=median(of_card) - 1,
                slow=median_interval(of_card).low > 1 + _SLOW,
                clock_mhz=own_mhz.get(label),
                usual_clock_mhz=usual_mhz,
                throttled=tuple(sorted(reasons[label])),
            )
        )
    return tuple(sorted(cards, key=lambda card: -card.slowdown))


def card_lines(cards: Sequence[Card]) -> tuple[str, ...]:
    """Formats one line per slow device, or one line that says that the devices agree.

    The result is empty if there are no cards.
    """
    if not cards:
        return ()
    slow = tuple(str(card) for card in cards if card.slow)
    behind = percent(max(0.0, cards[0].slowdown))
    return slow or (f"{len(cards)} devices agree: the slowest is {behind} behind the usual one",)
