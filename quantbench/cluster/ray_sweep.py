"""Runs a sweep on all devices of a Ray cluster with `ClusterSweep`, one run per kind of device.

The plan's points are divided into parts, one per device. On each device, a Ray actor (a remote
worker process) measures one part as an ordinary sweep. Each run has a writer, which stores a record
before the actor begins its next point. If a process or node is lost, Ray restarts the actor on a
free device, where it measures the part's remaining points.
"""

import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from quantbench.cluster.cards import reference_set
from quantbench.cluster.ray_cluster import WHO, device_count, device_kind, present
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, MeasurementError, QuantbenchError
from quantbench.store.environment import relevant_environment
from quantbench.store.folder import RunWriter, read_run
from quantbench.store.record import Record
from quantbench.store.run import read_run_info
from quantbench.sweep.child import WorkerClient, WorkerProcess
from quantbench.sweep.messages import Hello
from quantbench.sweep.options import SweepOptions, plan_sweep
from quantbench.sweep.plan import Plan
from quantbench.sweep.runner import Finished, Progress, Sweep, SweepJob
from quantbench.sweep.session import interpreter_runs, new_run_info, point_keys, records_to_keep

# Maximum number of restarts of an actor with its part. If the part fails even more often, the cause
# is more likely one of its points than the devices.
_RESTARTS = 3
# Time limit for the workers' start, in s. A device that does not answer in time is left out.
# Importing torch from a cold network disk takes a minute.
_START_LIMIT_S = 300.0
_WATCH_S = 0.25  # maximum time between two progress updates


class Writer:
    """Actor that stores a run's records, from all devices.

    folder: folder of the run.
    budget_s: remaining wall time of the run, in s; None for no limit.
    """

    def __init__(self, folder: Path, budget_s: float | None = None) -> None:
        self._writer, run = RunWriter.resume(folder)
        self._outcomes = dict.fromkeys(point_keys(records_to_keep(run)), "")
        self._labels: dict[int, str] = {}
        self._phases_s: Counter[str] = Counter()
        self._notes: list[str] = []
        self._budget_s = budget_s
        self._start_s = time.monotonic()

    def begin(self, part: int, label: str) -> tuple[frozenset[str], float | None]:
        """Registers a device for a part, or for the rest of a part whose device was lost.

        Returns the keys of all stored points, and the rest of the budget in s (None for no limit).

        part: number of the part.
        label: name of the device and its node.
        """
        if part in self._labels:
            lost = f"the device of part {part} was lost"
            self._notes.append(f"{lost}; {label} measures what is left of it")
        self._labels[part] = label
        left_s = None
        if self._budget_s is not None:
            left_s = self._budget_s - self._elapsed_s()
        return frozenset(self._outcomes), left_s

    def _elapsed_s(self) -> float:
        """Returns the wall time since the writer's start, in s."""
        return time.monotonic() - self._start_s

    def append(self, part: int, record: Record) -> None:
        """Stores a record of a part.

        Raises MeasurementError if another device has taken over the part.
        """
        now = self._labels[part]
        if record.source != now:
            raise MeasurementError(WHO, f"a record of part {part} by {record.source}", f"by {now}")
        self._writer.append(replace(record, elapsed_s=self._elapsed_s()))
        self._phases_s.update(record.phases_s)
        if record.role == "point":
            self._outcomes[record.key] = type(record.outcome).__name__

    def progress(self) -> tuple[float, Counter[str], list[str]]:
        """Returns the elapsed time in s, the number of points by outcome, and new messages.

        Points that were stored before the start are not counted. Each message is returned once.
        """
        notes = self._notes
        self._notes = []
        return self._elapsed_s(), Counter(filter(None, self._outcomes.values())), notes

    def end(self, how: str) -> None:
        """Stores how the run ended (one of `run.ENDINGS`), and closes its folder."""
        with self._writer:
            self._writer.end(how, self._phases_s)


def measure_part(
    number: int,
    job: SweepJob,
    label: str,
    connect: Callable[[], WorkerClient],
    begin: Callable[[int, str], tuple[frozenset[str], float | None]],
    append: Callable[[int, Record], None],
) -> Finished:
    """Measures the points of a part that are not stored yet, as an ordinary sweep.

    number: number of the part.
    job: sweep over all points of the part, without a budget.
    label: name of the device and its node.
    connect: function that starts a worker process on the device.
    begin, append: methods of the run's `Writer`.

    If the device is not of the job's kind, the part ends as failed.
    """
    done, left_s = begin(number, label)
    if left_s is not None and left_s <= 0:
        return Finished("budget")
    plan = job.plan.without(done).within(left_s)

    def worker() -> WorkerClient:
        found = connect()
        name = found.hello.device.name
        if name != job.spec.name:  # Ray restarted the actor on a node with another device
            found.close()
            raise MeasurementError(WHO, f"{label} is a {name}", f"a {job.spec.name}")
        found.begin(job.timing)
        return found

    def store(record: Record) -> None:
        append(number, replace(record, source=label))

    rest = replace(job, plan=plan, done=done, budget_s=left_s)
    return Sweep(rest, worker, store, time.monotonic).run()


