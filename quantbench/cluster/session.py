"""Runs a sweep over every device of a cluster: one run (`Lane`) per kind of device, one thread per device.

Entry point: `ClusterSweep`, with its method `run`. Used by the command `sweep` (`--on ray`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from quantbench.cluster.lane import ClusterWorker, DeviceLostError, Host, Lane
from quantbench.device.spec import DeviceSpec
from quantbench.errors import MeasurementError, StoreError
from quantbench.store.folder import RunWriter
from quantbench.store.record import Record
from quantbench.store.run import read_run_info
from quantbench.sweep.messages import Hello
from quantbench.sweep.options import SweepOptions, plan_sweep
from quantbench.sweep.runner import More
from quantbench.sweep.session import begun, records_to_keep, resumed_options

# How long to wait for all devices after the first one; a node that takes longer joins when it is ready.
_STRAGGLERS_S = 60.0
# A device that was lost this often is not connected again.
_MOST_LOSSES = 3
_RECONNECT_PAUSE_S = 1.0
_WATCH_S = 0.2

Kind = tuple[str, tuple[tuple[str, str], ...]]


class _StoppedError(Exception):
    """Signal that ends a device's thread when the whole sweep is stopped."""


@dataclass
class ClusterSweep:
    """One sweep over `hosts`. After `run`, `lanes` has the runs.

    make_options: function that returns the options for a kind of device; their budget is the cluster's wall time.
    make_more: function that returns a lane's `more`, which adds points when its plan is measured, or None.
    resume: folder of a run to finish, or None for a new run in `results`.
    resume_budget_s: wall seconds for the resumed run; None to finish its plan.
    on_note: function called with a message when a device is lost or does not take part.
    on_progress: function called a few times a second during the sweep.
    """

    hosts: Sequence[Host]
    make_options: Callable[[DeviceSpec], SweepOptions]
    results: Path
    make_more: Callable[[SweepOptions, DeviceSpec], More | None] = lambda options, spec: None
    resume: Path | None = None
    resume_budget_s: float | None = None
    on_note: Callable[[str], None] = lambda text: None
    on_progress: Callable[[Sequence[Lane]], None] = lambda lanes: None
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self.lanes: dict[Kind, Lane] = {}
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._hellos: dict[str, Hello] = {}
        self._given_up: dict[str, str] = {}
        self._heard: set[str] = set()
        self._first_s: float | None = None

    def run(self) -> tuple[Lane, ...]:
        """Measures until every run is complete, out of time, or without a device. Keeps everything measured.

        Raises MeasurementError if no device answered, and re-raises any exception of a device's thread.
        """
        with ThreadPoolExecutor(max_workers=max(1, len(self.hosts)), thread_name_prefix="device") as threads:
            parts = [threads.submit(self._serve, host) for host in self.hosts]
            try:
                pending = set(parts)
                while pending:
                    self.on_progress(tuple(self.lanes.values()))
                    done, pending = wait(pending, timeout=_WATCH_S, return_when=FIRST_EXCEPTION)
                    for part in done:
                        part.result()
            except BaseException:
                self._stop.set()
                wait(parts)
                self._note_ends("interrupted")
                raise
        if not self.lanes:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._given_up.items())
            raise MeasurementError("cluster", reasons or "no devices", "at least one device that answers")
        self._note_ends()
        return tuple(self.lanes.values())

    def _serve(self, host: Host) -> None:
        """Runs one device's thread: connects, works, and reconnects after a loss, three attempts in all."""
        for loss in range(_MOST_LOSSES):
            with suppress(_StoppedError):
                try:
                    self._work(host, host.connect(self._tick))
                except DeviceLostError as lost:
                    self.on_note(f"{lost.who} was lost: {lost.reason}")
                    self._answered(host, lost.reason)  # the others need not wait for it
                    if loss + 1 < _MOST_LOSSES:
                        self.pause(_RECONNECT_PAUSE_S)
                        continue
            return

    def _work(self, host: Host, worker: ClusterWorker) -> None:
        self._answered(host, worker=worker)
        lane = self._lane_of(worker)
        if lane is None:
            worker.close()
            return
        worker.begin(lane.options.timing)
        ending = lane.measure(worker, self._tick)
        if ending.how == "failed":
            self.on_note(f"{worker.label} takes no more points: {ending.reason}")

    def _tick(self) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _answered(self, host: Host, given_up: str = "", worker: ClusterWorker | None = None) -> None:
        with self._changed:
            if worker is not None:
                self._hellos[worker.label] = worker.hello
            if given_up:
                self._given_up[host.name] = given_up
            self._first_s = self.clock() if self._first_s is None else self._first_s
            self._heard.add(host.name)
            self._changed.notify_all()

    def _lane_of(self, worker: ClusterWorker) -> Lane | None:
        """Waits for the other devices, then returns this device's run; None if the device takes no part."""
        with self._changed:
            while len(self._heard) < len(self.hosts) and self.clock() - (self._first_s or 0.0) <= _STRAGGLERS_S:
                self._tick()
                self._changed.wait(_WATCH_S)
            kind = _kind_of(worker.hello)
            if kind not in self.lanes:
                members = sum(_kind_of(hello) == kind for hello in self._hellos.values())
                lane = self._open(worker, members, self.resume)
                if lane is None:
                    return None
                self.lanes[kind] = lane
            return self.lanes[kind]

    def _open(self, worker: ClusterWorker, members: int, folder: Path | None) -> Lane | None:
        """Opens a new run, or the one in `folder`; returns None if that is of another kind of device."""
        device = worker.hello.device
        records: tuple[Record, ...] = ()
        if folder is None:
            options = self.make_options(device)
            budget_s = options.budget_s
            if budget_s is not None:
                # Plans are budgeted for one device; several devices measure more points in the same time.
                options = replace(options, budget_s=budget_s * members)
            axes, plan = plan_sweep(options, device)
            more = self.make_more(options, device)
            writer = RunWriter.create(self.results, begun(worker.hello, options, axes, self.results))
        else:
            budget_s = self.resume_budget_s
            options = resumed_options(folder, None if budget_s is None else budget_s * members)
            info = read_run_info(folder)
            if device.name != info.device.name or self.lanes:
                self.on_note(f"{worker.label} takes no part: it is a {device.name}, the run is of {info.device.name}")
                return None
            more = self.make_more(options, device)
            writer, run = RunWriter.resume(folder)
            records = records_to_keep(run)
            _, plan = plan_sweep(options, device, {record.key for record in records if record.role == "point"})
        return Lane(device, options, plan, writer, self.clock, self.pause, budget_s, more, records, members)

    def _note_ends(self, how: str = "") -> None:
        """Writes into each run.json how it ended, and closes it. how: ending of all runs; "" for each run's own."""
        for lane in self.lanes.values():
            try:
                lane.writer.end(how or lane.finished.how, lane.phases_s)
            except StoreError:
                # The user must see the error that stopped the sweep, not that run.json could not be written either.
                if not how:
                    raise
            finally:
                if how:
                    lane.writer.remove_if_empty()
                lane.writer.close()


def _kind_of(hello: Hello) -> Kind:
    """Returns what all devices of a run must share: device name, and all software versions except the OS."""
    return hello.device.name, tuple(sorted((k, v) for k, v in hello.software.items() if k != "os"))
