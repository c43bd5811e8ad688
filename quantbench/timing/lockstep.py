"""Times a collective on all ranks at once, under the control of rank 0.

Rank 0 uses `Leader`, and the other ranks run `follow`. Rank 0 alone decides when to warm up, to
stop and to discard. It broadcasts each command, and gathers the results of all ranks. A sample has
the time of the slowest rank, and the lowest SM clock of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from quantbench.device.spec import DeviceState
from quantbench.errors import MeasurementError
from quantbench.timing.session import Batch
from quantbench.workload import Collective

#: Name of a method of `Work`, and the method's arguments.
Command = tuple[str, tuple[Collective | int, ...]]


class Ranks(Protocol):
    """Group of processes as seen from one rank.

    The implementation is `providers.collectives.TorchRanks`.
    """

    world_size: int

    def broadcast(self, command: Command | None) -> Command | None:
        """Returns rank 0's command on every rank; the command None means stop.

        command: command on rank 0; None on the other ranks.
        """

    def gather(self, value: object) -> list[object] | None:
        """Returns on rank 0 the values of all ranks in rank order, and None on the other ranks."""


class Work(Protocol):
    """A collective as one rank runs it; implemented by `providers.collectives.TorchWork`."""

    def allocate(self, collective: Collective) -> str:
        """Allocates the buffers. Returns "", or the reason for a failure."""

    def check(self) -> str:
        """Runs the collective once and checks its result. Returns "", or the error found."""

    def sample(self, count: int, runs: int) -> RankBatch:
        """Takes `count` samples of `runs` runs each."""


@dataclass(frozen=True)
class RankBatch:
    """Samples of one rank.

    samples_us: time per run of each sample, in µs.
    launch_us: minimum time that the host took to launch one run, in µs; 0 if the host does the work
        itself.
    state: state of the rank's GPU during the samples.
    """

    samples_us: tuple[float, ...]
    launch_us: float = 0.0
    state: DeviceState = field(default_factory=DeviceState)


@dataclass(frozen=True)
class Refused:
    """Reason why a point is not measured.

    kind: unsupported, out_of_memory or wrong_result.
    message: text of the reason.
    """

    kind: str
    message: str


#: Beginning of the reason that `Work.allocate` returns if the memory does not suffice.
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
        """Takes samples of the point that was begun last; each is the time of the slowest rank.

        The result's `launch_us` is the longest of all ranks. Its `state` is that of rank 0, but
        with the lowest SM clock and the throttle reasons of all ranks.

        count: number of samples.
        runs: number of runs per sample.

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
        """Calls a method of `Work` on all ranks, and returns the results in rank order."""
        self._ranks.broadcast((method, arguments))
        gathered = self._ranks.gather(getattr(self._work, method)(*arguments))
        assert gathered is not None
        return gathered


def follow(ranks: Ranks, work: Work) -> None:
    """Executes rank 0's commands on this rank until rank 0 stops."""
    while (command := ranks.broadcast(None)) is not None:
        method, arguments = command
        ranks.gather(getattr(work, method)(*arguments))


def _first(troubles: Sequence[object]) -> str:
    """Returns the error of the lowest rank with an error, or "".

    troubles: each rank's error, or "".
    """
    for rank, text in enumerate(troubles):
        if text and rank:
            return f"{text} (rank {rank})"
        if text:
            return str(text)
    return ""


def _worst(states: Sequence[DeviceState]) -> DeviceState:
    """Returns the first state, but with the lowest SM clock and the throttle reasons of all states.

    The clock is None if any state has no known clock.
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
    """Sampler (see `session.Sampler`) that samples a leader's current point on all ranks.

    runs: number of runs per sample.
    launch_us: launch time of one run on the slowest host in the last batch, in µs.
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