class DeviceActor:
    """Actor that measures on one device.

    core: CPU core to which the actor is bound, counted backwards from the last allowed core; None
        on a GPU.
    """

    def __init__(self, core: int | None) -> None:
        import ray

        name = f"CPU {core}"
        if core is None:
            name = f"GPU {ray.get_gpu_ids()[0]}"
        elif hasattr(os, "sched_setaffinity"):
            allowed = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {allowed[-1 - core % len(allowed)]})
        self._label = f"{name} on {socket.gethostname()}"

    def introduce(self, providers: Sequence[str]) -> tuple[str, Hello]:
        """Starts a worker, and returns the device's label and the worker's first message.

        providers: names of user-defined providers that the worker imports first.
        """
        with WorkerProcess(providers) as worker:
            return self._label, worker.hello

    def measure(self, number: int, job: SweepJob, writer: Any) -> Finished:
        """Measures a part on this device (see `measure_part`).

        writer: Ray's handle of the run's `Writer`.
        """
        import ray

        def call(method: Any, *arguments: Any) -> Any:
            return ray.get(method.remote(*arguments))

        begin = partial(call, writer.begin)
        append = partial(call, writer.append)
        return measure_part(number, job, self._label, WorkerProcess, begin, append)


@dataclass
class ClusterRun:
    """One run, on all devices of one kind: devices with equal names and software versions.

    spec: constants of the devices.
    plan: points that are not stored yet, as many as the budget allows.
    devices: labels of the devices.
    already: number of points that were stored before this sweep started.
    writer: Ray's handle of the run's `Writer`.
    parts: actor of each part in progress, by Ray's reference to the part's result.
    endings: results of the finished parts.
    """

    spec: DeviceSpec
    options: SweepOptions
    plan: Plan
    folder: Path
    devices: tuple[str, ...]
    already: int
    writer: Any
    parts: dict[Any, Any]
    endings: list[Finished] = field(default_factory=list)

    @property
    def finished(self) -> Finished:
        """Worst result among the finished parts: failed, budget or complete."""
        order = ("complete", "budget", "failed")
        return max(self.endings, key=lambda ending: order.index(ending.how))


