"""Compiles the Triton kernels of a plan in parallel processes, before timing starts.

Entry points: `compile_kernels`, used by the command `sweep`. `main` is the process that it starts, `python
-m quantbench.sweep.compiling FD`. That process lists the kernels on tensors without memory, and forks one process for
each core to compile them into triton's cache on disk, where the worker finds them. None of them uses the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from quantbench.device.spec import DeviceSpec
from quantbench.errors import QuantbenchError
from quantbench.store.environment import relevant_environment
from quantbench.store.typed import decode, encode
from quantbench.sweep.child import ChildProcess, WorkerLostError, parent_pipe
from quantbench.sweep.messages import Request
from quantbench.sweep.plan import PlanPoint
from quantbench.units import duration

_MOST_PROCESSES = 12
# For fewer points the start of the process, which imports torch, takes longer than it saves.
_FEWEST_POINTS = 4
# Most seconds for listing the kernels, and for the next one to be compiled; then the worker compiles the rest.
_LIMIT_S = 120.0


def compile_kernels(points: Sequence[PlanPoint], spec: DeviceSpec, show: Callable[[int, int, str], None]) -> str:
    """Compiles what the plan's points by our own Triton kernels need, unless they are few. Returns what was done, as
    text; "" if nothing.

    show: function called with the number of compiled kernels, of all kernels, and a text.
    """
    wanted = {(p.workload, p.provider): None for p in points if p.provider.startswith("triton.")}
    interpreter = relevant_environment().get("TRITON_INTERPRET") == "1"
    if len(wanted) < _FEWEST_POINTS or spec.compute_capability is None or interpreter:
        return ""
    show(0, 0, "listing the kernels to compile")
    start_s = time.monotonic()
    compiled, kernels, processes = 0, 0, 0
    with suppress(WorkerLostError), ChildProcess("quantbench.sweep.compiling") as compiler:
        for message in (spec, *(Request(workload, provider) for workload, provider in wanted)):
            compiler.send(encode(message))
        compiler.send({})
        numbers = compiler.receive(_LIMIT_S)
        kernels, processes = numbers["kernels"], numbers["processes"]
        while compiled < kernels:
            show(compiled, kernels, f"compiling {kernels} kernels in {processes} processes")
            compiled = compiler.receive(_LIMIT_S)["compiled"]
    if not kernels:
        return ""
    rest = "" if compiled == kernels else "; the rest is compiled while measuring"
    took = duration(time.monotonic() - start_s)
    return f"compiled {compiled} of {kernels} kernels in {processes} processes in {took}{rest}"


_kernels: list[Callable[[], object]] = []  # of this process, and of those that it forks


def _compile(number: int) -> None:
    with suppress(Exception):  # whatever a compiler raises, the worker's point will tell
        _kernels[number]()


def list_kernels(requests: Sequence[Request], spec: DeviceSpec) -> dict[str, Callable[[], object]]:
    """Returns what compiles each kernel that the requests need on a GPU, which need not be present."""
    from quantbench.kernels.launching import Gpu, collect
    from quantbench.providers import catalog
    from quantbench.providers.inputs import MetaInputs
    from quantbench.providers.tasks import BuiltInProvider

    assert spec.compute_capability is not None

    def prepare() -> None:
        for request in requests:
            provider = catalog.make(request.provider)
            assert isinstance(provider, BuiltInProvider)
            if provider.unsupported(request.workload, spec) is None:
                with suppress(QuantbenchError):
                    provider.task(request.workload, spec, MetaInputs())

    found: dict[str, Callable[[], object]] = collect(
        Gpu(spec.compute_capability, spec.sm_count, spec.l2_bytes), prepare
    )
    return found


def main() -> None:
    """Receives the points, and compiles their kernels in as many processes as there are cores."""
    with parent_pipe() as (messages, send):
        spec = decode(DeviceSpec, next(messages))
        requests = [decode(Request, message) for message in iter(lambda: next(messages), {})]
        _kernels.extend(list_kernels(requests, spec).values())
        processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)), max(1, len(_kernels)))
        send({"kernels": len(_kernels), "processes": processes})
        # Forked, so that torch is imported and the kernels are listed once.
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            for compiled, _ in enumerate(pool.imap_unordered(_compile, range(len(_kernels))), 1):
                send({"compiled": compiled})


if __name__ == "__main__":
    main()
