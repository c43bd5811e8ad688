"""Finds slow devices in a cluster: `compare_devices` compares each device with the median device.

Every device of a run measures the same few reference workloads (`reference_set`), and the times of
these workloads are compared.
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

# A device is slow if its slowdown against the median device is surely above this fraction. The
# usual difference is smaller: at equal power, the SM clocks of devices of one model differ by 1 to
# 2 %.
_SLOW = 0.03


@dataclass(frozen=True)
class DeviceComparison:
    """Comparison of one device with the median device of its run.

    label: name of the device and its node.
    slowdown: relative time above the median device's time (0.03 means 3 % slower), as the median
        over the reference measurements.
    slow: whether the device is surely more than 3 % slower. The lower bound of the slowdown's 95 %
        interval is then above 3 %.
    clock_mhz: the device's median SM clock during the reference measurements; None if it is
        unknown.
    usual_clock_mhz: median of the known `clock_mhz` of all devices; None if all are unknown.
    throttled: reasons for a lowered SM clock that the device reported after the reference
        measurements.
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
    """Selects the workloads that every device measures in addition to the plan's reference.

    The GEMM with the most operations shows limits of heat and power. The GEMM with the fewest
    operations per byte shows slow memory. The result is empty if the plan has no GEMM or no
    reference.
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


def compare_devices(records: Iterable[Record]) -> tuple[DeviceComparison, ...]:
    """Compares each device with the median device, and returns the slowest device first.

    The median device is determined separately for each reference workload. With an even number of
    devices, it is the faster of the two middle devices. The result is empty if the records come
    from fewer than two devices.
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
            DeviceComparison(
                label=label,
                slowdown=median(of_card) - 1,
                slow=median_interval(of_card).low > 1 + _SLOW,
                clock_mhz=own_mhz.get(label),
                usual_clock_mhz=usual_mhz,
                throttled=tuple(sorted(reasons[label])),
            )
        )
    return tuple(sorted(cards, key=lambda card: -card.slowdown))


def card_lines(cards: Sequence[DeviceComparison]) -> tuple[str, ...]:
    """Formats one line per slow device, or a single line if no device is slow.

    The result is empty if there are no cards.
    """
    if not cards:
        return ()
    slow = tuple(str(card) for card in cards if card.slow)
    behind = percent(max(0.0, cards[0].slowdown))
    return slow or (f"{len(cards)} devices agree: the slowest is {behind} behind the usual one",)
