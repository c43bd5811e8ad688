"""Runs the command line (`quantbench`, `python -m quantbench`), and maps errors to exit codes."""

import codecs
import gc
import os
import sys
from contextlib import suppress

import typer

from quantbench.errors import InputError, QuantbenchError, StoreError

# Exit code that a shell reports for a program that SIGPIPE ended.
_NO_READER = 128 + 13
# Base class of errors about arguments. Depending on typer's version, it is click's class or typer's
# copy.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
# ASCII replacements for characters that quantbench prints, for terminals without Unicode.
_IN_ASCII = {
    "µ": "u", "×": "x", "±": "+-", "≤": "<=", "≥": ">=", "–": "-", "−": "-", "·": "-", "…": "...",
    "→": "->",
    "°": "deg ", "●": "*", "²": "^2", "³": "^3", "⌈": "ceil(", "⌉": ")",
}  # fmt: skip
# Number of new objects after which the garbage collector looks for reference cycles. Reading a run
# of 100,000 records creates millions of objects without cycles. With Python's default of 700, the
# collector would take a third of the time.
_COLLECT_AFTER = 100_000


def main() -> None:
    """Runs the command line.

    Exit codes: 0 for success, 1 if a check or comparison found a problem, 2 for wrong usage or bad
    input, 130 for Ctrl-C, and 141 for a broken pipe. A broken pipe must not give 0, because an
    automatic check must not pass on output that nobody read.
    """
    _prepare_streams()
    gc.set_threshold(_COLLECT_AFTER, 50, 100)
    try:
        code = _run()
        sys.stdout.flush()
    except QuantbenchError as error:
        code = _refuse(error)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the output was closed, as by `quantbench … | head`
        code = _no_reader()
    except SystemExit as end:
        # rich and click exit with 1 for a broken pipe. Here, 1 means that a check found a problem,
        # so a broken pipe needs another code.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = _no_reader()
    except OSError as error:
        if error.errno is None:  # not from the operating system, so a bug: show the traceback
            raise
        code = _refuse(_system_error(error))
    if code:
        sys.exit(code)


def _run() -> int:
    """Runs the typer app, and returns its exit code."""
    from quantbench.cli.app import app

    wrong = next((word for word in sys.argv[1:] if "\0" in word), None)
    if wrong is not None:
        raise InputError("command line", f"{wrong!r} with a NUL byte", "words without one")
    try:
        code = app(prog_name="quantbench", standalone_mode=False)
    except _UsageError as error:
        if (
            type(error).__name__ == "NoArgsIsHelpError"
        ):  # from click 8.2 on, `quantbench` alone shows its help
            error.show()  # type: ignore[attr-defined]
            return 2
        raise _wrong_words(error) from None
    return code if isinstance(code, int) else 0


def _wrong_words(error: Exception) -> InputError:
    """Converts an error of click or typer about the arguments to an InputError."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "quantbench"
    said = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    operation = command.removeprefix("quantbench").strip() or "command line"
    # The message about a refused value lacks the value, so the value is taken from the cause.
    refused: list[dict[str, str]] = getattr(error.__cause__, "errors", list)()
    expected = f"words as `{command} --help` lists them"
    if refused:
        said = f"{said.partition(': ')[0]}: {refused[0]['input']!r}"
        expected = refused[0]["msg"].removeprefix("Input should be ").partition(", unable")[0]
        expected = expected.replace("greater than or equal to", "at least")
    return InputError(operation, said[:1].lower() + said[1:], expected)


def _system_error(error: OSError) -> StoreError:
    """Converts a system error that no command handled to a StoreError.

    An error without a file name concerns the standard output.
    """
    if error.filename is None:
        _abandon_output()
        return StoreError(
            "write output", f"standard output ({error.strerror})", "an output with room in it"
        )
    return StoreError(
        "read or write", f"{error.filename} ({error.strerror})", "a file or folder that can be used"
    )


def _refuse(error: QuantbenchError) -> int:
    """Prints an error, and returns its exit code."""
    with suppress(OSError):  # stderr may be closed, but the exit code still shows the error
        print(f"quantbench: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _no_reader() -> int:
    """Discards the rest of the output after a broken pipe, and returns the exit code."""
    _abandon_output()
    sys.stderr.close()
    return _NO_READER


def _abandon_output() -> None:
    """Discards buffered output. Otherwise, Python would try to write it again at exit, and fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _prepare_streams() -> None:
    """Makes the output streams replace characters that they cannot encode.

    A missing stream is replaced by the null device.
    """
    codecs.register_error("quantbench", _nearest)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="quantbench")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """Replaces characters by ASCII text or escapes such as \\u0431; an error handler of codecs."""
    assert isinstance(error, UnicodeEncodeError)
    found = error.object[error.start : error.end]
    return "".join(
        _IN_ASCII.get(c) or c.encode("unicode_escape").decode("ascii") for c in found
    ), error.end


if __name__ == "__main__":
    main()