@dataclass
class ClusterSweep:
    """One sweep over all devices of a cluster.

    ray: the module ray, connected to a cluster by `connected`.
    make_options: function that returns the sweep's options for a device. The options' budget limits
        the wall time.
    results: folder in which new runs are created.
    resume: folder of a run to finish; None for new runs.
    providers: names of the sweep's user-defined providers.
    note: function that is called with a message when a device is lost or left out.
    runs: one run for each kind of device, set by `start`.
    """

    ray: Any
    make_options: Callable[[DeviceSpec], SweepOptions]
    results: Path
    resume: Path | None = None
    providers: Sequence[str] = ()
    note: Callable[[str], None] = lambda text: None
    runs: list[ClusterRun] = field(default_factory=list)

    def start(self) -> Sequence[ClusterRun]:
        """Starts an actor for each device, and opens a run for each kind of device.

        Raises MeasurementError if no device can be used.
        """
        count = device_count(self.ray.nodes(), self.ray.available_resources())
        actors = [self._device_actor(number) for number in range(count)]
        introductions = {actor.introduce.remote(self.providers): actor for actor in actors}
        answered, silent = self.ray.wait(
            list(introductions), num_returns=count, timeout=_START_LIMIT_S
        )
        reasons = ["it does not answer"] * len(silent)
        kinds: dict[object, list[tuple[Any, str, Hello]]] = defaultdict(list)
        for reply in answered:
            try:
                label, hello = self.ray.get(reply)
            except self.ray.exceptions.RayError as error:
                reasons.append(_reason(error))
                continue
            software = {**hello.software, "os": ""}
            kind = (hello.device.name, *sorted(software.items()))
            kinds[kind].append((introductions[reply], label, hello))
        wanted = read_run_info(self.resume).device.name if self.resume else ""
        for members in kinds.values():
            name = members[0][2].device.name
            if wanted and (self.runs or name != wanted):
                reasons.append(f"it is a {name}, the run is of {wanted}")
            else:
                self.runs.append(self._open(members))
        for reason in reasons:
            self.note(f"a device takes no part: {reason}")
        if not self.runs:
            expected = "at least one device that can be measured"
            raise MeasurementError(WHO, "; ".join(reasons), expected)
        return self.runs

    def _open(self, members: Sequence[tuple[Any, str, Hello]]) -> ClusterRun:
        """Opens the run for devices of one kind, and starts one part of the plan on each device.

        If the plan has fewer groups of points than devices, some devices stay idle.

        members: actor, label and worker's first message, for each device.

        Raises InputError for --refine and --shard.
        """
        hello = members[0][2]
        device = hello.device
        options = replace(self.make_options(device), tiles=hello.tiles)
        if options.refine or options.shard:
            raise InputError(WHO, "--refine or --shard", "a whole plan, known beforehand")
        axes, whole = plan_sweep(replace(options, budget_s=None), device)
        members = members[: len(whole.groups)]
        folder = self.resume
        if folder is None:
            info = new_run_info(hello, options, axes, self.results)
            with RunWriter.create(self.results, info) as created:
                folder = created.folder
        done = point_keys(records_to_keep(read_run(folder)))
        writer = self._writer(folder, options.budget_s)
        parts = {}
        for number, (actor, _, _) in enumerate(members, 1):
            job = SweepJob(
                replace(whole, groups=whole.groups[number - 1 :: len(members)]),
                folder.name,
                device,
                options.timing,
                limit_s=options.limit_s,
                interpreter=interpreter_runs(),
                more_references=reference_set(whole),
            )
            parts[actor.measure.remote(number, job, writer)] = actor
        # The devices measure at the same time, so the budget in wall time counts for each device.
        together_s = options.budget_s and options.budget_s * len(members)
        plan = whole.without(done).within(together_s)
        labels = tuple(label for _, label, _ in members)
        return ClusterRun(device, options, plan, folder, labels, len(done), writer, parts)

    def watch(self, show: Callable[[Progress], None]) -> None:
        """Waits until every part has ended, and closes the runs.

        show: function that is called several times a second with the progress of all runs.

        Raises MeasurementError if no device is left.
        """
        how = "interrupted"
        try:
            while waiting := list(chain.from_iterable(run.parts for run in self.runs)):
                ended, _ = self.ray.wait(waiting, timeout=_WATCH_S)
                for result in ended:
                    self._end_part(result)
                if not ended and not present(self.ray.nodes()):
                    raise MeasurementError(WHO, f"no {device_kind()} is left", "one; see --resume")
                show(self._progress())
            how = ""
        finally:
            for run in self.runs:
                for actor in run.parts.values():
                    self.ray.kill(actor)
                self.ray.get(run.writer.end.remote(how or run.finished.how))

    def _end_part(self, result: Any) -> None:
        """Adds a part's result to its run's endings, and frees the device.

        A part whose device was lost has failed. If a QuantbenchError ended the part, it is raised.

        result: Ray's reference to the part's result.
        """
        run = next(run for run in self.runs if result in run.parts)
        try:
            run.endings.append(self.ray.get(result))
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, QuantbenchError):
                raise error.cause from None
            raise
        except self.ray.exceptions.RayError as error:
            run.endings.append(Finished("failed", _reason(error)))
            self.note(f"a device was lost: {_reason(error)}")
        self.ray.kill(run.parts.pop(result))  # a part that lost its device can use this device

    def _progress(self) -> Progress:
        """Returns the progress of all runs, and passes the writers' messages to `note`.

        The remaining time is estimated from the mean time per point so far.
        """
        counts: Counter[str] = Counter()
        total = 0
        devices = 0
        for run in self.runs:
            elapsed_s, of_run, notes = self.ray.get(run.writer.progress.remote())
            counts += of_run
            total += len(run.plan.points)
            devices += len(run.parts)
            for text in notes:
                self.note(text)
        done = counts.total()
        progress = Progress(max(done, total), done, f"{devices} devices", elapsed_s)
        if done:
            progress.left_s = elapsed_s / done * (progress.total - done)
        progress.measured = counts["Measured"]
        progress.skipped = counts["Skipped"]
        progress.failed = counts["Failed"]
        return progress

    def _device_actor(self, number: int) -> Any:
        """Starts an actor for one device, with the environment variables that affect times.

        number: index of the actor. On CPUs, it selects the core.
        """
        variables = relevant_environment()
        if "PYTHONPATH" in os.environ:
            variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
        for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):  # Ray sets these variables
            variables.pop(name, None)
        on_cpu = device_kind() == "CPU"
        kind = self.ray.remote(DeviceActor).options(
            num_cpus=int(on_cpu),
            num_gpus=int(not on_cpu),
            runtime_env={"env_vars": variables},
            max_restarts=_RESTARTS,
            max_task_retries=_RESTARTS,
            scheduling_strategy="SPREAD",
        )
        return kind.remote(number if on_cpu else None)

    def _writer(self, folder: Path, budget_s: float | None) -> Any:
        """Starts a run's writer on this node, because the folder is on this node's disk.

        folder: folder of the run.
        budget_s: wall time limit of the run, in s; None for no limit.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = self.ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        writer = self.ray.remote(Writer).options(num_cpus=0, scheduling_strategy=here)
        return writer.remote(folder.resolve(), budget_s)


def _reason(error: Exception) -> str:
    r"""Extracts the cause from one of Ray's long error messages.

    >>> _reason(RuntimeError("The actor died.\n  It died because its node has died. Node Id: 93f5"))
    'its node has died'
    """
    text = " ".join(str(getattr(error, "cause", None) or error).split())
    found = text.partition(" because ")[2] or text or type(error).__name__
    return found.partition(". ")[0].rstrip(".")[:200]
