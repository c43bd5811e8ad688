"""Times a collective on all ranks at once: rank 0 leads, the others follow its commands.

Entry points: `Leader` and `LeaderSampler`, used on rank 0 by `comm.session`; `follow`, used on the other ranks by the
command `comm`. `providers.collectives` implements the protocols `Ranks` and `Work`, and uses `COMMAND_LENGTH` and
`OUT_OF_MEMORY`.

Only rank 0 warms up, stops and discards. It broadcasts each command as a few integers and gathers the results. A sample
is the time of the slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quantbench.errors import MeasurementError
from quantbench.timing.session import Batch
from quantbench.workload import Collective
from quantbench.workload.ops import COLLECTIVE_DTYPES, COLLECTIVE_OPS

STOP, ALLOCATE, CHECK, SAMPLE = range(4)
#: Number of integers in a command: code, op, message_bytes, dtype, samples, runs per sample
COMMAND_LENGTH = 6


class Ranks(Protocol):
    """Group of processes as seen from one rank; implemented by `providers.collectives.TorchRanks`."""

    rank: int
    world_size: int
    num_nodes: int

    def broadcast(self, command: Sequence[int] | None) -> list[int]:
        """Returns rank 0's command on every rank; only rank 0 passes one."""

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
        if trouble := _first(self._do(ALLOCATE, collective)):
            memory = trouble.startswith(OUT_OF_MEMORY)
            return Refused("out_of_memory" if memory else "unsupported", trouble)
        if trouble := _first(self._do(CHECK, collective)):
            return Refused("unsupported" if "not supported" in trouble else "wrong_result", trouble)
        return None

    def sample(self, collective: Collective, count: int, runs: int) -> list[float]:
        """Returns `count` samples, µs, each the time of the slowest rank."""
        gathered = self._do(SAMPLE, collective, count, runs)
        times = [[float(t) for t in mine] for mine in gathered if isinstance(mine, list)]
        if len(times) != self._ranks.world_size or any(len(mine) != count for mine in times):
            raise MeasurementError("comm", f"{len(times)} ranks answered", f"{count} samples from each rank")
        return [max(column) for column in zip(*times, strict=True)]

    def stop(self) -> None:
        self._ranks.broadcast([STOP] + [0] * (COMMAND_LENGTH - 1))

    def _do(self, code: int, collective: Collective, count: int = 0, runs: int = 0) -> list[object]:
        command = encode(code, collective, count, runs)
        self._ranks.broadcast(command)
        gathered = self._ranks.gather(perform(self._work, command, self._ranks))
        assert gathered is not None
        return gathered


def follow(ranks: Ranks, work: Work) -> None:
    """Performs rank 0's commands until it sends STOP."""
    while (command := ranks.broadcast(None))[0] != STOP:
        ranks.gather(perform(work, command, ranks))


def encode(code: int, collective: Collective, count: int, runs: int) -> list[int]:
    op, dtype = COLLECTIVE_OPS.index(collective.op), COLLECTIVE_DTYPES.index(collective.dtype)
    return [code, op, collective.message_bytes, dtype, count, runs]


def perform(work: Work, command: Sequence[int], ranks: Ranks) -> object:
    code, op, message_bytes, dtype, count, runs = command
    if code == ALLOCATE:
        return work.allocate(
            Collective(COLLECTIVE_OPS[op], message_bytes, ranks.world_size, COLLECTIVE_DTYPES[dtype], ranks.num_nodes)
        )
    if code == CHECK:
        return work.check()
    return work.sample(count, runs)


def _first(troubles: Sequence[object]) -> str:
    """The error of the lowest rank that has one, or ""."""
    for rank, text in enumerate(troubles):
        if text:
            return str(text) if rank == 0 else f"{text} (rank {rank})"
    return ""


@dataclass
class LeaderSampler:
    """`Sampler` of a collective that samples on all ranks. runs: runs per sample."""

    leader: Leader
    collective: Collective
    runs: int = 1

    def sample(self, count: int) -> Batch:
        return Batch(tuple(self.leader.sample(self.collective, count, self.runs)))
