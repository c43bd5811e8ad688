"""Whether JSON values are of the types that a dataclass declares: what a file says is believed only so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_Check = Callable[[object], bool]

_WORDS = {str: "a text", int: "an integer", float: "a finite number", bool: "true or false"}
# What a float can hold.
_LARGEST = 1.7e308


def first_mismatch(kind: type, values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first field whose value is not of its type, and what was expected there; None where all are."""
    for name, check, expected in _checks(kind):
        if name in values and not check(values[name]):
            return name, expected
    return None


@cache
def _checks(kind: type) -> tuple[tuple[str, _Check, str], ...]:
    hints = get_type_hints(kind)
    return tuple((f.name, _check(hints[f.name]), _words(hints[f.name])) for f in fields(kind))


def _check(hint: Any) -> _Check:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if hint is float:
        return _is_number
    if hint in (str, int, bool, NoneType):
        return lambda value: type(value) is hint
    if origin in (Union, UnionType):
        checks = [_check(argument) for argument in arguments]
        return lambda value: any(check(value) for check in checks)
    if origin in (tuple, list):
        return _sequence(origin, arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of_key, of_value = map(_check, arguments)
        return lambda value: isinstance(value, Mapping) and all(of_key(k) and of_value(v) for k, v in value.items())
    if is_dataclass(hint):
        return lambda value: isinstance(value, hint)  # type: ignore[arg-type]
    raise TypeError(f"no check for {hint}")  # a field of a new type wants one


def _is_number(value: object) -> bool:
    return (type(value) is float or type(value) is int) and -_LARGEST < value < _LARGEST


def _sequence(origin: type, arguments: tuple[Any, ...]) -> _Check:
    if origin is list or arguments[-1] is Ellipsis:
        of_item = _check(arguments[0])
        return lambda value: type(value) is origin and all(map(of_item, value))  # type: ignore[call-overload]
    checks = [_check(argument) for argument in arguments]

    def fixed(value: object) -> bool:
        return (
            type(value) is tuple and len(value) == len(checks) and all(c(v) for c, v in zip(checks, value, strict=True))
        )

    return fixed


def _words(hint: Any) -> str:
    if hint in _WORDS:
        return _WORDS[hint]
    options = [_WORDS.get(argument, "") for argument in get_args(hint) if argument is not NoneType]
    if get_origin(hint) in (Union, UnionType) and all(options):
        return " or ".join(options) + (" or null" if NoneType in get_args(hint) else "")
    return str(hint).replace("quantbench.", "")
