"""Detects other traffic on the network, from idle traffic and run-to-run spread.

Entry points: `idle_traffic_mb_per_s` measures (`traffic_counters` reads its counters);
`traffic_warnings`, `repeat_line` and `spread_warnings` format messages. Used by the command `comm`.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from quantbench.stats import median, spread
from quantbench.units import percent

# An idle interface of a cluster carries heartbeats and logins: kilobytes per second.
_TRAFFIC_MB_PER_S = 1.0
_SPREAD = 0.10
_DRIFT = 0.05
_QUIET_S = 0.5
_INFINIBAND_WORD_BYTES = (
    4  # port_rcv_data and port_xmit_data count words of four bytes (InfiniBand spec, PMA)
)


def traffic_counters(root: Path = Path("/sys/class")) -> dict[str, int]:
    """Reads the bytes so far per interface: network devices except loopback, and InfiniBand or
    Omni-Path ports.
    """
    counters = {}
    for device in sorted((root / "net").glob("*/statistics")):
        name = device.parent.name
        if name != "lo":
            counters[name] = sum(_read(device / f"{way}_bytes") for way in ("rx", "tx"))
    for port in sorted((root / "infiniband").glob("*/ports/*/counters")):
        name = f"{port.parts[-4]}:{port.parts[-2]}"
        words = sum(_read(port / f"port_{way}_data") for way in ("rcv", "xmit"))
        counters[name] = words * _INFINIBAND_WORD_BYTES
    return counters


def _read(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def idle_traffic_mb_per_s(
    counters: Callable[[], dict[str, int]] = traffic_counters,
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, float]:
    """Measures the traffic over each interface for half a second while this job is idle, in 1e6
    bytes per second.
    """
    before, start_s = counters(), now()
    sleep(_QUIET_S)
    after, stop_s = counters(), now()
    elapsed_s = max(stop_s - start_s, 1e-9)
    return {
        name: max(0, after[name] - before[name]) / elapsed_s / 1e6
        for name in before
        if name in after
    }


def traffic_warnings(idle: Sequence[dict[str, float]]) -> list[str]:
    """Formats a message per interface with over 1 MB/s. idle: MB/s by interface, one dictionary per
    node.
    """
    return [
        f"{mb_per_s:.0f} MB/s go over {name} of node {node} while this job sends nothing: somebody else uses the "
        "network, and figures will differ from run to run. Tune on a network of your own."
        for node, interfaces in enumerate(idle)
        for name, mb_per_s in interfaces.items()
        if mb_per_s > _TRAFFIC_MB_PER_S
    ]


def repeat_line(name: str, medians_us: Sequence[float]) -> str:
    """Formats how much the repetitions of the reference differ. medians_us: median of each
    repetition.
    """
    if len(medians_us) < 2:
        return f"{name}: measured once, nothing to compare"
    apart = max(medians_us) / min(medians_us) - 1
    return f"{name}, {len(medians_us)} times: {median(medians_us):.1f} µs, {percent(apart)} between slowest and fastest"


def spread_warnings(
    points: Sequence[tuple[str, Sequence[float]]], medians_us: Sequence[float]
) -> list[str]:
    """Formats messages if samples of a point scatter by over 10 %, or repetitions of the reference
    differ by over 5 %.

    points: (name, samples) pairs; any unit of time.
    medians_us: median of each repetition of the reference, µs.
    """
    wide = [
        (name, spread(samples))
        for name, samples in points
        if len(samples) > 5 and spread(samples) > _SPREAD
    ]
    found = []
    if wide:
        name, worst = max(wide, key=lambda point: point[1])
        found.append(
            f"{len(wide)} of {len(points)} points scatter by more than {percent(_SPREAD)}, the worst by "
            f"{percent(worst)} ({name}): the network or the hosts are shared."
        )
    apart = max(medians_us, default=1.0) / min(medians_us, default=1.0) - 1
    if apart > _DRIFT:
        found.append(
            f"The repeated point took {percent(apart)} longer at one time than at another: differences below that "
            "between two settings mean nothing here."
        )
    return found
