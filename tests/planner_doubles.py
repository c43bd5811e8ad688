"""Stand-ins for the planner's tests: a GPU whose times can be worked out by hand, and constants
that stay put.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.latency.estimate import Estimate
from quantbench.latency.interconnect import cluster
from quantbench.planner.calibration import Calibration, shipped
from quantbench.planner.layout import Job
from quantbench.workload import Gemm, TransformerShape
from quantbench.workload.kinds import Compute

A100 = lookup("a100-sxm4-80gb")
#: no collective is slower than alone, nothing is launched, the network runs at its rate
PLAIN = Calibration(1.0, 0.0, 1.0, base_gib=0.0, activation_slack=0.0)
EVERYWHERE = replace(shipped(), sites={}, chosen=PLAIN)
#: near what is shipped for the cluster that the tables come from
LIKE_JEAN_ZAY = Calibration(2.4, 3.9, 0.22, base_gib=9.0, activation_slack=0.21)


@dataclass
class EvenTimes:
    """Every product at 250 TFLOP/s, everything else at 1 µs. Counts how often it is asked."""

    device: DeviceSpec = A100
    note: str = "made up"
    common_error: float = 0.0
    asked: int = 0

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        self.asked += 1
        mids = [work.flops / 250e6 if isinstance(work, Gemm) else 1.0 for work in workloads]
        return [Estimate(mid, 0.9 * mid, 1.2 * mid) for mid in mids]


def bloom_like(layers: int = 72, heads: int = 64, hidden: int = 14336) -> TransformerShape:
    """The shape that the documents end with."""
    return TransformerShape(
        hidden=hidden, heads=heads, layers=layers, vocab=250880, attention="unfused", dropout=True
    )


def job(
    gpus: int = 384, gbs: int = 2048, shape: TransformerShape | None = None, **changes: object
) -> Job:
    """A job on the cluster of the documents."""
    return Job(shape or bloom_like(), cluster("jean-zay-a100"), gpus, gbs, **changes)  # type: ignore[arg-type]
