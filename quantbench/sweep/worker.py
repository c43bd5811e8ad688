"""Measures points in a separate process, which the sweep starts as `python -m …worker`.

Any error that torch, CUDA or a provider raises becomes the outcome of the point. After a crash, a
hang or a lost CUDA context, the sweep starts a new worker process. If a worker cannot use its
device, it sends the reason, and the sweep ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quantbench.errors import InputError, MeasurementError, QuantbenchError, UnsupportedError
from quantbench.launch import Launch
from quantbench.reasons import reason_line
from quantbench.store.typed import decode, encode
from quantbench.sweep import naming
from quantbench.sweep.child import context_lost, parent_pipe
from quantbench.sweep.messages import Hello, Reply, Request
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import Run
from quantbench.units import size
from quantbench.workload import Workload

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.providers.audit import Audit
    from quantbench.providers.base import Provider
    from quantbench.timing.session import Timer

_TASK_METHODS = ("run", "outputs", "launch")


@dataclass
class Worker:
    """Runs requests one after another, with one timer.

    name: function that identifies the kernel of a point; it returns None if the kernel is unknown.
    """

    spec: DeviceSpec
    timer: Timer
    timing: TimingOptions
    name: Callable[[Request], Launch | None]
    _phases_s: dict[str, float] = field(default_factory=dict)

    def run(self, request: Request) -> Reply:
        """Runs one point. An exception becomes the point's outcome."""
        self._phases_s = {}
        return replace(self._outcome(request), phases_s=self._phases_s)

    def _outcome(self, request: Request) -> Reply:
        """Runs one point, and converts an exception to a reply with the kind of failure."""
        import torch

        try:
            return self._run(request)
        except UnsupportedError as error:
            return Reply(skipped=str(error))
        except QuantbenchError as error:
            wrong = isinstance(error, MeasurementError) and error.operation.startswith("check")
            return Reply(failed=("wrong_result" if wrong else "error", str(error)))
        except Exception as error:  # noqa: BLE001 - other people's code
            message = reason_line(error)
            if context_lost(error):
                return Reply(failed=("illegal_access", message), broken=True)
            out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            if out_of_memory and torch.cuda.is_available():
                torch.cuda.empty_cache()
            if out_of_memory or "can't allocate memory" in str(error):
                return Reply(failed=("out_of_memory", message))
            message += _interpreter_hint(request.provider, self.spec)
            return Reply(failed=("error", message))

    def _run(self, request: Request) -> Reply:
        """Measures one point and identifies its kernel.

        The point is skipped if the provider or the device cannot run it.
        """
        import torch

        from quantbench.providers import catalog

        provider = catalog.make(request.provider)
        work = request.workload
        reason = too_large(work, self.spec) or provider.unsupported(work, self.spec)
        if reason is not None:
            _require(request.provider, "unsupported", reason, str, "the reason as a text, or None")
            return Reply(skipped=reason)
        warmup_before_s = self.timer.warmup_s
        measuring_before_s = self.timer.measuring_s
        reply = measure(provider, work, self.spec, self.timer, self.timing)
        self._phases_s |= reply.phases_s
        self._phases_s["warm-up"] = self.timer.warmup_s - warmup_before_s
        self._phases_s["measuring"] = self.timer.measuring_s - measuring_before_s
        launch = reply.launch
        if launch is None and request.name and self.spec.kind == "cuda":
            torch.cuda.empty_cache()
            start_s = time.perf_counter()
            launch = self.name(request)
            self._phases_s["identify"] = time.perf_counter() - start_s
        return replace(reply, launch=launch)


def _interpreter_hint(provider_id: str, spec: DeviceSpec) -> str:
    """Returns a hint how to run a user's Triton kernel on a CPU, to append to an error message.

    Returns "" if the error must have another cause.
    """
    may_be_triton = ":" in provider_id and "triton" in sys.modules
    if spec.kind != "cpu" or not may_be_triton or os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return " (a Triton kernel needs a GPU, or TRITON_INTERPRET=1 to check it on a CPU)"


