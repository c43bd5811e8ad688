"""Times a collective on all ranks at once, under the control of rank 0.

Only rank 0 decides when to warm up, to stop and to discard; it broadcasts each command and gathers
the results of all ranks. The time of a sample is that of the slowest rank, and its SM clock is the
lowest SM clock of any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from quantbench.device.spec import DeviceState
from quantbench.errors import MeasurementError
from quantbench.timing.session import Batch
from quantbench.workload import Collective

#: name of a method of `Work`, and its arguments
Command = tuple[str, tuple[Collective | int, ...]]


class Ranks(Protocol):
    """Group of processes as seen from one rank.

    The implementation is `providers.collectives.TorchRanks`.
    """

    world_size: int

    def broadcast(self, command: Command | None) -> Command | None:
        """Returns the command of rank 0 on every rank; None means stop. Other ranks pass None."""

    def gather(self, value: object) -> list[object] | None:
        """Returns the values of all ranks, in the order of the ranks, on rank 0.

        Returns None on the other ranks.
        """


class Work(Protocol):
    """One rank's part of a collective; implemented by `providers.collectives.TorchWork`."""

    def allocate(self, collective: Collective) -> str:
        """Allocates the buffers. Returns "" or the reason why this failed."""

    def check(self) -> str:
        """Runs the collective once and checks its result. Returns "" or what is wrong."""

    def sample(self, count: int, runs: int) -> RankBatch:
        """Takes `count` samples of `runs` runs each."""


@dataclass(frozen=True)
class RankBatch:
    """Samples of one rank.

    samples_us: times of one run, in µs.
    launch_us: minimum time in which the host launched one run, in µs; 0 if the host does the work
        itself.
    state: state of the rank's GPU while it worked.
    """

    samples_us: tuple[float, ...]
    launch_us: float = 0.0
    state: DeviceState = field(default_factory=DeviceState)


@dataclass(frozen=True)
class Refused:
    """Reason why a point is not measured.

    kind: unsupported, out_of_memory or wrong_result.
    """

    kind: str
    message: str


OUT_OF_MEMORY = "out of memory: "


class Leader:
    """Rank 0, which sends commands to all ranks and gathers their results."""

    def __init__(self, ranks: Ranks, work: Work) -> None:
        self._ranks = ranks
        self._work = work

    def begin(self, collective: Collective) -> Refused | None:
        """Allocates and checks one point on every rank.

        Returns the reason why the point cannot be measured; None if it can.
        """
        kind = "unsupported"
        trouble = _first(self._do("allocate", collective))
        if trouble.startswith(OUT_OF_MEMORY):
            kind = "out_of_memory"
        if not trouble:
            trouble = _first(self._do("check"))
            if "not supported" not in trouble:
                kind = "wrong_result"
        return Refused(kind, trouble) if trouble else None

    def sample(self, count: int, runs: int) -> RankBatch:
        """Returns `count` samples of the current point, each the time of the slowest rank.

        The current point is the one that was begun last. `launch_us` of the result is the longest
        of all ranks. `state` is the state of rank 0, with the lowest clock and the throttle reasons
        of all ranks.

        Raises MeasurementError if a rank did not take all samples.
        """
        batches = [each for each in self._do("sample", count, runs) if isinstance(each, RankBatch)]
        samples_us = [each.samples_us for each in batches]
        if [len(times) for times in samples_us] != [count] * self._ranks.world_size:
            found = f"{len(batches)} ranks answered"
            raise MeasurementError("comm", found, f"{count} samples from each rank")
        return RankBatch(
            samples_us=tuple(map(max, zip(*samples_us, strict=True))),
            launch_us=max(each.launch_us for each in batches),
            state=_worst([each.state for each in batches]),
        )

    def stop(self) -> None:
        """Ends `follow` on the other ranks."""
        self._ranks.broadcast(None)

    def _do(self, method: str, *arguments: Collective | int) -> list[object]:
        """Calls a method of `Work` on all ranks.

        Returns the results in the order of the ranks.
        """
        self._ranks.broadcast((method, arguments))
        gathered = self._ranks.gather(getattr(self._work, method)(*arguments))
        assert gathered is not None
        return gathered


def follow(ranks: Ranks, work: Work) -> None:
    """Performs the commands of rank 0 until it stops."""
    while (command := ranks.broadcast(None)) is not None:
        method, arguments = command
        ranks.gather(getattr(work, method)(*arguments))


def _first(troubles: Sequence[object]) -> str:
    """Returns the error of the lowest rank that has one, or ""."""
    for rank, text in enumerate(troubles):
        if text and rank:
            return f"{text} (rank {rank})"
        if text:
            return str(text)
    return ""


def _worst(states: Sequence[DeviceState]) -> DeviceState:
    """Returns the first state, with the lowest SM clock and the throttle reasons of all states.

    The clock of the result is None if the clock of any state is unknown.
    """
    clocks = [state.sm_clock_mhz for state in states if state.sm_clock_mhz is not None]
    reasons = set().union(*(state.throttle_reasons for state in states))
    return replace(
        states[0],
        sm_clock_mhz=min(clocks) if len(clocks) == len(states) else None,
        throttle_reasons=tuple(sorted(reasons)),
    )


@dataclass
class LeaderSampler:
    """Sampler of the current point of a leader, which samples on all ranks.

    runs: number of runs per sample.
    launch_us: minimum time in which the hosts launched one run of the last batch, in µs.
    """

    leader: Leader
    runs: int = 1
    launch_us: float = 0.0

    def sample(self, count: int) -> Batch:
        batch = self.leader.sample(count, self.runs)
        self.launch_us = batch.launch_us
        clock_mhz = batch.state.sm_clock_mhz
        clocks_mhz = () if clock_mhz is None else (clock_mhz,) * count
        return Batch(batch.samples_us, clocks_mhz, batch.state)
