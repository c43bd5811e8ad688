"""The child process that runs points: `python -m quantbench.sweep.worker READ_FD WRITE_FD [PROVIDER…]`.

It reads one JSON object a line and answers with one. Running in a process of its own keeps an illegal access, an
exhausted memory or a hang away from the sweep, which starts a fresh worker and goes on. What torch, CUDA or a provider
raise on purpose becomes the point's outcome; anything unexpected ends this process with a traceback, and that too is
recorded as the point's outcome, by the sweep.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantbench.errors import MeasurementError, QuantbenchError, UnsupportedError
from quantbench.sweep.messages import (
    Hello,
    Reply,
    Request,
    hello_to_json,
    reply_to_json,
    request_from_json,
    timing_from_json,
)
from quantbench.timing.rotation import LazyRuns, Run, cold_copies
from quantbench.units import size
from quantbench.workload import Workload

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.launch import Launch
    from quantbench.measurement import Check, Measurement
    from quantbench.providers.audit import Audit
    from quantbench.providers.base import Provider
    from quantbench.timing.options import TimingOptions
    from quantbench.timing.timer import Timer

# Work so small that it would take more copies than this to fill the cache is timed by flushing instead.
_MOST_COPIES = 500

# What CUDA says when the context is lost; nothing runs in that process any more.
_CONTEXT_LOST = ("illegal memory access", "device-side assert", "misaligned address", "unspecified launch failure")


class Worker:
    """Runs requests one after another with one timer. name: tells which kernel a point ran."""

    def __init__(
        self, spec: DeviceSpec, timer: Timer, timing: TimingOptions, name: Callable[[Request], Launch | None]
    ) -> None:
        self._spec = spec
        self._name = name
        self._timer = timer
        self._timing = timing
        self._phases_s: dict[str, float] = {}
        self._functions: dict[tuple[str, str], object] | None = None  # before the first provider is imported

    def run(self, request: Request) -> Reply:
        """Run one point; what is raised on purpose becomes its outcome."""
        import torch

        self._phases_s = {}
        try:
            return self._run(request)
        except UnsupportedError as error:
            return Reply(skipped=str(error), phases_s=self._phases_s)
        except MeasurementError as error:
            kind = "wrong_result" if error.operation.startswith("check") else "error"
            return Reply(failed=(kind, str(error)), phases_s=self._phases_s)
        except QuantbenchError as error:
            return Reply(failed=("error", str(error)), phases_s=self._phases_s)
        except (torch.OutOfMemoryError, MemoryError) as error:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return Reply(failed=("out_of_memory", first_line(error)), phases_s=self._phases_s)
        except RuntimeError as error:
            message = first_line(error)
            if context_lost(error):
                return Reply(failed=("illegal_access", message), phases_s=self._phases_s, broken=True)
            kind = "out_of_memory" if "can't allocate memory" in str(error) else "error"
            return Reply(failed=(kind, message), phases_s=self._phases_s)

    def _run(self, request: Request) -> Reply:
        import torch

        from quantbench.providers import catalog
        from quantbench.providers.audit import harness_functions, require_unchanged

        if self._functions is None:
            self._functions = harness_functions()
        provider = catalog.make(request.provider)
        reason = too_large(request.workload, self._spec) or provider.unsupported(request.workload, self._spec)
        if reason is not None:
            return Reply(skipped=reason)
        warmup_before_s, measuring_before_s = self._timer.warmup_s, self._timer.measuring_s
        point = measure(provider, request.workload, self._spec, self._timer, self._timing)
        require_unchanged(self._functions, provider.id)
        self._phases_s["inputs"] = point.inputs_s
        self._phases_s["check"] = point.check_s
        self._phases_s["warm-up"] = self._timer.warmup_s - warmup_before_s
        self._phases_s["measuring"] = self._timer.measuring_s - measuring_before_s
        launch = point.launch
        if launch is None and self._spec.kind == "cuda":
            torch.cuda.empty_cache()
            with self._phase("identify"):
                launch = self._name(request)
        return Reply(measurement=point.measurement, launch=launch, checked=point.checked, phases_s=self._phases_s)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self._phases_s[name] = time.perf_counter() - start_s


@dataclass(frozen=True)
class Point:
    """What measuring one workload by one provider gave. checked: None where the results could not be checked."""

    measurement: Measurement
    launch: Launch | None
    checked: Check | None
    inputs_s: float
    check_s: float


def measure(provider: Provider, workload: Workload, spec: DeviceSpec, timer: Timer, timing: TimingOptions) -> Point:
    """Time the workload, its results checked before, while and after (`quantbench.providers.audit`)."""
    from quantbench.providers.audit import Audit

    audit = Audit(provider, workload, spec, timing.distribution)
    start_s = time.perf_counter()
    task = provider.prepare(workload, spec, distribution=timing.distribution, seed=timing.seed)
    inputs_s = time.perf_counter() - start_s
    run = audit.add(task)
    audit.before_timing()
    measurement = timer.measure(
        run, rotate=copies_of(provider, workload, spec, timing, audit), min_bytes=workload.min_bytes, audit=audit
    )
    return Point(measurement, task.launch(), audit.checked, inputs_s, audit.elapsed_s)


def copies_of(
    provider: Provider, workload: Workload, spec: DeviceSpec, timing: TimingOptions, audit: Audit | None = None
) -> LazyRuns:
    """Copies of the work, made only if the timer finds it too short for events and rotates over them."""
    if spec.kind != "cuda" or timing.cache != "cold":
        return LazyRuns(0, lambda number: lambda: None)
    needed = cold_copies(spec.l2_bytes, workload.min_bytes) - 1

    def copy(number: int) -> Run:
        task = provider.prepare(workload, spec, distribution=timing.distribution, seed=timing.seed + 1 + number)
        return task.run if audit is None else audit.add(task)

    return LazyRuns(needed if needed <= _MOST_COPIES else 0, copy)


def too_large(workload: Workload, spec: DeviceSpec) -> str | None:
    """A reason in words when inputs and outputs alone do not fit: trying would only bring the machine to swap."""
    if workload.min_bytes <= spec.memory_bytes:
        return None
    return f"needs at least {size(workload.min_bytes)}, and {spec.name} has {size(spec.memory_bytes)}"


def context_lost(error: BaseException) -> bool:
    """Whether CUDA says that nothing runs in this process any more."""
    return any(sign in str(error) for sign in _CONTEXT_LOST)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def main() -> None:
    """Say on what this runs, learn how to time, serve requests until the pipe closes."""
    from quantbench import device
    from quantbench.providers import catalog
    from quantbench.providers.identity import versions
    from quantbench.sweep import naming
    from quantbench.timing.timer import make_timer

    read_fd, write_fd = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent()
    with os.fdopen(read_fd, encoding="utf-8") as requests, os.fdopen(write_fd, "w", encoding="utf-8") as replies:

        def send(data: dict[str, Any]) -> None:
            replies.write(json.dumps(data) + "\n")
            replies.flush()

        try:
            for provider in sys.argv[3:]:
                catalog.make(provider)
            way = naming.chosen_way()
            spec = device.current()
        except QuantbenchError as error:
            send({"refused": str(error)})
            return
        state = device.monitor(spec)
        send(hello_to_json(Hello(spec, state(), versions())))
        first = requests.readline()
        if not first:  # nobody wants anything measured: a plan was all
            return
        timing = timing_from_json(json.loads(first))
        worker = Worker(spec, make_timer(spec, timing, state=state), timing, _namer(way, spec))
        for line in requests:
            reply = worker.run(request_from_json(json.loads(line)))
            send(reply_to_json(reply))
            if reply.broken:
                return


def _namer(way: str, spec: DeviceSpec) -> Callable[[Request], Launch | None]:
    """Who tells which kernel ran (`quantbench.sweep.naming`); on a processor nobody is asked."""
    from quantbench.sweep import name_server, naming

    if way == "off" or spec.kind != "cuda":
        return lambda request: None
    if way == "here":
        return lambda request: name_server.answer(request, spec).launch
    return naming.NamesApart().launch_of


def die_with_parent() -> None:
    """End this process soon after the sweep has gone, however it went and whatever a kernel is doing."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
