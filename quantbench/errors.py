"""Defines quantbench's exceptions, and checks of argument values that raise them.

Each message is one line with the operation, the value and the expected value. The command line
prints the message, and exits with the exception's `exit_code`.

>>> print(InputError("Gemm", "m = 0", "an integer of at least 1"))
Gemm: m = 0; expected an integer of at least 1
"""

import unicodedata
from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")

# Maximum number of characters for a value in an error message. Longer values are cut in the middle.
_MOST_SHOWN = 600


def one_line(text: str) -> str:
    """Escapes control characters and other invisible characters, so that the text is one line.

    Names of files, kernels and providers may contain any character, even terminal escape sequences.

    >>> one_line("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    if text.isprintable():
        return text
    hidden = (c for c in text if not c.isprintable() and unicodedata.category(c) != "Zs")
    return text.translate({ord(c): c.encode("unicode_escape").decode("ascii") for c in hidden})


def printable(text: str, longest: int = 200) -> str:
    """Escapes a text as `one_line` does, and cuts it as `shortened` does.

    longest: maximum number of characters.

    >>> printable("a\\x1b[31m\\nb"), printable("cutlass_80_tensorop_bf16_s16816gemm", 21)
    ('a\\\\x1b[31m\\\\nb', 'cutlass_80…s16816gemm')
    """
    return shortened(one_line(text), longest)


def shortened(text: str, longest: int) -> str:
    """Replaces the middle of a text by an ellipsis if the text is too long.

    longest: maximum number of characters of the result.
    """
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


class QuantbenchError(Exception):
    """Base class of quantbench's exceptions.

    operation: operation that failed.
    value: value that caused the failure.
    expected: value that the operation expected.
    exit_code: exit status of the command line.
    """

    exit_code = 2

    def __init__(self, operation: str, value: str, expected: str) -> None:
        shown = value
        if len(value) > _MOST_SHOWN:
            half = _MOST_SHOWN // 2
            shown = f"{value[:half]} … {value[-half:]}"
        super().__init__(one_line(f"{operation}: {shown}; expected {expected}"))
        self.operation = operation
        self.value = value
        self.expected = expected


class InputError(QuantbenchError, ValueError):
    """Invalid value from the user or from a file."""


class UnsupportedError(QuantbenchError):
    """Operation that the device, library or kernel does not support."""


class StoreError(QuantbenchError):
    """Results folder or other stored file that cannot be read, written or resumed."""


class MeasurementError(QuantbenchError):
    """Measurement that failed or gave a wrong result."""


def require_int(
    operation: str, name: str, value: object, *, low: int = 1, high: int = 2**31 - 1
) -> int:
    """Returns `value` if it is an integer (not a bool) from `low` to `high`.

    operation: name of the operation, for error messages.
    name: name of the value, for error messages.

    Raises InputError for any other value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InputError(operation, f"{name} = {value!r}", f"an integer from {low} to {high}")
    return value


def first_repeated(items: Sequence[_T]) -> _T | None:
    """Returns the first item that occurs more than once, or None if all items differ."""
    return next((item for item in items if items.count(item) > 1), None)


def require_ints(value: object, *names: str, low: int = 1) -> None:
    """Raises InputError unless these fields of a dataclass are integers of at least `low`."""
    for name in names:
        require_int(type(value).__name__, name, getattr(value, name), low=low)


def require_bools(value: object, *names: str) -> None:
    """Raises InputError unless these fields of a dataclass are booleans."""
    for name in names:
        flag = getattr(value, name)
        if not isinstance(flag, bool):
            raise InputError(type(value).__name__, f"{name} = {flag!r}"[:80], "True or False")


def require_choices(value: object, **choices: tuple[str, ...]) -> None:
    """Raises InputError unless each named field of a dataclass is one of its choices."""
    for name, allowed in choices.items():
        require_choice(type(value).__name__, name, getattr(value, name), allowed)


def require_divisor(value: object, name: str, whole: str) -> None:
    """Raises InputError unless the field `name` of a dataclass divides the field `whole`."""
    divisor = getattr(value, name)
    dividend = getattr(value, whole)
    if dividend % divisor:
        raise InputError(
            type(value).__name__, f"{name} = {divisor}", f"a divisor of {whole} = {dividend}"
        )


def require_choice(operation: str, name: str, value: object, choices: tuple[str, ...]) -> str:
    """Returns `value` if it is one of `choices`.

    operation: name of the operation, for error messages.
    name: name of the value, for error messages.

    Raises InputError for any other value.
    """
    if not isinstance(value, str) or value not in choices:
        raise InputError(
            operation, f"{name} = {value!r}", "one of " + ", ".join(filter(None, choices))
        )
    return value
