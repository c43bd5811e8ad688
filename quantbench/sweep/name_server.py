"""The process that names kernels: `python -m quantbench.sweep.name_server READ_FD WRITE_FD`. It times nothing.

torch.profiler attaches CUPTI to its process and leaves it there, which slowed programs by 10 to 20 % after profiling
had ended (pytorch/pytorch issue 144455); detaching it crashed CUDA graphs before CUDA 12.6 (pull request 112507). So
the worker, which times and captures graphs, never profiles: it sends the request here, waits, and goes on. While it
times, this process has nothing on the device but its context.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from quantbench.errors import QuantbenchError
from quantbench.sweep.messages import Reply, Request, reply_to_json, request_from_json
from quantbench.sweep.worker import context_lost, die_with_parent, first_line

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.launch import Launch


def launch_of(request: Request, spec: DeviceSpec) -> Launch | None:
    """Make the point's work once more, run it under the profiler, let go of its memory.

    The inputs are zeros, which are made fastest: no library chooses its kernel by what the numbers are.
    """
    import torch

    from quantbench.providers import catalog
    from quantbench.providers.identity import identify

    if spec.kind == "cuda":
        torch.cuda.empty_cache()  # what a request that failed has left
    task = catalog.make(request.provider).prepare(request.workload, spec, distribution="zeros")
    launch = task.launch() or identify(task.run, request.workload, spec)
    del task
    if spec.kind == "cuda":
        torch.cuda.empty_cache()
    return launch


def answer(request: Request, spec: DeviceSpec) -> Reply:
    """The launch, or why there is none. broken: the context is lost, and this process is of no more use."""
    try:
        return Reply(launch=launch_of(request, spec))
    except (QuantbenchError, MemoryError, RuntimeError) as error:
        return Reply(failed=("error", first_line(error)), broken=context_lost(error))


def main() -> None:
    """Load torch while the first point is being timed, and make a context only when first asked."""
    import torch  # noqa: F401

    read_fd, write_fd = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent()
    spec: DeviceSpec | None = None
    with os.fdopen(read_fd, encoding="utf-8") as requests, os.fdopen(write_fd, "w", encoding="utf-8") as replies:
        for line in requests:
            if spec is None:
                from quantbench import device

                spec = device.current()
            reply = answer(request_from_json(json.loads(line)), spec)
            replies.write(json.dumps(reply_to_json(reply)) + "\n")
            replies.flush()
            if reply.broken:
                return


if __name__ == "__main__":
    main()
