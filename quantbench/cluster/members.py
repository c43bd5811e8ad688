"""What a cluster looks like to the sweep: devices that can be connected to, and lost.

Ray stands behind it in `ray_pool`; tests put literals there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from quantbench.errors import QuantbenchError
from quantbench.sweep.child import Asked

Tick = Callable[[], None]


class DeviceLostError(QuantbenchError):
    """A device that no longer answers: its node, its process or its driver is gone. The point in hand is not
    to blame."""

    def __init__(self, who: str, reason: str) -> None:
        super().__init__("cluster", f"{who} was lost ({reason})", "a device that answers")
        self.who = who
        self.reason = reason


class ClusterWorker(Asked, Protocol):
    """The worker process of one device. label: `GPU 5 on node3`, for people and for the records it makes."""

    label: str


class Host(Protocol):
    """One device of the cluster. name: which it is, before it has answered."""

    name: str

    def connect(self, tick: Tick) -> ClusterWorker:
        """Start its worker, again after it was lost. `tick` is called while waiting. Raises DeviceLostError."""