def measure(
    provider: Provider, workload: Workload, spec: DeviceSpec, timer: Timer, timing: TimingOptions
) -> Reply:
    """Times a workload with one provider, and checks the results before and after timing.

    `quantbench.providers.audit` describes the checks.
    """
    from quantbench.providers.audit import Audit

    audit = Audit(provider, workload, spec, timing.distribution)
    start_s = time.perf_counter()
    task = provider.prepare(workload, spec, distribution=timing.distribution, seed=timing.seed)
    inputs_s = time.perf_counter() - start_s
    missing = [name for name in _TASK_METHODS if not callable(getattr(task, name, None))]
    if missing:
        found = f"a {type(task).__name__} without {', '.join(missing)} from prepare()"
        raise InputError(provider.id, found, "a task (see quantbench/providers/base.py)")
    run = audit.add(task)
    audit.before_timing()
    copy = copier(provider, workload, spec, timing, audit)
    measurement = timer.measure(run, copy=copy, min_bytes=workload.min_bytes, audit=audit)
    phases_s = {"inputs": inputs_s, "check": audit.elapsed_s}
    launch = task.launch()
    _require(provider.id, "launch", launch, Launch | None, "a quantbench.launch.Launch, or None")
    return Reply(measurement, launch=launch, checked=audit.checked, phases_s=phases_s)


def _require(provider_id: str, method: str, value: object, kind: Any, expected: str) -> None:
    """Raises InputError if a method returned a value of a wrong type.

    method: name of the method of the provider or of its task.
    kind: type that the value must have.
    expected: what the method must return, in words.
    """
    if not isinstance(value, kind):
        raise InputError(provider_id, f"{value!r} from {method}()", expected)


def copier(
    provider: Provider,
    workload: Workload,
    spec: DeviceSpec,
    timing: TimingOptions,
    audit: Audit | None = None,
) -> Callable[[int], Run]:
    """Returns a function that makes copies of the workload's run with other inputs.

    The timer may rotate over the copies.

    audit: audit that also checks the copies; None for no checks.
    """

    def copy(number: int) -> Run:
        seed = timing.seed + 1 + number
        task = provider.prepare(workload, spec, distribution=timing.distribution, seed=seed)
        return task.run if audit is None else audit.add(task)

    return copy


def too_large(workload: Workload, spec: DeviceSpec) -> str | None:
    """Returns why a workload cannot fit into the device's memory; None if it may fit.

    Only inputs and outputs are counted.
    """
    if workload.min_bytes <= spec.memory_bytes:
        return None
    has = f"{spec.name} has {size(spec.memory_bytes)}"
    return f"needs at least {size(workload.min_bytes)}, and {has}"


def main() -> None:
    """Runs the worker as `python -m quantbench.sweep.worker FD [PROVIDER…]`.

    The worker sends a `Hello`, receives the timing options, and then replies to each request until
    the pipe closes or the GPU context is lost.
    """
    from quantbench import device
    from quantbench.providers import catalog
    from quantbench.providers.identity import versions
    from quantbench.timing import make_timer

    with parent_pipe() as (messages, send):
        try:
            tiles = catalog.declared_tiles(sys.argv[2:])
            spec = device.current()
            nvml = device.open_nvml()
            limits = None if isinstance(nvml, device.Absent) else nvml.limits()
            way = naming.profiler_location(
                exclusive=limits is not None and limits.exclusive is True
            )
            state = device.monitor(spec)
            hello = Hello(spec, state(), versions(), limits, tiles)
        except Exception as error:  # noqa: BLE001 - CUDA, NVML, other people's code
            send({"refused": _reason(error)})
            return
        send(encode(hello))
        first = next(messages, None)
        if first is None:  # the parent needed only the description of the device
            return
        timing = decode(TimingOptions, first)
        try:
            timer = make_timer(spec, timing, state=state)  # runs the first kernels
        except Exception as error:  # noqa: BLE001 - as above
            send({"refused": _reason(error)})
            next(messages, None)  # the parent reads the reason only after it sends a request
            return
        worker = Worker(spec, timer, timing, _namer(way, spec))
        for request in messages:
            reply = worker.run(decode(Request, request))
            send(encode(reply))
            if reply.broken:
                return


def _reason(error: Exception) -> str:
    """Formats an error as the reason of a refusal, in one line."""
    return str(error) if isinstance(error, QuantbenchError) else reason_line(error)


def _namer(way: str, spec: DeviceSpec) -> Callable[[Request], Launch | None]:
    """Returns the function that identifies kernels (see `naming`).

    On a CPU the function always returns None.

    way: value from `naming.profiler_location`.
    """
    if way == "off" or spec.kind != "cuda":
        return lambda request: None
    if way == "here":
        return lambda request: naming.answer(request, spec).launch
    return naming.KernelIdentityClient().launch_of


if __name__ == "__main__":
    main()
