"""Runs a sweep on every GPU of a Ray cluster: an actor for each GPU measures one part of the plan
as an ordinary sweep.

If a process or node is lost, Ray restarts its actor on a free GPU and runs the part again. One
writer beside the driver stores each record before the next point begins, so that only points in
progress are measured again.
"""

import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from quantbench.cluster.cards import reference_set
from quantbench.device.spec import DeviceSpec
from quantbench.errors import (
    InputError,
    MeasurementError,
    QuantbenchError,
    StoreError,
    UnsupportedError,
)
from quantbench.store.environment import relevant_environment
from quantbench.store.folder import RunWriter, read_run
from quantbench.store.record import Record
from quantbench.store.run import read_run_info
from quantbench.sweep.child import WorkerClient, WorkerProcess
from quantbench.sweep.messages import Hello
from quantbench.sweep.options import SweepOptions, plan_sweep, whole_plan
from quantbench.sweep.plan import Plan
from quantbench.sweep.runner import Finished, Progress, Sweep, SweepJob
from quantbench.sweep.session import (
    interpreter_runs,
    new_run_info,
    point_keys,
    records_to_keep,
    resumed_options,
)

_VARIABLE = "QUANTBENCH_DEVICE"
# Restarts of a device's actor, and so of its part: a point that ends this many devices is the
# likelier cause.
_RESTARTS = 3
# Importing torch from a cold network disk takes a minute; a device that has not answered by then
# takes no part.
_START_LIMIT_S = 300.0
_WATCH_S = 0.25
_PROBE_S = 3.0

# Actor, label and introduction of a device.
Member = tuple[Any, str, Hello]


@dataclass(frozen=True)
class Part:
    """One part of a plan for `device`. number, parts: as `SweepOptions.shard`. options: of the
    whole plan.
    """

    run_id: str
    device: str
    options: SweepOptions
    number: int
    parts: int


@dataclass(frozen=True)
class Attempt:
    """Attempt at a part, as the writer answers its start. done: keys of measured points. left_s: of
    the budget.
    """

    number: int
    done: frozenset[str]
    left_s: float | None


class Writer:
    """The one writer of a run. After a part is started again, it refuses records of the earlier
    attempt.

    budget_s: wall seconds for the run from now; None for no limit.
    """

    def __init__(self, folder: Path, budget_s: float | None = None) -> None:
        self._writer, run = RunWriter.resume(folder)
        self._outcomes = dict.fromkeys(point_keys(records_to_keep(run)), "")
        self._attempts: Counter[int] = Counter()
        self._phases_s: Counter[str] = Counter()
        self._notes: list[str] = []
        self._budget_s = budget_s
        self._start_s = time.monotonic()

    def begin(self, number: int, label: str) -> Attempt:
        """Begins a part again, or for the first time, on the device `label`."""
        self._attempts[number] += 1
        if self._attempts[number] > 1:
            lost = f"the device of part {number} was lost"
            self._notes.append(f"{lost}; {label} measures what is left of it")
        left_s = None
        if self._budget_s is not None:
            left_s = self._budget_s - self._elapsed_s()
        return Attempt(self._attempts[number], frozenset(self._outcomes), left_s)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def append(self, number: int, attempt: int, record: Record) -> None:
        """Stores a record. Raises StoreError for an earlier attempt at the part."""
        if attempt != self._attempts[number]:
            raise StoreError(
                "write record", f"attempt {attempt} at part {number}", "the last attempt at it"
            )
        self._writer.append(replace(record, elapsed_s=self._elapsed_s()))
        self._phases_s.update(record.phases_s)
        if record.role == "point":
            self._outcomes[record.key] = type(record.outcome).__name__

    def progress(self) -> tuple[float, Counter[str], list[str]]:
        """Returns seconds and outcomes since the start, and the messages since the last call."""
        counts = Counter(self._outcomes.values())
        del counts[""]
        notes = list(self._notes)
        self._notes.clear()
        return self._elapsed_s(), counts, notes

    def end(self, how: str) -> None:
        with self._writer:
            self._writer.end(how, self._phases_s)


