"""Connects `sweep --on ray` to a Ray cluster: one actor and one worker process per device.

Entry point: `RayPool`, which connects to the cluster and lists its devices. Used by the command `sweep`. Each actor is
a `DeviceAgent`, which starts the worker process, forwards requests and replaces a worker that died. Only JSON text
crosses the network.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantbench.cluster.lane import DeviceLostError, Host, Tick
from quantbench.errors import InputError, MeasurementError, UnsupportedError
from quantbench.store.environment import relevant_environment
from quantbench.store.typed import decode, encode
from quantbench.sweep.child import Asked, WorkerLostError, WorkerProcess, refusal
from quantbench.sweep.messages import Hello, Reply, Request, reply_from_json
from quantbench.timing.options import TimingOptions

_VARIABLE = "QUANTBENCH_DEVICE"
# Importing torch from a cold network disk takes a minute, starting an actor a few seconds. The limit also ends the wait
# for a GPU that another job holds.
_START_LIMIT_S = 300.0
# Added to the limit of a point, with _START_LIMIT_S, because its worker may have to be started first.
_ANSWER_MARGIN_S = 60.0
_POLL_S = 0.25
_PROBE_S = 3.0


class DeviceAgent:
    """Actor of one device. Requests and answers are JSON; `introduction_from_text` and `reply_from_text` parse answers.

    core: index of the CPU core to bind to, counted from the last allowed core; None on a GPU.
    """

    def __init__(self, core: int | None = None) -> None:
        self._core = core
        self._worker: Asked | None = None
        self._begun = False
        if core is not None and hasattr(os, "sched_setaffinity"):
            allowed = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {allowed[-1 - core % len(allowed)]})

    def introduce(self) -> str:
        """Starts the worker. Returns JSON {label, hello}, or {refused: reason} if no device can be measured."""
        try:
            worker = self._running()
        except (MeasurementError, InputError) as error:
            return json.dumps({"refused": str(error)})
        number = self.gpu_number()
        device = f"CPU {self._core or 0}" if number is None else f"GPU {number}"
        return json.dumps({"label": f"{device} on {socket.gethostname()}", "hello": encode(worker.hello)})

    def ask(self, timing: str, request: str, limit_s: float) -> str:
        """Runs one point. Returns JSON {reply}, {lost: [kind, message]} if the worker died, or {refused: reason}.

        timing, request: JSON of `TimingOptions` and `Request`.
        """
        try:
            worker = self._running()
            if not self._begun:
                worker.begin(decode(TimingOptions, json.loads(timing)))
                self._begun = True
            reply = worker.ask(decode(Request, json.loads(request)), limit_s, lambda: None)
        except MeasurementError as error:
            self._end()
            if isinstance(error, WorkerLostError):
                return json.dumps({"lost": [error.kind, error.message]})
            return json.dumps({"refused": str(error)})
        if reply.broken:
            self._end()
        return json.dumps({"reply": encode(reply)})

    def gpu_number(self) -> str | None:
        """Returns the index of the GPU on its node; None on a CPU."""
        return None

    def _running(self) -> Asked:
        if self._worker is None:
            self._begun = False
            self._worker = WorkerProcess()
        return self._worker

    def _end(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def introduction_from_text(text: str) -> tuple[str, Hello]:
    """Parses the answer of `introduce` to (label, hello). Raises MeasurementError with the reason if it refused."""
    data = json.loads(text)
    if "refused" in data:
        raise refusal("device", data["refused"])
    return data["label"], decode(Hello, data["hello"])


def reply_from_text(text: str) -> Reply:
    """Parses the answer of `ask`. Raises WorkerLostError if the worker died, MeasurementError if none could start."""
    data = json.loads(text)
    if "lost" in data:
        raise WorkerLostError(*data["lost"])
    if "refused" in data:
        raise refusal("device", data["refused"])
    return reply_from_json(data["reply"])


class RayPool:
    """Connection to the Ray cluster of RAY_ADDRESS or `ray start`, or else to a new Ray instance on this machine.

    Use as a context manager. Raises InputError if ray is not installed, MeasurementError if it does not answer.
    """

    def __init__(self) -> None:
        try:
            import ray
        except ImportError:
            raise InputError("--on ray", "ray is not installed", "pip install 'quantbench[ray]'") from None
        self._ray: Any = ray
        self._started = not self._ray.is_initialized()
        if self._started:
            address = cluster_address(os.environ.get("RAY_ADDRESS", ""), _recorded_address(), answers)
            try:
                self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
            except ConnectionError as error:
                raise MeasurementError("--on ray", str(error).splitlines()[0], "a Ray cluster that answers") from None
        self._hosts: list[_RayDevice] = []

    def hosts(self) -> tuple[Host, ...]:
        """Lists every device: each GPU of each node or, with QUANTBENCH_DEVICE=cpu, one core of each node.

        Raises UnsupportedError if there is no device or all are in use (checked immediately, without waiting for a
        device to become free), InputError for another value of QUANTBENCH_DEVICE.
        """
        wanted = os.environ.get(_VARIABLE, "")
        if wanted not in ("", "cpu", "cuda"):
            raise InputError("--on ray", f"{_VARIABLE}={wanted}", "every GPU of the cluster (unset), or cpu")
        on_cpu = wanted == "cpu"
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        resource = "CPU" if on_cpu else "GPU"
        if not sum(node["Resources"].get(resource, 0) for node in nodes):
            expected = "processors in it" if on_cpu else f"GPUs in it, or {_VARIABLE}=cpu to measure its processors"
            raise UnsupportedError("--on ray", f"the cluster has no {resource} (nodes: {len(nodes)})", expected)
        if self._ray.available_resources().get(resource, 0) < 1:
            raise UnsupportedError("--on ray", f"every {resource} of the cluster is in use", f"one {resource} at least")
        numbers: Counter[str] = Counter()
        for node in sorted(nodes, key=lambda n: (n["NodeManagerHostname"], n["NodeID"])):
            machine = node["NodeManagerHostname"]
            there = int(node["Resources"].get(resource, 0))
            # One core per node: the others share its caches and memory and would disturb each other.
            for _ in range(min(there, 1) if on_cpu else there):
                self._hosts.append(_RayDevice(self._ray, node["NodeID"], machine, numbers[machine], on_cpu=on_cpu))
                numbers[machine] += 1
        return tuple(self._hosts)

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends every actor, and Ray itself if it was started here."""
        for host in self._hosts:
            host.close()
        if self._started:
            self._ray.shutdown()


