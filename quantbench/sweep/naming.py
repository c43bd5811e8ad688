"""Identifies the kernel that a point ran, by default with torch.profiler in a second process.

The worker, which times the points, asks for the kernel of each point through
`KernelIdentityClient`. The environment variable QUANTBENCH_KERNEL_NAMES selects where the profiler
runs: `apart` (in the second process), `here` (in the worker) or `off` (nowhere). A point never
fails because its kernel could not be identified.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from quantbench.errors import QuantbenchError, require_choice
from quantbench.launch import Launch
from quantbench.reasons import reason_line
from quantbench.store.typed import decode, encode
from quantbench.sweep.child import ChildProcess, WorkerLostError, context_lost, parent_pipe
from quantbench.sweep.messages import Reply, Request

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec

VARIABLE = "QUANTBENCH_KERNEL_NAMES"
# torch.profiler attaches CUPTI to its process for good. An attached CUPTI slowed programs by 10 to
# 20 % after profiling had ended (pytorch/pytorch issue 144455), and detaching CUPTI crashed CUDA
# graphs before CUDA 12.6 (pull request 112507). The worker captures and times graphs, so it asks a
# second process for the kernel and waits.
_WAYS = ("apart", "here", "off")

#: longest time to wait for the identification of a kernel, in s. The first request also creates a
#: context and starts CUPTI. On a GPU the sweep extends each point's time limit by this time, so
#: that a slow identification never costs a measurement.
LIMIT_S = 25.0
# Number of times that the second process may die or hang. After that, it is not started again,
# because each start takes time.
_MAX_LOSSES = 3


def profiler_location(*, exclusive: bool = False) -> str:
    """Returns the value of QUANTBENCH_KERNEL_NAMES (`apart`, `here` or `off`).

    exclusive: whether only one process may use the device. The default is then `off`, because a
        second process could not use the device, and a profiler in the worker would slow the timed
        runs.
    Raises InputError for any other value.
    """
    way = os.environ.get(VARIABLE, "").strip().lower()
    if not way:
        way = "off" if exclusive else "apart"
    return require_choice(VARIABLE, "value", way, _WAYS)


def start_server() -> ChildProcess:
    """Starts the second process, which loads torch in the background."""
    return ChildProcess("quantbench.sweep.naming")


class KernelIdentityClient:
    """Identifies kernels in a second process, which it starts.

    The process is started at once. If it dies, hangs or loses its GPU context, the next request
    starts it again, at most twice.
    """

    def __init__(self, start: Callable[[], ChildProcess] = start_server) -> None:
        self._start = start
        self._server: ChildProcess | None = start()
        self._lost = 0

    def launch_of(self, request: Request) -> Launch | None:
        """Returns the launch of a point's kernel; None if it cannot be determined."""
        if self._lost >= _MAX_LOSSES:
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
    """Returns the launch of a point's kernel; None if it is unknown.

    The provider may report the launch itself. Otherwise the point runs under the profiler. The
    inputs are zeros, which are the fastest to create. Zeros suffice, because no library selects a
    kernel by the values of its inputs. The memory is freed afterwards.
    """
    import torch

    from quantbench.providers import catalog
    from quantbench.providers.identity import identify

    if spec.kind == "cuda":
        torch.cuda.empty_cache()  # frees the memory of a request that failed
    task = catalog.make(request.provider).prepare(request.workload, spec, distribution="zeros")
    launch = task.launch() or identify(task.run, request.workload, spec)
    del task
    if spec.kind == "cuda":
        torch.cuda.empty_cache()
    return launch


def answer(request: Request, spec: DeviceSpec) -> Reply:
    """Returns a reply with the point's launch or with an error.

    The reply is `broken` if the GPU context is lost. This process must then end.
    """
    try:
        return Reply(launch=launch_of(request, spec))
    except Exception as error:  # noqa: BLE001 - other people's code
        return Reply(failed=("error", reason_line(error)), broken=context_lost(error))


def main() -> None:
    """Identifies a kernel for each request until the pipe closes or the GPU context is lost.

    torch is loaded at once, while the worker times the first point. A GPU context is created only
    at the first request.
    """
    import torch  # noqa: F401

    from quantbench.device import current

    spec: DeviceSpec | None = None
    with parent_pipe() as (requests, send):
        for request in requests:
            try:
                spec = spec or current()
            # An error is possible here, for example if the worker has exclusive use of the device.
            except (QuantbenchError, RuntimeError) as error:
                send(encode(Reply(failed=("error", str(error)), broken=True)))
                return
            reply = answer(decode(Request, request), spec)
            send(encode(reply))
            if reply.broken:
                return


if __name__ == "__main__":
    main()