def measure_part(
    part: Part,
    label: str,
    connect: Callable[[], WorkerClient],
    begin: Callable[[int, str], Attempt],
    append: Callable[[int, int, Record], None],
) -> Finished:
    """Measures what is missing of a part by an ordinary sweep. begin, append: those of the run's
    `Writer`.
    """
    first = connect()
    workers = [first]

    def worker() -> WorkerClient:
        found = workers.pop() if workers else connect()
        found.begin(part.options.timing)
        return found

    try:
        device = first.hello.device
        if device.name != part.device:  # the part was moved to another node
            return Finished("failed", f"{label} is a {device.name}, not a {part.device}")
        attempt = begin(part.number, label)
        if attempt.left_s is not None and attempt.left_s <= 0:
            return Finished("budget")
        _, whole = plan_sweep(replace(part.options, budget_s=None), device)
        options = replace(part.options, shard=(part.number, part.parts), budget_s=attempt.left_s)
        _, plan = plan_sweep(options, device, attempt.done)
        job = SweepJob(
            plan,
            part.run_id,
            device,
            options.timing,
            done=attempt.done,
            budget_s=attempt.left_s,
            limit_s=options.limit_s,
            interpreter=interpreter_runs(),
            more_references=reference_set(whole),
        )

        def store(record: Record) -> None:
            append(part.number, attempt.number, replace(record, source=label))

        return Sweep(job, worker, store, time.monotonic).run()
    finally:
        for unused in workers:
            unused.close()


class DeviceActor:
    """Actor of one device. core: CPU core to bind to, counted from the last allowed one; None on a
    GPU.
    """

    def __init__(self, core: int | None) -> None:
        if core is not None and hasattr(os, "sched_setaffinity"):
            allowed = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {allowed[-1 - core % len(allowed)]})
        self._core = core

    def introduce(self) -> tuple[str, Hello]:
        """Returns the label of the device and its worker's introduction."""
        worker = WorkerProcess()
        worker.close()
        return self._label(), worker.hello

    def measure(self, part: Part, writer: Any) -> Finished:
        import ray

        def begin(*arguments: Any) -> Attempt:
            answer: Attempt = ray.get(writer.begin.remote(*arguments))
            return answer

        def append(*arguments: Any) -> None:
            ray.get(writer.append.remote(*arguments))

        return measure_part(part, self._label(), WorkerProcess, begin, append)

    def _label(self) -> str:
        import ray

        name = f"CPU {self._core}"
        if self._core is None:
            name = f"GPU {ray.get_gpu_ids()[0]}"
        return f"{name} on {socket.gethostname()}"


@dataclass
class ClusterRun:
    """One run: of all devices of one kind. finished: None until all of its parts have ended."""

    spec: DeviceSpec
    options: SweepOptions
    plan: Plan
    folder: Path
    devices: tuple[str, ...]
    already: int
    writer: Any
    parts: dict[Any, Any] = field(default_factory=dict)  # actor by the result that it will give
    endings: list[Finished] = field(default_factory=list)

    @property
    def finished(self) -> Finished:
        """Returns the worst ending of a part."""
        order = ("complete", "budget", "failed")
        return max(self.endings, key=lambda ending: order.index(ending.how))


