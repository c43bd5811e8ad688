"""Our kernels beside the libraries' on the same workloads of the same runs, as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quantbench.analysis.summary import Point
from quantbench.units import latency
from quantbench.workload import Softmax, Workload

_OURS = "triton."


def kernel_section(points: Sequence[Point], copy_gb_per_s: float | None) -> list[str]:
    """For each kind and direction and each of our providers: its speed against each library provider's on the shapes
    that both ran, as the library's time over ours (above 1: ours is faster)."""
    by_work: dict[Workload, dict[str, float]] = {}
    for point in points:
        by_work.setdefault(point.workload, {})[point.provider] = point.latency_us
    ratios: dict[tuple[str, str, str], list[float]] = {}
    worst: dict[tuple[str, str, str], Workload] = {}
    for work, times_us in by_work.items():
        libraries = {name: us for name, us in times_us.items() if not name.startswith(_OURS)}
        if len(libraries) > 1:
            libraries["the fastest of them"] = min(libraries.values())
        for ours, our_us in times_us.items():
            if not ours.startswith(_OURS):
                continue
            for library, its_us in libraries.items():
                key = (_title(work), ours, library)
                ratio = its_us / our_us
                if key not in ratios or ratio < min(ratios[key]):
                    worst[key] = work
                ratios.setdefault(key, []).append(ratio)
    if not ratios:
        return ["No workload of these runs was measured with one of our kernels and with a library's."]
    lines = [
        "| work | ours | against | shapes | geometric mean | worst | where |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for key in sorted(ratios):
        title, ours, library = key
        values = np.array(ratios[key])
        mean = float(np.exp(np.log(values).mean()))
        where = f"{worst[key]} ({latency(by_work[worst[key]][ours])})"
        lines.append(f"| {title} | {ours} | {library} | {len(values)} | {mean:.2f} | {values.min():.2f} | {where} |")
    if copy_gb_per_s is not None:
        lines += ["", *_bandwidth_lines(points, copy_gb_per_s)]
    return lines


def _bandwidth_lines(points: Sequence[Point], copy_gb_per_s: float) -> list[str]:
    softmaxes = [point for point in points if isinstance(point.workload, Softmax)]
    lines = [f"A copy moves {copy_gb_per_s:.0f} GB/s on this device. Softmax, bytes that must be moved over that:", ""]
    for provider in sorted({point.provider for point in softmaxes}):
        shares = sorted(point.gb_per_s / copy_gb_per_s for point in softmaxes if point.provider == provider)
        lines.append(
            f"- {provider}: {shares[0]:.2f} to {shares[-1]:.2f}, median {float(np.median(shares)):.2f}"
            f" of {len(shares)} shapes"
        )
    return lines if softmaxes else lines[:1]


def _title(work: Workload) -> str:
    direction = getattr(work, "direction", "")
    return f"{work.kind} {direction}".strip()