class _RayDevice:
    """One device of one node; implements `Host`, and `ClusterWorker` by forwarding requests to the actor."""

    label: str
    hello: Hello

    def __init__(self, ray: Any, node_id: str, machine: str, number: int, *, on_cpu: bool) -> None:
        self.name = f"{'CPU' if on_cpu else 'GPU'} {number} on {machine}"
        self._ray = ray
        self._node_id = node_id
        self._core = number if on_cpu else None
        self._actor: Any = None
        self._timing = ""

    def connect(self, tick: Tick) -> _RayDevice:
        """Starts a new actor on the same node, and in it a new worker. Raises DeviceLostError."""
        self.close()
        if not any(node["NodeID"] == self._node_id and node["Alive"] for node in self._ray.nodes()):
            raise DeviceLostError(self.name, "its node has left the cluster")
        self._actor = _remote_agent(self._ray, self._node_id, self._core)
        text = self._answer(self._actor.introduce.remote(), _START_LIMIT_S, tick)
        try:
            self.label, self.hello = introduction_from_text(text)
        except MeasurementError as error:
            raise DeviceLostError(self.name, error.value) from None
        return self

    def begin(self, timing: TimingOptions) -> None:
        """Stores the timing options, which are sent with each request because the agent may replace the worker."""
        self._timing = json.dumps(encode(timing))

    def ask(self, request: Request, limit_s: float, tick: Tick) -> Reply:
        """Runs one point. Raises WorkerLostError if the worker process died, DeviceLostError if the actor died."""
        asked = self._actor.ask.remote(self._timing, json.dumps(encode(request)), limit_s)
        text = self._answer(asked, limit_s + _START_LIMIT_S + _ANSWER_MARGIN_S, tick)
        try:
            return reply_from_text(text)
        except WorkerLostError:
            raise
        except MeasurementError as error:
            raise DeviceLostError(self.label, error.value) from None

    def _answer(self, asked: Any, limit_s: float, tick: Tick) -> str:
        """Waits for the actor's answer, calling `tick` meanwhile. Raises DeviceLostError."""
        deadline_s = time.monotonic() + limit_s
        while not self._ray.wait([asked], timeout=_POLL_S)[0]:
            tick()
            if time.monotonic() > deadline_s:
                raise DeviceLostError(self.name, f"no answer within {limit_s:.0f} s")
        try:
            return str(self._ray.get(asked))
        except self._ray.exceptions.RayError as error:
            raise DeviceLostError(self.name, _reason(error)) from None

    def close(self) -> None:
        if self._actor is not None:
            self._ray.kill(self._actor)
            self._actor = None


def _remote_agent(ray: Any, node_id: str, core: int | None) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class RayAgent(DeviceAgent):
        def gpu_number(self) -> str | None:
            import ray

            numbers = ray.get_gpu_ids()
            return str(numbers[0]) if numbers else None

    variables = relevant_environment() | {k: v for k, v in os.environ.items() if k == "PYTHONPATH"}
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):  # Ray sets them
        variables.pop(name, None)
    actor = ray.remote(RayAgent).options(
        num_cpus=int(core is not None), num_gpus=int(core is None), runtime_env={"env_vars": variables},
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )  # fmt: skip
    return actor.remote(core)


def _reason(error: Exception) -> str:
    r"""Extracts the cause from one of Ray's long error messages.

    >>> _reason(RuntimeError("The actor died.\n  The actor died because its node has died. Node Id: 93f5"))
    'its node has died'
    """
    text = " ".join(str(error).split())
    cause = text.partition(" because ")[2] or text or type(error).__name__
    return cause.partition(". ")[0].rstrip(".")[:200]


def cluster_address(wanted: str, recorded: str, answers: Callable[[str], bool]) -> str:
    """Returns the address of the Ray cluster. Checks it first, because Ray waits minutes for a cluster that is gone.

    wanted: value of RAY_ADDRESS, or "".
    recorded: address written by `ray start` on this machine; used if it still answers, else the result is `local`.
    answers: function that returns whether a server listens at an address.
    Raises MeasurementError if RAY_ADDRESS does not answer.
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
    """Returns whether a server listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _recorded_address() -> str:
    """Returns the address written by the last `ray start` on this machine, running or not; "" if there is none."""
    file = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
