"""What runs beside each device: it starts the device's worker process, asks it and replaces it when it dies.

Ray calls it from afar with text and gets text (JSON), so that nothing but strings crosses the network.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass

from quantbench.errors import InputError, MeasurementError
from quantbench.sweep.child import Asked, WorkerLostError, WorkerProcess, refusal
from quantbench.sweep.messages import (
    Hello,
    Reply,
    hello_from_json,
    hello_to_json,
    reply_from_json,
    reply_to_json,
    request_from_json,
    timing_from_json,
)


@dataclass(frozen=True)
class Introduction:
    """An agent's first words. label: `GPU 5 on node3`; the device as its worker found it."""

    label: str
    hello: Hello


class DeviceAgent:
    """One device's. core: for a processor, which of the allowed cores the worker is held to, counted from the last;
    None on a GPU."""

    def __init__(self, core: int | None = None) -> None:
        self._core = core
        self._worker: Asked | None = None
        self._begun = False
        if core is not None and hasattr(os, "sched_setaffinity"):
            allowed = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {allowed[-1 - core % len(allowed)]})

    def introduce(self) -> str:
        """Start the worker. {label, hello}, or {refused} where there is no device that can be measured."""
        try:
            worker = self._running()
        except (MeasurementError, InputError) as error:
            return json.dumps({"refused": str(error)})
        return json.dumps({"label": self.label(), "hello": hello_to_json(worker.hello)})

    def ask(self, timing: str, request: str, limit_s: float) -> str:
        """Run one point: {reply}, {lost: [kind, message]} when the worker died over it, {refused} when none starts."""
        try:
            worker = self._running()
            if not self._begun:
                worker.begin(timing_from_json(json.loads(timing)))
                self._begun = True
            reply = worker.ask(request_from_json(json.loads(request)), limit_s, lambda: None)
        except WorkerLostError as lost:
            self._end()
            return json.dumps({"lost": [lost.kind, lost.message]})
        except MeasurementError as error:
            self._end()
            return json.dumps({"refused": str(error)})
        if reply.broken:
            self._end()
        return json.dumps({"reply": reply_to_json(reply)})

    def label(self) -> str:
        """The device and its machine, for people."""
        number = self.gpu_number()
        device = f"GPU {number}" if number is not None else f"CPU {self._core or 0}"
        return f"{device} on {socket.gethostname()}"

    def gpu_number(self) -> str | None:
        """Which of the machine's GPUs this is; None on a processor. Known to whoever hands the GPUs out."""
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


def introduction_from_text(text: str) -> Introduction:
    """What `introduce` said. Raises MeasurementError with the agent's reason where it was refused."""
    data = json.loads(text)
    if "refused" in data:
        raise refusal("device", data["refused"])
    return Introduction(data["label"], hello_from_json(data["hello"]))


def reply_from_text(text: str) -> Reply:
    """What `ask` said. Raises WorkerLostError where the worker was lost, MeasurementError where none starts."""
    data = json.loads(text)
    if "lost" in data:
        raise WorkerLostError(*data["lost"])
    if "refused" in data:
        raise refusal("device", data["refused"])
    try:
        return reply_from_json(data["reply"])
    except InputError as error:
        return Reply(failed=("error", str(error)))
