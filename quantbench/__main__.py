"""The `quantbench` command; also `python -m quantbench`. The one place where errors become exit codes."""

import codecs
import gc
import os
import sys
from contextlib import suppress

import typer

from quantbench.errors import InputError, QuantbenchError, StoreError

# As a shell reports a program that SIGPIPE ended.
_NO_READER = 128 + 13
# Wrong words on the command line. This class is click's or typer's own, depending on typer's version.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
# What a terminal without Unicode shows instead of the signs that are printed here.
_IN_ASCII = {
    "µ": "u", "×": "x", "±": "+-", "≤": "<=", "≥": ">=", "–": "-", "−": "-", "·": "-", "…": "...", "→": "->",
    "°": "deg ", "●": "*", "²": "^2", "³": "^3", "⌈": "ceil(", "⌉": ")",
}  # fmt: skip
# Objects made before the collector looks for cycles. A run of 100,000 records is millions of objects without any, and
# the default of 700 spends a third of the time on them.
_COLLECT_AFTER = 100_000


def main() -> None:
    """Run the command line. Exit codes: 0 fine, 1 something was found, 2 wrong use or bad input, 130 Ctrl-C, 141 if the
    reader of the output closed it, because a gate must not pass on output that nobody read."""
    _prepare_streams()
    gc.set_threshold(_COLLECT_AFTER, 50, 100)
    try:
        code = _run()
        sys.stdout.flush()
    except QuantbenchError as error:
        code = _refuse(error)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output has gone (`quantbench … | head`)
        code = _no_reader()
    except SystemExit as end:
        # rich and click turn the same into 1, which with us means that something was found.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = _no_reader()
    except OSError as error:
        if error.errno is None:  # not from the system: a bug, whose traceback is wanted
            raise
        code = _refuse(_system_error(error))
    if code:
        sys.exit(code)


def _run() -> int:
    """Parse the arguments and run the command. Returns its exit code."""
    from quantbench.cli.app import app

    wrong = next((word for word in sys.argv[1:] if "\0" in word), None)
    if wrong is not None:
        raise InputError("command line", f"{wrong!r} with a NUL byte", "words without one")
    try:
        code = app(prog_name="quantbench", standalone_mode=False)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 on: `quantbench` alone shows its help
            error.show()  # type: ignore[attr-defined]
            return 2
        raise _wrong_words(error) from None
    return code if isinstance(code, int) else 0


def _wrong_words(error: Exception) -> InputError:
    """Typer's error about the arguments as an error of one line."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "quantbench"
    said = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    operation = command.removeprefix("quantbench").strip() or "command line"
    return InputError(operation, said[:1].lower() + said[1:], f"words as `{command} --help` lists them")


def _system_error(error: OSError) -> StoreError:
    """An error of the system that no command handled. Without a file name, it was about the output."""
    if error.filename is None:
        _abandon_output()
        return StoreError("write output", f"standard output ({error.strerror})", "an output with room in it")
    return StoreError("read or write", f"{error.filename} ({error.strerror})", "a file or folder that can be used")


def _refuse(error: QuantbenchError) -> int:
    with suppress(OSError):  # nobody can be told; the exit code remains
        print(f"quantbench: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _no_reader() -> int:
    _abandon_output()
    sys.stderr.close()
    return _NO_READER


def _abandon_output() -> None:
    """Discard what is still buffered for the output: Python would try to write it again at exit, and fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _prepare_streams() -> None:
    """Replace characters that the output's encoding cannot hold, and discard the output where there is none."""
    codecs.register_error("quantbench", _nearest)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="quantbench")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """Error handler for codecs: the closest ASCII text, or an escape such as \\u0431."""
    assert isinstance(error, UnicodeEncodeError)
    found = error.object[error.start : error.end]
    return "".join(_IN_ASCII.get(c) or c.encode("unicode_escape").decode("ascii") for c in found), error.end


if __name__ == "__main__":
    main()
