"""How the worker learns which kernel ran: from a process of its own, from a profiler in its own process, or not at all.

QUANTBENCH_KERNEL_NAMES chooses: `apart` (the default), `here` where a second process cannot have the device (compute
mode EXCLUSIVE_PROCESS), `off` where names are not worth their time. A point never fails for want of a name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from quantbench.errors import require_choice
from quantbench.launch import Launch
from quantbench.sweep.child import ChildProcess, WorkerLostError
from quantbench.sweep.messages import Reply, Request

VARIABLE = "QUANTBENCH_KERNEL_NAMES"
WAYS = ("apart", "here", "off")

#: How long a name is waited for; the first takes a context and CUPTI's start, seconds. A point's own limit is this much
#: longer on a GPU, so that a measurement is never lost for want of a name.
LIMIT_S = 25.0
# A process that is lost so often will be lost again, and each time costs its start.
_MOST_LOST = 3


class Server(Protocol):
    """Somebody who names kernels: the process, or a test's stand-in."""

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        """The reply; its launch is the answer. Raises WorkerLostError."""

    def close(self) -> None:
        """End it, at once."""


def chosen_way() -> str:
    """One of WAYS. Raises InputError for anything else in QUANTBENCH_KERNEL_NAMES."""
    return require_choice(VARIABLE, "value", os.environ.get(VARIABLE, "").strip().lower() or "apart", WAYS)


def start_server() -> ChildProcess:
    """The process, which loads torch while the caller goes on."""
    return ChildProcess("quantbench.sweep.name_server")


class NamesApart:
    """Asks a server, which is started at once, and again after it was lost; after too many losses nobody is asked."""

    def __init__(self, start: Callable[[], Server] = start_server) -> None:
        self._start = start
        self._server: Server | None = start()
        self._lost = 0

    def launch_of(self, request: Request) -> Launch | None:
        """The launch, or None where it could not be told."""
        if self._lost >= _MOST_LOST:
            return None
        if self._server is None:
            self._server = self._start()
        try:
            reply = self._server.ask(request, LIMIT_S, lambda: None)
        except WorkerLostError:
            self._lose()
            return None
        if reply.broken:
            self._lose()
        return reply.launch

    def _lose(self) -> None:
        self._lost += 1
        if self._server is not None:
            self._server.close()
            self._server = None
