"""The sweep's end of the worker process: start it, ask it, notice when it dies or hangs, stop it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from quantbench.errors import InputError, MeasurementError
from quantbench.sweep.messages import (
    Hello,
    Reply,
    Request,
    hello_from_json,
    reply_from_json,
    request_to_json,
    timing_to_json,
)
from quantbench.timing.options import TimingOptions

# Importing torch from a cold network disk and making a CUDA context can take a minute.
_START_LIMIT_S = 300.0


def refusal(who: str, reason: str) -> MeasurementError:
    """The error behind a reason that another process gave, an error's own text or not."""
    found, _, expected = reason.partition("; expected ")
    return MeasurementError(who, found, expected or "a device that can be measured")


class WorkerLostError(MeasurementError):
    """The worker died or did not answer. kind: `crash` or `timeout`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__("worker", message, "an answer")
        self.kind = kind
        self.message = message


class Asked(Protocol):
    """Somebody who answers requests: the worker process, or a test's stand-in."""

    hello: Hello

    def begin(self, timing: TimingOptions) -> None:
        """Say how points are to be timed; once, before the first is asked for."""

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        """The reply; `tick` is called a few times a second while waiting. Raises WorkerLostError."""

    def close(self) -> None:
        """End it, at once."""


class ChildProcess:
    """A Python module that runs in a process of its own and answers lines of JSON with lines of JSON.

    module, words: run as `python -m MODULE READ_FD WRITE_FD WORDS…`. It gets a process group of its own, so that Ctrl-C
    reaches the sweep alone, which then ends it.
    """

    def __init__(self, module: str, words: Sequence[str] = ()) -> None:
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read after the process has ended
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(request_read), str(reply_write), *words],
            pass_fds=(request_read, reply_write),
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
        )
        os.close(request_read)
        os.close(reply_write)
        self._request_fd = request_write
        self._reply_fd = reply_read
        self._buffer = b""

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        """Run one point. Raises WorkerLostError when the process dies or outlasts limit_s; it is of no use then."""
        self._send(request_to_json(request))
        data = self._receive(limit_s, tick)
        try:
            return reply_from_json(data)
        except InputError as error:
            return Reply(failed=("error", str(error)))

    def close(self) -> None:
        """Kill the process and what it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if not self._errors.closed:
            os.close(self._request_fd)
            os.close(self._reply_fd)
            self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, data: dict[str, Any]) -> None:
        try:
            os.write(self._request_fd, (json.dumps(data) + "\n").encode())  # under the pipe's 64 KiB: never partial
        except BrokenPipeError:
            raise self._lost() from None

    def _receive(self, limit_s: float, tick: Callable[[], None]) -> dict[str, Any]:
        deadline_s = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._reply_fd, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if time.monotonic() > deadline_s:
                    raise WorkerLostError("timeout", f"no answer within {limit_s:.0f} s")
                if not selector.select(timeout=0.1):
                    tick()
                    continue
                chunk = os.read(self._reply_fd, 1 << 16)
                if not chunk:
                    raise self._lost()
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            data: dict[str, Any] = json.loads(line)
        except (ValueError, RecursionError):
            raise WorkerLostError("crash", f"answered with {line[:80]!r}") from None
        return data

    def _lost(self) -> WorkerLostError:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return WorkerLostError("crash", f"{how}: {lines[-1][:300]}" if lines else how)


class WorkerProcess(ChildProcess):
    """A running `quantbench.sweep.worker`, which times points.

    providers: whose classes it looks at first. Raises InputError for one that is no provider.
    """

    def __init__(self, providers: Sequence[str] = ()) -> None:
        super().__init__("quantbench.sweep.worker", providers)
        try:
            data = self._receive(_START_LIMIT_S, lambda: None)
            if "refused" in data:
                raise refusal("worker", data["refused"])
            self.hello = hello_from_json(data)
        except BaseException:
            self.close()
            raise

    def begin(self, timing: TimingOptions) -> None:
        """Tell the process how to time."""
        self._send(timing_to_json(timing))
