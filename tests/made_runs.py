"""Runs made of literals, for what reads runs: figures are invented, and every run says that it is
simulated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from made_devices import A100 as SPEC

from quantbench.device.spec import DeviceState
from quantbench.launch import Launch
from quantbench.measurement import Grade, Measurement
from quantbench.store.folder import Run, RunWriter
from quantbench.store.record import GridPosition, Measured, Outcome, Record, record_key
from quantbench.store.run import RunInfo
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm, Workload

STATE = DeviceState(sm_clock_mhz=1410.0, temperature_c=50.0, power_w=300.0)
PROVIDER = "torch.mm"


def measurement(samples_us: Sequence[float], **changes: object) -> Measurement:
    made = Measurement(
        samples_us=tuple(samples_us), clocks_mhz=(1410.0,) * len(samples_us), discarded=(), stopped_by="precision",
        mode="events", cache="cold", state_before=STATE, state_after=STATE,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def samples(middle_us: float, *, noise: float, count: int, seed: int) -> tuple[float, ...]:
    """Normal samples around `middle_us`."""
    return tuple(
        float(t) for t in middle_us * (1 + np.random.default_rng(seed).normal(0, noise, count))
    )


def record(
    workload: Workload,
    outcome: Outcome | Sequence[float],
    axes: Mapping[str, int],
    *,
    op: str = "gemm",
    provider: str = PROVIDER,
    launch: Launch | None = None,
    **changes: object,
) -> Record:
    """A point. outcome: samples in µs, or what came of it instead."""
    if isinstance(outcome, Sequence):
        outcome = Measured(measurement(outcome), Grade("A"))
    made = Record(
        run_id="run", key=record_key(workload, provider, TimingOptions()), workload=workload, provider=provider,
        outcome=outcome, launch=launch, places=(GridPosition(dict(axes), op),), origin="simulated",
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def reference(middle_us: float, elapsed_s: float) -> Record:
    """One repetition of the reference point."""
    quiet = samples(middle_us, noise=0.001, count=12, seed=int(elapsed_s))
    return record(
        Gemm(2048, 2048, 2048), quiet, {}, role="reference", places=(), elapsed_s=elapsed_s
    )


def run(records: Sequence[Record], run_id: str = "run", **changes: object) -> Run:
    """A run that was never on disk."""
    axes: dict[str, set[int]] = {}
    for one in records:
        for place in one.places:
            for name, value in place.axes.items():
                axes.setdefault(name, set()).add(value)
    info = RunInfo(
        run_id=run_id, device=SPEC, state=STATE, software={"torch": "2.11.0"},
        axes={name: sorted(values) for name, values in axes.items()}, options={}, seed=0, environment={},
        started="2026-11-20T13:45:00+00:00", ended="2026-11-20T13:49:00+00:00", how_ended="complete",
        origin="simulated",
    )  # fmt: skip
    info = replace(info, **changes)  # type: ignore[arg-type]
    return Run(Path(run_id), info, tuple(replace(one, run_id=run_id) for one in records))


def write(results: Path, made: Run) -> Path:
    """The same run on disk; its folder."""
    with RunWriter.create(results, made.info) as writer:
        writer.extend(made.records)
    return writer.folder


HOSTILE = (
    "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>$\\frac{1}{0}$\x00\x1b[31m\u202e漢字"
    + "x" * 400
)


def staircase(n: int) -> float:
    """µs of a 128×256 tile on 108 SMs at m = 2048, 100 µs a wave: waves are full at n = 1536, 3328,
    5120, 6912.
    """
    return 3 + 100 * -(-(16 * -(-n // 256)) // 108)


def stairs(values: Sequence[int], **changes: object) -> list[Record]:
    return [
        record(Gemm(2048, n, 4096), samples(staircase(n), noise=0.002, count=20, seed=n), {"n": n}, **changes)
        for n in values
    ]  # fmt: skip
