"""Detects other traffic on the network, from idle traffic and run-to-run spread."""

import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path

from quantbench.stats import median, spread
from quantbench.units import percent

# An idle interface of a cluster carries heartbeats and logins: kilobytes per second.
_TRAFFIC_MB_PER_S = 1.0
_SPREAD = 0.10
_DRIFT = 0.05
_QUIET_S = 0.5
# port_rcv_data and port_xmit_data count words of four bytes (InfiniBand spec, PMA).
_INFINIBAND_WORD_BYTES = 4


def traffic_counters(root: Path = Path("/sys/class")) -> dict[str, int]:
    """Reads the bytes so far per interface: network devices except loopback, and InfiniBand or
    Omni-Path ports.
    """
    counters = {}
    for device in sorted((root / "net").glob("*/statistics")):
        name = device.parent.name
        if name != "lo":
            counters[name] = _read(device / "rx_bytes") + _read(device / "tx_bytes")
    for port in sorted((root / "infiniband").glob("*/ports/*/counters")):
        name = f"{port.parts[-4]}:{port.parts[-2]}"
        words = _read(port / "port_rcv_data") + _read(port / "port_xmit_data")
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
    before = counters()
    start_s = now()
    sleep(_QUIET_S)
    after = counters()
    elapsed_s = max(now() - start_s, 1e-9)
    found = {}
    for name in filter(after.__contains__, before):
        found[name] = max(0, after[name] - before[name]) / elapsed_s / 1e6
    return found


def traffic_warnings(idle: Sequence[dict[str, float]]) -> list[str]:
    """Formats a message per interface with over 1 MB/s. idle: MB/s by interface, one dictionary per
    node.
    """
    found = []
    for node, interfaces in enumerate(idle):
        for name, mb_per_s in interfaces.items():
            if mb_per_s > _TRAFFIC_MB_PER_S:
                found.append(
                    f"{mb_per_s:.0f} MB/s go over {name} of node {node} while this job sends "
                    "nothing: somebody else uses the network, and figures will differ from run to "
                    "run. Tune on a network of your own."
                )
    return found


def repeat_line(name: str, medians_us: Sequence[float]) -> str:
    """Formats how much the repetitions of the reference differ. medians_us: median of each
    repetition.
    """
    if len(medians_us) < 2:
        return f"{name}: measured once, nothing to compare"
    apart = percent(max(medians_us) / min(medians_us) - 1)
    times = f"{name}, {len(medians_us)} times: {median(medians_us):.1f} µs"
    return f"{times}, {apart} between slowest and fastest"


def spread_warnings(
    points: Sequence[tuple[str, Sequence[float]]], medians_us: Sequence[float]
) -> list[str]:
    """Formats messages if samples of a point scatter by over 10 %, or repetitions of the reference
    differ by over 5 %.

    points: (name, samples) pairs; any unit of time.
    medians_us: median of each repetition of the reference, µs.
    """
    spreads = [(spread(samples), name) for name, samples in points if len(samples) > 5]
    wide = [(width, name) for width, name in spreads if width > _SPREAD]
    found = []
    if wide:
        worst, name = max(wide, key=itemgetter(0))
        found.append(
            f"{len(wide)} of {len(points)} points scatter by more than {percent(_SPREAD)}, the "
            f"worst by {percent(worst)} ({name}): the network or the hosts are shared."
        )
    apart = max(medians_us, default=1.0) / min(medians_us, default=1.0) - 1
    if apart > _DRIFT:
        found.append(
            f"The repeated point took {percent(apart)} longer at one time than at another: "
            "differences below that between two settings mean nothing here."
        )
    return found