@dataclass
class ClusterSweep:
    """One sweep over all devices of a cluster.

    ray: the module, connected to a cluster by `connected`.
    make_options: function that returns the options for a kind of device; their budget is wall time.
    resume: folder of a run to finish with resume_budget_s, or None for new runs in `results`.
    note: function called with a message when a device is lost or takes no part.
    """

    ray: Any
    make_options: Callable[[DeviceSpec], SweepOptions]
    results: Path
    resume: Path | None = None
    resume_budget_s: float | None = None
    note: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        self._actors: list[Any] = []
        self._resource = "CPU" if os.environ.get(_VARIABLE, "") == "cpu" else "GPU"
        self.runs: list[ClusterRun] = []

    def start(self) -> Sequence[ClusterRun]:
        """Starts an actor for each device and the parts of a run for each kind. Raises
        MeasurementError without any.
        """
        count = device_count(self.ray.nodes(), self.ray.available_resources(), self._resource)
        introductions = {}
        for core in range(count):
            actor = self._device_actor(core if self._resource == "CPU" else None)
            self._actors.append(actor)
            introductions[actor.introduce.remote()] = actor
        kinds: dict[object, list[Member]] = defaultdict(list)
        answered, silent = self.ray.wait(
            list(introductions), num_returns=count, timeout=_START_LIMIT_S
        )
        reasons = []
        if silent:
            reasons.append(f"{len(silent)} devices do not answer")
        for reply in answered:
            try:
                label, hello = self.ray.get(reply)
            except self.ray.exceptions.RayError as error:
                reasons.append(_reason(error))
                continue
            software = hello.software.items() - {("os", hello.software.get("os"))}
            kind = (hello.device.name, frozenset(software))
            kinds[kind].append((introductions[reply], label, hello))
        for reason in reasons:
            self.note(f"a device takes no part: {reason}")
        for members in kinds.values():
            self._open(members)
        if not self.runs:
            raise MeasurementError(
                "--on ray", "; ".join(reasons), "at least one device that can be measured"
            )
        return self.runs

    def _open(self, members: Sequence[Member]) -> None:
        """Opens the run of devices of one kind, and starts its parts."""
        _, first, hello = members[0]
        device = hello.device
        if self.resume is None:
            options = self.make_options(device)
        else:
            options = resumed_options(self.resume, self.resume_budget_s)
            wanted = read_run_info(self.resume).device.name
            if wanted != device.name or self.runs:
                self.note(f"{first} takes no part: it is a {device.name}, the run is of {wanted}")
                return
        if options.refine or options.shard:
            raise InputError(
                "--on ray",
                "--refine" if options.refine else "--shard",
                "a whole plan, known beforehand",
            )
        axes, plan = whole_plan(options, device)
        members = members[: len(plan.groups)]
        folder = self.resume
        if folder is None:
            info = new_run_info(hello, options, axes, self.results)
            with RunWriter.create(self.results, info) as writer:
                folder = writer.folder
        done = point_keys(records_to_keep(read_run(folder)))
        together_s = options.budget_s and options.budget_s * len(members)
        plan = plan_sweep(replace(options, budget_s=together_s), device, done)[1]
        run_writer = self._writer(folder, options.budget_s)
        labels = tuple(label for _, label, _ in members)
        run = ClusterRun(device, options, plan, folder, labels, len(done), run_writer)
        self.runs.append(run)
        for number, (actor, _, _) in enumerate(members, 1):
            part = Part(folder.name, device.name, options, number, len(members))
            run.parts[actor.measure.remote(part, run_writer)] = actor

    def watch(self, show: Callable[[Progress], None]) -> None:
        """Waits until every part has ended, and closes the runs. show: called with the progress of
        all runs.
        """
        how = "interrupted"
        try:
            while any(run.parts for run in self.runs):
                waiting = list(chain.from_iterable(run.parts for run in self.runs))
                ended, _ = self.ray.wait(waiting, timeout=_WATCH_S)
                for result in ended:
                    self._end_part(result)
                if not ended and not _present(self.ray.nodes(), self._resource):
                    lost = Finished("failed", f"no {self._resource} is left")
                    for run in self.runs:
                        run.endings += [lost] * len(run.parts)
                        run.parts.clear()
                show(self._progress())
            how = ""
        finally:
            for actor in self._actors:
                self.ray.kill(actor)
            for run in self.runs:
                self.ray.get(run.writer.end.remote(how or run.finished.how))

    def _end_part(self, result: Any) -> None:
        run = next(run for run in self.runs if result in run.parts)
        actor = run.parts.pop(result)
        try:
            run.endings.append(self.ray.get(result))
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, QuantbenchError):
                raise error.cause from None
            raise
        except self.ray.exceptions.RayError as error:
            run.endings.append(Finished("failed", _reason(error)))
            self.note(f"a device was lost: {_reason(error)}")
        self.ray.kill(actor)  # frees the device for a part whose own is gone

    def _progress(self) -> Progress:
        """Returns the progress of all runs, with the time left at the pace so far."""
        counts: Counter[str] = Counter()
        elapsed_s = 0.0
        for run in self.runs:
            of_run_s, of_run, notes = self.ray.get(run.writer.progress.remote())
            elapsed_s = max(elapsed_s, of_run_s)
            counts += of_run
            for text in notes:
                self.note(text)
        done = counts.total()
        total = max(done, sum(len(run.plan.points) for run in self.runs))
        left_s = None
        if done:
            left_s = elapsed_s / done * (total - done)
        return Progress(
            total,
            done,
            f"{sum(len(run.parts) for run in self.runs)} devices",
            elapsed_s,
            left_s,
            counts["Measured"],
            counts["Skipped"],
            counts["Failed"],
        )

    def _device_actor(self, core: int | None) -> Any:
        variables = relevant_environment()
        if "PYTHONPATH" in os.environ:
            variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
        for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):  # Ray sets them
            variables.pop(name, None)
        kind = self.ray.remote(DeviceActor).options(
            num_cpus=int(core is not None),
            num_gpus=int(core is None),
            runtime_env={"env_vars": variables},
            max_restarts=_RESTARTS,
            max_task_retries=_RESTARTS,
            scheduling_strategy="SPREAD",
        )
        return kind.remote(core)

    def _writer(self, folder: Path, budget_s: float | None) -> Any:
        """Starts the writer of a run on this machine, whose disk has the folder."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(
            self.ray.get_runtime_context().get_node_id(), soft=False
        )
        writer = self.ray.remote(Writer).options(num_cpus=0, scheduling_strategy=here)
        return writer.remote(folder.resolve(), budget_s)


def _present(nodes: Sequence[dict[str, Any]], resource: str) -> int:
    """Returns how many devices the nodes that are alive have; of CPUs one per node, since cores
    share caches.
    """
    total = 0
    for node in nodes:
        if node["Alive"]:
            count = int(node["Resources"].get(resource, 0))
            total += min(count, 1) if resource == "CPU" else count
    return total


def device_count(nodes: Sequence[dict[str, Any]], free: dict[str, float], resource: str) -> int:
    """Returns the number of devices to measure: GPUs, or one CPU of each node.

    Raises UnsupportedError at once if there is none, or none is free.
    """
    present = _present(nodes, resource)
    if not present:
        expected = "processors in it"
        if resource == "GPU":
            expected = f"GPUs in it, or {_VARIABLE}=cpu to measure processors"
        raise UnsupportedError(
            "--on ray", f"the cluster has no {resource} (nodes: {len(nodes)})", expected
        )
    count = min(present, int(free.get(resource, 0)))
    if not count:
        raise UnsupportedError(
            "--on ray", f"every {resource} of the cluster is in use", f"one {resource} at least"
        )
    return count


@contextmanager
def connected() -> Iterator[Any]:
    """Yields the module ray, connected to the cluster of RAY_ADDRESS or `ray start`, or else to a
    new one here.

    Raises InputError if ray is not installed, MeasurementError if the cluster does not answer.
    """
    wish = os.environ.get(_VARIABLE, "")
    if wish not in ("", "cpu", "cuda"):
        raise InputError(
            "--on ray", f"{_VARIABLE}={wish}", "every GPU of the cluster (unset), or cpu"
        )
    try:
        import ray
    except ImportError:
        raise InputError(
            "--on ray", "ray is not installed", "pip install '.[ray]' in quantbench's checkout"
        ) from None
    text = ""
    recorded = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if recorded.is_file():
        text = recorded.read_text(encoding="utf-8")
    address = cluster_address(os.environ.get("RAY_ADDRESS", ""), text.strip())
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False
        )
    except ConnectionError as error:
        raise MeasurementError(
            "--on ray", str(error).splitlines()[0], "a Ray cluster that answers"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _reason(error: Exception) -> str:
    r"""Extracts the cause from one of Ray's long error messages.

    >>> _reason(RuntimeError("The actor died.\n  It died because its node has died. Node Id: 93f5"))
    'its node has died'
    """
    cause = getattr(error, "cause", None)
    text = " ".join(str(cause or error).split())
    found = text.partition(" because ")[2] or text or type(error).__name__
    return found.partition(". ")[0].rstrip(".")[:200]


def cluster_address(wanted: str, recorded: str) -> str:
    """Returns the address of the Ray cluster. Asks it first, because Ray waits minutes for a
    cluster that is gone.

    wanted: value of RAY_ADDRESS, or "".
    recorded: address written by the last `ray start` on this machine, running or not.
    Raises MeasurementError if RAY_ADDRESS does not answer.
    """
    address = recorded if wanted in ("", "auto") else wanted
    if "://" in address or address == "local" or answers(address):
        return address
    if wanted:
        raise MeasurementError(
            "--on ray", f"RAY_ADDRESS={wanted} does not answer", "a Ray cluster that runs"
        )
    return "local"


def answers(address: str) -> bool:
    """Returns whether a server listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False
