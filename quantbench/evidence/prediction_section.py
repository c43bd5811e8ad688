"""The model on products measured here: fitted on some of them, tested on the rest, with kernel names and without."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.latency.gemm_model import GemmModel, shipped_model
from quantbench.latency.gemm_train import Effort
from quantbench.workload import Gemm

FITTED_ROWS = 200
SEEDS = (0, 1, 2)
# Fewer test rows than this say nothing about a 95th percentile.
_FEWEST_TESTED = 100

FloatArray = npt.NDArray[np.float64]


def prediction_section(
    points: Sequence[Point], device: DeviceSpec, seeds: Sequence[int] = SEEDS, effort: Effort | None = None
) -> list[str]:
    """Median and 95th percentile of |predicted / measured − 1| over the rows that were not fitted.

    effort: how much is spent on each fit; None for what a user gets.
    """
    rows = [point for point in points if isinstance(point.workload, Gemm) and point.workload.batch == 1]
    if len(rows) < FITTED_ROWS + _FEWEST_TESTED:
        return [
            f"{len(rows)} products were measured; fitting {FITTED_ROWS} and testing on at least {_FEWEST_TESTED}"
            " others needs more."
        ]
    work = [point.workload for point in rows]
    m, n, k = (np.array([getattr(gemm, name) for gemm in work], dtype=float) for name in "mnk")
    measured_us = np.array([point.latency_us for point in rows])
    launches = [point.launch for point in rows]
    dtype = work[0].dtype
    named = sum(launch is not None and bool(launch.kernel) for launch in launches)
    # title: names of the fitted rows are known, and those of the tested ones
    ways = {
        "without kernel names": (False, False),
        "kernel names of the fitted rows": (True, False),
        "kernel names of all rows": (True, True),
    }
    errors: dict[str, list[FloatArray]] = {title: [] for title in ways}
    for seed in seeds:
        order = np.random.default_rng(seed).permutation(len(rows))
        fitted, tested = order[:FITTED_ROWS], order[FITTED_ROWS:]
        for title, (then, now) in ways.items():
            known = [launches[i] for i in fitted] if then else None
            model = GemmModel.fit(
                device, m[fitted], n[fitted], k[fitted], measured_us[fitted], dtype=dtype, launches=known,
                prior="family-out", seed=seed, effort=effort,
            )  # fmt: skip
            later = [launches[i] for i in tested] if now else None
            predicted_us = model.predict(m[tested], n[tested], k[tested], launches=later).latency_us
            errors[title].append(np.abs(predicted_us / measured_us[tested] - 1))
    lines = ["| model | rows fitted | median | 95th percentile |", "|---|---:|---:|---:|"]
    for title, found in errors.items():
        lines.append(_line(f"fitted here, {title}", FITTED_ROWS, found))
    public = shipped_model(device.name, dtype)
    if public is not None:
        errors_of_it = np.abs(public.predict(m, n, k).latency_us / measured_us - 1)
        lines.append(_line("fitted on the public table of this GPU", public.rows, [errors_of_it]))
    lines += [
        "",
        f"{len(rows)} random products in {dtype}, {named} with the name of their kernel; means over the seeds"
        f" {', '.join(map(str, seeds))}.",
    ]
    return lines


def _line(title: str, fitted: int, errors: Sequence[FloatArray]) -> str:
    median, high = (100 * float(np.mean([np.quantile(each, q) for each in errors])) for q in (0.5, 0.95))
    return f"| {title} | {fitted:,} | {median:.2f} % | {high:.1f} % |"
