"""The devices of a Ray cluster, one actor each. All that knows of Ray stands here."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantbench.cluster.agent import DeviceAgent, introduction_from_text, reply_from_text
from quantbench.cluster.members import DeviceLostError, Host, Tick
from quantbench.errors import InputError, MeasurementError, UnsupportedError
from quantbench.store.environment import relevant_environment
from quantbench.sweep.child import WorkerLostError
from quantbench.sweep.messages import Reply, Request, request_to_json, timing_to_json
from quantbench.timing.options import TimingOptions

VARIABLE = "QUANTBENCH_DEVICE"
# Importing torch from a cold network disk takes a minute, starting an actor a few seconds; a GPU that another job
# holds is not given out at all.
_START_LIMIT_S = 300.0
# Beside what a point may take: the worker that it needs may have to be started first.
_ANSWER_MARGIN_S = 60.0
_POLL_S = 0.25
_PROBE_S = 3.0


class RayPool:
    """A connection to the cluster that RAY_ADDRESS or `ray start` names, or else a Ray of this machine alone.

    Use as a context manager. Raises InputError where ray is not installed, UnsupportedError where nothing in the
    cluster can be measured: that is looked up, never waited for.
    """

    def __init__(self) -> None:
        self._ray = _import_ray()
        self._started = not self._ray.is_initialized()
        if self._started:
            address = cluster_address(os.environ.get("RAY_ADDRESS", ""), _recorded_address(), answers)
            try:
                self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
            except ConnectionError as error:
                raise MeasurementError("--on ray", str(error).splitlines()[0], "a Ray cluster that answers") from None
        self._hosts: list[_RayHost] = []

    def hosts(self) -> tuple[Host, ...]:
        """Every device: each GPU of each node or, with QUANTBENCH_DEVICE=cpu, one core of each node."""
        on_cpu = _wants_cpu()
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        resource = "CPU" if on_cpu else "GPU"
        if not sum(node["Resources"].get(resource, 0) for node in nodes):
            raise UnsupportedError(
                "--on ray",
                f"the cluster has no {resource} (nodes: {len(nodes)})",
                "processors in it" if on_cpu else f"GPUs in it, or {VARIABLE}=cpu to measure its processors",
            )
        free = self._ray.available_resources().get(resource, 0)
        if free < 1:
            raise UnsupportedError("--on ray", f"every {resource} of the cluster is in use", f"one {resource} at least")
        numbers: Counter[str] = Counter()
        for node in sorted(nodes, key=lambda n: (n["NodeManagerHostname"], n["NodeID"])):
            machine = node["NodeManagerHostname"]
            there = int(node["Resources"].get(resource, 0))
            # One core a node: the others share its caches and its memory, and would be in each other's way.
            for _ in range(min(there, 1) if on_cpu else there):
                self._hosts.append(_RayHost(self._ray, node["NodeID"], machine, numbers[machine], on_cpu=on_cpu))
                numbers[machine] += 1
        return tuple(self._hosts)

    def close(self) -> None:
        """End every actor, and Ray itself where it was started here."""
        for host in self._hosts:
            host.close()
        if self._started:
            self._ray.shutdown()

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _RayHost:
    """One device of one node."""

    def __init__(self, ray: Any, node_id: str, machine: str, number: int, *, on_cpu: bool) -> None:
        self.name = f"{'CPU' if on_cpu else 'GPU'} {number} on {machine}"
        self._ray = ray
        self._node_id = node_id
        self._number = number
        self._on_cpu = on_cpu
        self._actor: Any = None

    def connect(self, tick: Tick) -> _RayWorker:
        """A fresh actor on the same node, and in it a fresh worker. Raises DeviceLostError."""
        self.close()
        if not any(node["NodeID"] == self._node_id and node["Alive"] for node in self._ray.nodes()):
            raise DeviceLostError(self.name, "its node has left the cluster")
        self._actor = _remote_agent(self._ray, self._node_id, self._number if self._on_cpu else None)
        text = _answer(self._ray, self._actor.introduce.remote(), _START_LIMIT_S, tick, self.name)
        try:
            told = introduction_from_text(text)
        except MeasurementError as error:
            raise DeviceLostError(self.name, error.value) from None
        return _RayWorker(self._ray, self._actor, told.label, told.hello)

    def close(self) -> None:
        if self._actor is not None:
            self._ray.kill(self._actor)
            self._actor = None


class _RayWorker:
    """The worker process behind an actor; answers as one on this machine would."""

    def __init__(self, ray: Any, actor: Any, label: str, hello: Any) -> None:
        self.label = label
        self.hello = hello
        self._ray = ray
        self._actor = actor
        self._timing = ""

    def begin(self, timing: TimingOptions) -> None:
        """Timing goes with each request: a worker that is replaced over there must learn it again."""
        self._timing = json.dumps(timing_to_json(timing))

    def ask(self, request: Request, limit_s: float, tick: Tick) -> Reply:
        """Run one point. Raises WorkerLostError when its worker process died, DeviceLostError when all of it did."""
        asked = self._actor.ask.remote(self._timing, json.dumps(request_to_json(request)), limit_s)
        text = _answer(self._ray, asked, limit_s + _START_LIMIT_S + _ANSWER_MARGIN_S, tick, self.label)
        try:
            return reply_from_text(text)
        except WorkerLostError:
            raise
        except MeasurementError as error:
            raise DeviceLostError(self.label, error.value) from None

    def close(self) -> None:
        self._ray.kill(self._actor)


def _remote_agent(ray: Any, node_id: str, core: int | None) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class RayAgent(DeviceAgent):
        def gpu_number(self) -> str | None:
            import ray

            numbers = ray.get_gpu_ids()
            return str(numbers[0]) if numbers else None

    variables = {
        k: v for k, v in relevant_environment().items() if k not in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    }
    if "PYTHONPATH" in os.environ:
        variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return (
        ray.remote(RayAgent)
        .options(
            num_cpus=0 if core is None else 1,
            num_gpus=1 if core is None else 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env={"env_vars": variables},
        )
        .remote(core)
    )


def _answer(ray: Any, asked: Any, limit_s: float, tick: Tick, who: str) -> str:
    """Wait for an actor's answer, with a sign of life now and then. Raises DeviceLostError."""
    deadline_s = time.monotonic() + limit_s
    while not ray.wait([asked], timeout=_POLL_S)[0]:
        tick()
        if time.monotonic() > deadline_s:
            raise DeviceLostError(who, f"no answer within {limit_s:.0f} s")
    try:
        return str(ray.get(asked))
    except ray.exceptions.RayError as error:
        raise DeviceLostError(who, _reason(error)) from None


