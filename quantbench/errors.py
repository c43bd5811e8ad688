"""The errors that quantbench raises on purpose, and checks of values that raise them.

Each error is a single line that names the operation, the value and what was expected. The command line prints that line
and ends with `exit_code`.

>>> print(InputError("Gemm", "m = 0", "an integer of at least 1"))
Gemm: m = 0; expected an integer of at least 1
"""

import unicodedata

# Characters of a value that an error shows; longer ones are cut in the middle.
_MOST_SHOWN = 600


def one_line(text: str) -> str:
    """The text on one line, with control and other invisible characters as escapes.

    Names of files, kernels and providers may contain anything, also terminal escape sequences.

    >>> one_line("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    if text.isprintable():
        return text
    hidden = (c for c in text if not c.isprintable() and unicodedata.category(c) != "Zs")
    return text.translate({ord(c): c.encode("unicode_escape").decode("ascii") for c in hidden})


def printable(text: str, longest: int = 200) -> str:
    """The text on one line, with control characters as escapes, cut in the middle where it is long.

    >>> printable("a\\x1b[31m\\nb"), printable("cutlass_80_tensorop_bf16_s16816gemm", 21)
    ('a\\\\x1b[31m\\\\nb', 'cutlass_80…s16816gemm')
    """
    return shortened(one_line(text), longest)


def shortened(text: str, longest: int) -> str:
    """The text with its middle cut out where it is longer than `longest` characters."""
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


class QuantbenchError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line ends with."""

    exit_code = 2

    def __init__(self, operation: str, value: str, expected: str) -> None:
        half = _MOST_SHOWN // 2
        shown = value if len(value) <= _MOST_SHOWN else f"{value[:half]} … {value[-half:]}"
        super().__init__(one_line(f"{operation}: {shown}; expected {expected}"))
        self.operation = operation
        self.value = value
        self.expected = expected


class InputError(QuantbenchError, ValueError):
    """A value given by the user, or read from a file, that cannot be used."""


class UnsupportedError(QuantbenchError):
    """The device, library or kernel cannot do what was asked, whatever the values."""


class StoreError(QuantbenchError):
    """A results folder that cannot be read, written or resumed."""


class MeasurementError(QuantbenchError):
    """A measurement that failed, or whose result was wrong."""


def require_int(operation: str, name: str, value: object, *, low: int = 1, high: int = 2**31 - 1) -> int:
    """Return `value` if it is an integer in [low, high] and no bool; raise InputError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(operation, f"{name} = {value!r}", f"an integer from {low} to {high}")
    return value


def require_choice(operation: str, name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`; raise InputError otherwise."""
    if not isinstance(value, str) or value not in choices:
        raise InputError(operation, f"{name} = {value!r}", "one of " + ", ".join(filter(None, choices)))
    return value
