"""Which kernel a point ran: asked from a second process (`NamesApart`), from a profiler in the worker, or not at all.

QUANTBENCH_KERNEL_NAMES selects the way: `apart` (default), `here` if a second process cannot have the device (compute
mode EXCLUSIVE_PROCESS), or `off` if names are not worth their time. A point never fails for want of a name.

The second process is this module: `python -m quantbench.sweep.naming READ_FD WRITE_FD`. torch.profiler attaches CUPTI
to its process for good, which slowed programs by 10 to 20 % after profiling had ended (pytorch/pytorch issue 144455),
and detaching it crashed CUDA graphs before CUDA 12.6 (pull request 112507). So the worker, which times and captures
graphs, never profiles: it sends the request here, waits, and goes on. While the worker times, this process holds
nothing on the device but its context.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from quantbench.errors import QuantbenchError, require_choice
from quantbench.launch import Launch
from quantbench.sweep.child import ChildProcess, WorkerLostError, context_lost, first_line, parent_pipes
from quantbench.sweep.messages import Reply, Request, reply_to_json, request_from_json

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec

VARIABLE = "QUANTBENCH_KERNEL_NAMES"
WAYS = ("apart", "here", "off")

#: Seconds to wait for a name; the first takes a context and the start of CUPTI. A point's own limit is this much longer
#: on a GPU, so that a measurement is never lost for want of a name.
LIMIT_S = 25.0
# Losses of the process after which it is not started again; each costs a start.
_MOST_LOST = 3


def chosen_way() -> str:
    """One of WAYS. Raises InputError for anything else in QUANTBENCH_KERNEL_NAMES."""
    return require_choice(VARIABLE, "value", os.environ.get(VARIABLE, "").strip().lower() or "apart", WAYS)


def start_server() -> ChildProcess:
    """Start the second process, which loads torch meanwhile."""
    return ChildProcess("quantbench.sweep.naming")


class NamesApart:
    """Asks the second process, which is started at once and restarted after a loss, up to three times."""

    def __init__(self, start: Callable[[], ChildProcess] = start_server) -> None:
        self._start = start
        self._server: ChildProcess | None = start()
        self._lost = 0

    def launch_of(self, request: Request) -> Launch | None:
        """The launch, or None if it cannot be determined."""
        if self._lost >= _MOST_LOST:
            return None
        if self._server is None:
            self._server = self._start()
        try:
            reply = self._server.ask(request, LIMIT_S, lambda: None)
        except WorkerLostError:
            reply = Reply(broken=True)
        if reply.broken:
            self._lost += 1
            self._server.close()
            self._server = None
        return reply.launch


def launch_of(request: Request, spec: DeviceSpec) -> Launch | None:
    """Prepare the point's work, run it under the profiler, free its memory.

    The inputs are zeros, which are made fastest: no library selects its kernel by the values.
    """
    import torch

    from quantbench.providers import catalog
    from quantbench.providers.identity import identify

    if spec.kind == "cuda":
        torch.cuda.empty_cache()  # memory of a request that failed
    task = catalog.make(request.provider).prepare(request.workload, spec, distribution="zeros")
    launch = task.launch() or identify(task.run, request.workload, spec)
    del task
    if spec.kind == "cuda":
        torch.cuda.empty_cache()
    return launch


def answer(request: Request, spec: DeviceSpec) -> Reply:
    """The launch, or why there is none. broken: the context is lost and this process must end."""
    try:
        return Reply(launch=launch_of(request, spec))
    except (QuantbenchError, MemoryError, RuntimeError) as error:
        return Reply(failed=("error", first_line(error)), broken=context_lost(error))


def main() -> None:
    """Load torch while the first point is timed; make a context only for the first request."""
    import torch  # noqa: F401

    spec: DeviceSpec | None = None
    with parent_pipes() as (requests, send):
        for request in requests:
            if spec is None:
                from quantbench import device

                spec = device.current()
            reply = answer(request_from_json(request), spec)
            send(reply_to_json(reply))
            if reply.broken:
                return


if __name__ == "__main__":
    main()