def _reason(error: Exception) -> str:
    r"""Ray explains itself over many lines; what it says the cause is, in a few words.

    >>> _reason(RuntimeError("The actor died.\n  The actor died because its node has died. Node Id: 93f5"))
    'its node has died'
    """
    text = " ".join(str(error).split())
    cause = text.partition(" because ")[2] or text or type(error).__name__
    return cause.partition(". ")[0].rstrip(".")[:200]


def cluster_address(wanted: str, recorded: str, answers: Callable[[str], bool]) -> str:
    """Where to find Ray: what RAY_ADDRESS says (`wanted`), else what `ray start` left on this machine (`recorded`), if
    it still answers, else `local`. Ray itself would wait for minutes for a cluster that is gone.

    Raises MeasurementError for a RAY_ADDRESS that does not answer.
    """
    if wanted in ("", "auto"):
        if recorded and answers(recorded):
            return recorded
        if wanted:
            raise MeasurementError("--on ray", f"RAY_ADDRESS={wanted}, and no Ray runs here", "`ray start` before it")
        return "local"
    if "://" not in wanted and wanted != "local" and not answers(wanted):
        raise MeasurementError("--on ray", f"RAY_ADDRESS={wanted} does not answer", "a Ray cluster that runs")
    return wanted


def answers(address: str) -> bool:
    """Whether somebody listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _recorded_address() -> str:
    """What the last `ray start` on this machine noted, running or not; "" where there was none."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError("--on ray", "ray is not installed", "pip install 'quantbench[ray]'") from None
    return ray


def _wants_cpu() -> bool:
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "cpu", "cuda"):
        raise InputError("--on ray", f"{VARIABLE}={wanted}", "every GPU of the cluster (unset), or cpu")
    return wanted == "cpu"
