"""Extracts one line with the cause of a failure.

`reason_line` takes the line from another library's exception, and `reason_in_output` from the
output of a process that died.
"""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from subprocess import CalledProcessError
from tempfile import gettempdir

from quantbench.errors import shortened

# Lines that torch adds to every CUDA error.
_BOILERPLATE = re.compile(
    "CUDA kernel errors might be asynchronously reported"
    "|For debugging consider passing CUDA_LAUNCH_BLOCKING"
    "|Compile with `?TORCH_USE_CUDA_DSA"
    "|Search for `?cudaError"
)
# Exceptions whose text is often only a name or a value. The line then begins with their type.
_TERSE = (AssertionError, AttributeError, LookupError, TypeError)
_TRACEBACK = "Traceback (most recent call last):"
_LONGEST = 300  # maximum number of characters of the line
_STDERR_BYTES = 65_536  # number of bytes at the end of standard error that are searched


def reason_line(error: BaseException) -> str:
    """Returns the line with the cause from an exception's text, cut to 300 characters.

    Repetitions of a failure give the same line, because names of temporary files are removed.

    >>> reason_line(RuntimeError("CUDA error: no kernel image\\nCompile with `TORCH_USE_CUDA_DSA`"))
    'CUDA error: no kernel image'
    >>> reason_line(KeyError("block_m"))
    "KeyError: 'block_m'"
    """
    lines = _informative_lines(str(error))
    from_ptxas = [line for line in lines if line.startswith("ptxas ")]
    if isinstance(error, CalledProcessError):
        reason = _failed_command(error)
    elif not lines:
        reason = type(error).__name__
    elif from_ptxas:  # Triton's PTXASError: a heading, then the output of ptxas
        reason = from_ptxas[0]
    elif re.match(r"at \d+:\d+:", lines[0]):  # Triton's CompilationError: position, source, reason
        reason = lines[-1]
    else:
        reason = lines[0]
    if isinstance(error, _TERSE) and lines:
        reason = f"{type(error).__name__}: {reason}"
    return _shown(reason)


def reason_in_output(text: str) -> str:
    """Returns the line with the cause from the output of a process that died, or "".

    The line is the exception of the last traceback, or the last line if there is no traceback.
    """
    _, traceback, after = text.rpartition(_TRACEBACK)
    lines = _informative_lines(after)
    if traceback:
        lines = [line for line in lines if not line[0].isspace()][:1]
    return _shown(lines[-1]) if lines else ""


def _informative_lines(text: str) -> list[str]:
    """Returns a text's lines without empty lines and torch's boilerplate."""
    return [line for line in text.splitlines() if line.strip() and not _BOILERPLATE.search(line)]


def _shown(reason: str) -> str:
    """Cuts a reason to _LONGEST, and replaces names of temporary files, which always differ."""
    temporary_file = rf"{re.escape(gettempdir())}/[\w./-]*"
    return shortened(re.sub(temporary_file, "…", reason.strip()), _LONGEST)


def _failed_command(error: CalledProcessError) -> str:
    """Describes the failure of a command, such as a compiler that Triton calls."""
    command = error.cmd if isinstance(error.cmd, str) else str(error.cmd[0])
    reason = f"{Path(command).name} ended with exit status {error.returncode}"
    compiler_error = _last_compiler_error()
    return f"{reason}: {compiler_error}" if compiler_error else reason


def _last_compiler_error() -> str:
    """Returns the last `error: …` in this process's standard error, or "".

    Standard error can be read only if it is a file, as in a sweep's worker process.
    """
    with suppress(OSError):  # standard error may be closed, or not open for reading
        status = os.fstat(2)
        if stat.S_ISREG(status.st_mode):
            start = max(0, status.st_size - _STDERR_BYTES)
            text = os.pread(2, _STDERR_BYTES, start).decode(errors="replace")
            return "".join(re.findall(r"\berror: .*", text)[-1:])
    return ""
