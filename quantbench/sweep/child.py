"""Runs Python modules as child processes that answer requests over pipes.

Also defines the interface of a worker, and detects that a process has lost its CUDA context.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol, Self

from quantbench.errors import MeasurementError
from quantbench.reasons import reason_in_output
from quantbench.store.typed import decode, encode
from quantbench.sweep.messages import Hello, Reply, Request, reply_from_json
from quantbench.timing.options import TimingOptions

# Longest time until a worker's first message. To import torch from a cold network disk and to
# create a CUDA context can take a minute.
_START_LIMIT_S = 300.0

# Parts of CUDA's messages for errors that end a context. Source: CUDA Runtime API, `cudaError`, the
# errors that "leave the process in an inconsistent state".
_CONTEXT_LOST = (
    "device-side assert",
    "hardware stack error",
    "illegal instruction",
    "illegal memory access",
    "invalid program counter",
    "launch timed out",
    "misaligned address",
    "shared address space",
    "uncorrectable",
    "unspecified launch failure",
)


def refusal(who: str, reason: str) -> MeasurementError:
    """Builds an error from the reason that another process sent.

    The reason may be the text of an error itself.
    """
    found, _, expected = reason.partition("; expected ")
    return MeasurementError(who, found, expected or "a device that can be measured")


class WorkerLostError(MeasurementError):
    """The worker died or did not answer.

    kind: `crash` or `timeout`.
    message: what happened.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__("worker", message, "an answer")
        self.kind = kind
        self.message = message


class WorkerClient(Protocol):
    """Interface of a worker.

    A worker is a local process, a process on another machine, or a test double.
    """

    hello: Hello

    def begin(self, timing: TimingOptions) -> None:
        """Sends the timing options. Must be called once, before the first request."""

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        """Returns the reply to a request, and calls `tick` a few times a second while it waits.

        limit_s: longest time to wait, in s.
        Raises WorkerLostError, and MeasurementError if the worker cannot use its device.
        """

    def close(self) -> None:
        """Ends the worker at once."""


class ChildProcess:
    """A Python module in its own process, which answers each JSON message with a JSON message.

    The process has a process group of its own, so that Ctrl-C reaches only the sweep, which then
    ends the child.

    module, words: the process is started as `python -m MODULE FD WORDS…`.
    """

    def __init__(self, module: str, words: Sequence[str] = ()) -> None:
        self._pipe, theirs = Pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read after the process has ended
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *words],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
        )
        theirs.close()

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        """Runs one point and returns its reply. The caller must close the process after an error.

        Raises WorkerLostError if the process dies or needs longer than limit_s, and
        MeasurementError if it cannot use the device.
        """
        self.send(encode(request))
        return reply_from_json(self.receive(limit_s, tick))

    def close(self) -> None:
        """Kills the process, with its process group, and releases its pipe."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: dict[str, Any]) -> None:
        """Sends a message. Raises WorkerLostError if the process has died."""
        try:
            self._pipe.send_bytes(json.dumps(data).encode())
        except BrokenPipeError:
            raise self._lost() from None

    def receive(self, limit_s: float, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Returns the next message.

        Raises WorkerLostError if the process dies or needs longer than limit_s, and
        MeasurementError if it refuses to measure.
        """
        deadline_s = time.monotonic() + limit_s
        while not self._pipe.poll(0.1):
            tick()
            if time.monotonic() > deadline_s:
                raise WorkerLostError("timeout", f"no answer within {limit_s:.0f} s")
        try:
            answer = self._pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            raise self._lost() from None
        try:
            data: dict[str, Any] = json.loads(answer)
        except (ValueError, RecursionError):
            raise WorkerLostError("crash", f"answered with {answer[:80]!r}") from None
        if isinstance(data, dict) and "refused" in data:
            raise refusal("worker", data["refused"])
        return data

    def _lost(self) -> WorkerLostError:
        """Returns the error for a process that has died.

        The error states the exit code of the process and the reason from its output.
        """
        code = self._process.wait()
        self._errors.seek(0)
        reason = reason_in_output(self._errors.read().decode(errors="replace"))
        message = f"ended with exit code {code}"
        if code < 0:
            message = f"killed by {signal.Signals(-code).name}"
        if reason:
            message += f": {reason}"
        return WorkerLostError("crash", message)


class WorkerProcess(ChildProcess):
    """A running `quantbench.sweep.worker` process, which times points.

    providers: names of user-defined providers to import first.
    Raises MeasurementError if one of them is not a provider, or if there is no device.
    """

    def __init__(self, providers: Sequence[str] = ()) -> None:
        super().__init__("quantbench.sweep.worker", providers)
        try:
            self.hello = decode(Hello, self.receive(_START_LIMIT_S))
        except BaseException:
            self.close()
            raise

    def begin(self, timing: TimingOptions) -> None:
        self.send(encode(timing))


@contextmanager
def parent_pipe() -> Iterator[tuple[Iterator[Any], Callable[[dict[str, Any]], None]]]:
    """Connects a `ChildProcess`, from inside, with its parent.

    Yields an iterator of the parent's messages, and a function that sends a message to the parent.
    A watchdog thread ends this process soon after its parent has ended, for whatever reason and
    even while a kernel runs.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    def messages() -> Iterator[Any]:
        with suppress(EOFError, ConnectionResetError):
            while True:
                yield json.loads(pipe.recv_bytes())

    threading.Thread(target=watch, daemon=True).start()
    with Connection(int(sys.argv[1])) as pipe:
        yield messages(), lambda data: pipe.send_bytes(json.dumps(data).encode())


def context_lost(error: BaseException) -> bool:
    """Returns whether this process has lost its CUDA context, so that it can run nothing more.

    Every call fails after the context is lost, so a synchronisation shows the loss, whatever the
    text of the error is.

    error: error that a run has raised.
    """
    if any(sign in str(error) for sign in _CONTEXT_LOST):
        return True
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
