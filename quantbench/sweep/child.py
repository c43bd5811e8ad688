"""Runs a Python module as a child process that replies to JSON requests over a pipe.

`ChildProcess` is the parent's side, and `parent_pipe` is the child's side. The module also defines
the interface of a worker, the process that times points (`WorkerClient`), and detects that a
process has lost its CUDA context (`context_lost`).
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

# Longest time until a worker's first message, in s. Importing torch from a cold network disk and
# creating a CUDA context can take a minute.
_START_LIMIT_S = 300.0

# Fragments of CUDA's error messages that show a lost context. Source: CUDA Runtime API,
# `cudaError`, the errors that "leave the process in an inconsistent state".
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
    """Builds the error for a process that refused to measure.

    who: operation that the error names.
    reason: why the process refused. If it is the text of a quantbench error, the part after
        "; expected " is kept as what was expected.
    """
    found, _, expected = reason.partition("; expected ")
    return MeasurementError(who, found, expected or "a device that can be measured")


class WorkerLostError(MeasurementError):
    """A child process died, did not reply in time, or sent a message that is not JSON.

    kind: `crash` or `timeout`.
    message: what happened, in words.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__("worker", message, "an answer")
        self.kind = kind
        self.message = message


class WorkerClient(Protocol):
    """Interface of a worker, which times points.

    A worker is a local process, a process on another machine, or a test double.

    hello: first message of the worker, which describes its device.
    """

    hello: Hello

    def begin(self, timing: TimingOptions) -> None:
        """Sends the timing options. Must be called once, before the first request."""

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        """Returns the reply to a request, and calls `tick` a few times a second while waiting.

        limit_s: longest time to wait, in s.
        Raises WorkerLostError if the worker is lost, and MeasurementError if the worker cannot use
        its device.
        """

    def close(self) -> None:
        """Ends the worker at once."""


class ChildProcess:
    """A Python module that runs in a separate process and exchanges JSON messages with this one.

    The process is started as `python -m MODULE FD WORDS…`, where FD is its end of the pipe. It is
    in a new process group, so that Ctrl-C reaches only the sweep, which then ends the child.

    module: name of the module.
    words: further arguments on the command line.
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
        """Sends a request and returns the reply. The caller must close the process after an error.

        limit_s: longest time to wait, in s.
        tick: function that is called about every 0.1 s while waiting.
        Raises WorkerLostError if the process dies or needs longer, and MeasurementError if it
        cannot use the device.
        """
        self.send(encode(request))
        return reply_from_json(self.receive(limit_s, tick))

    def close(self) -> None:
        """Kills the process and its process group, and closes the pipe."""
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

        limit_s, tick: as in `ask`.
        Raises WorkerLostError if the process dies, needs longer or sends no JSON, and
        MeasurementError if the process refuses to measure.
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

        The message has the exit code, or the signal that killed the process, and the reason from
        the process's output.
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
    """A local worker: a process that runs `quantbench.sweep.worker` and times points.

    providers: names of user-defined providers to import first.
    Raises MeasurementError if a name is not that of a provider, or if there is no device.
    """

    def __init__(self, providers: Sequence[str] = ()) -> None:
        super().__init__("quantbench.sweep.worker", providers)
        try:
            self.hello = decode(Hello, self.receive(_START_LIMIT_S))
        except BaseException:
            self.close()
            raise

    def begin(self, timing: TimingOptions) -> None:
        """Sends the timing options, as in `WorkerClient.begin`."""
        self.send(encode(timing))


@contextmanager
def parent_pipe() -> Iterator[tuple[Iterator[Any], Callable[[dict[str, Any]], None]]]:
    """Connects this process, started as a `ChildProcess`, with its parent.

    Yields an iterator over the parent's messages, and a function that sends a message to the
    parent. A watchdog thread ends this process within a second after the parent has ended, even
    while a kernel runs.
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
    """Returns whether this process has lost its CUDA context, and so can run no more kernels.

    After the loss, every CUDA call fails. If the text of the error does not show the loss, a
    synchronisation does.

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
