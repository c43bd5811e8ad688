"""Times a collective on all ranks at once: rank 0 leads, the others follow its commands.

Entry points: `Leader` and `LeaderSampler`, used on rank 0 by `comm.session`; `follow`, used on the other ranks by the
command `comm`. `providers.collectives` implements the protocols `Ranks` and `Work`, and uses `Command` and
`OUT_OF_MEMORY`.

Only rank 0 warms up, stops and discards. It broadcasts each command and gathers the results. A sample is the time of
the slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quantbench.errors import MeasurementError
from quantbench.timing.session import Batch
from quantbench.workload import Collective

#: method of `Work` and its arguments
Command = tuple[str, tuple[Collective | int, ...]]


class Ranks(Protocol):
    """Group of processes as seen from one rank; implemented by `providers.collectives.TorchRanks`."""

    world_size: int

    def broadcast(self, command: Command | None) -> Command | None:
        """Returns rank 0's command on every rank, None to stop. Other ranks pass None."""

    def gather(self, value: object) -> list[object] | None:
        """Returns every rank's value in rank order on rank 0, None elsewhere."""


class Work(Protocol):
    """One rank's part of a collective; implemented by `providers.collectives.TorchWork`."""

    def allocate(self, collective: Collective) -> str:
        """Allocates buffers. Returns "" or the reason for the failure."""

    def check(self) -> str:
        """Runs once and checks the result. Returns "" or the error found."""

    def sample(self, count: int, runs: int) -> list[float]:
        """Takes `count` samples of `runs` runs each; returns µs per run."""


@dataclass(frozen=True)
class Refused:
    """Reason for not measuring a point. kind: unsupported, out_of_memory or wrong_result."""

    kind: str
    message: str


OUT_OF_MEMORY = "out of memory: "


class Leader:
    """Rank 0, which sends commands to all ranks and gathers their results."""

    def __init__(self, ranks: Ranks, work: Work) -> None:
        self._ranks, self._work = ranks, work

    def begin(self, collective: Collective) -> Refused | None:
        """Allocates and checks one point on every rank. Returns None or the reason for not measuring it."""
        if trouble := _first(self._do("allocate", collective)):
            memory = trouble.startswith(OUT_OF_MEMORY)
            return Refused("out_of_memory" if memory else "unsupported", trouble)
        if trouble := _first(self._do("check")):
            return Refused("unsupported" if "not supported" in trouble else "wrong_result", trouble)
        return None

    def sample(self, count: int, runs: int) -> list[float]:
        """Returns `count` samples of the point begun last, µs, each the time of the slowest rank."""
        gathered = self._do("sample", count, runs)
        times = [[float(t) for t in mine] for mine in gathered if isinstance(mine, list)]
        if len(times) != self._ranks.world_size or any(len(mine) != count for mine in times):
            raise MeasurementError("comm", f"{len(times)} ranks answered", f"{count} samples from each rank")
        return [max(column) for column in zip(*times, strict=True)]

    def stop(self) -> None:
        self._ranks.broadcast(None)

    def _do(self, method: str, *arguments: Collective | int) -> list[object]:
        self._ranks.broadcast((method, arguments))
        gathered = self._ranks.gather(getattr(self._work, method)(*arguments))
        assert gathered is not None
        return gathered


def follow(ranks: Ranks, work: Work) -> None:
    """Performs rank 0's commands until it stops."""
    while (command := ranks.broadcast(None)) is not None:
        method, arguments = command
        ranks.gather(getattr(work, method)(*arguments))


def _first(troubles: Sequence[object]) -> str:
    """The error of the lowest rank that has one, or ""."""
    for rank, text in enumerate(troubles):
        if text:
            return str(text) if rank == 0 else f"{text} (rank {rank})"
    return ""


@dataclass
class LeaderSampler:
    """`Sampler` of the point begun last that samples on all ranks. runs: runs per sample."""

    leader: Leader
    runs: int = 1

    def sample(self, count: int) -> Batch:
        return Batch(tuple(self.leader.sample(count, self.runs)))
