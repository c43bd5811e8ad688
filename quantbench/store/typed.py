"""Dataclasses from JSON objects: their fields and no others, each of the type that the dataclass declares for it.

What a file says is believed only so far. Runs and profiles are both read through here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from quantbench.errors import InputError

Json = dict[str, Any]
_T = TypeVar("_T")
_Check = Callable[[object], bool]

_WORDS = {str: "a text", int: "an integer", float: "a finite number", bool: "true or false"}
_PLURALS = {str: "texts", int: "integers", float: "finite numbers", bool: "booleans"}
# An integer where a number is declared: beyond this, numpy would keep it as an object.
_LARGEST_INTEGER = 2**63


@dataclass(frozen=True)
class _Field:
    """needed: it has no default. is_tuple: a JSON list of it becomes a tuple. expected: its type, in words."""

    needed: bool
    is_tuple: bool
    check: _Check
    expected: str


def decode(kind: type[_T], data: object, who: str = "", *, whole: bool = False) -> _T:
    """A dataclass from a JSON object that holds its fields and no others, each of its declared type.

    Lists become tuples where these are declared; a field that is a dataclass itself is decoded beforehand. A field
    with a default may be missing, unless `whole`. Raises InputError that names `who` (the dataclass, unless given)
    and the field.
    """
    who = who or kind.__name__
    if not isinstance(data, dict):
        raise InputError(who, repr(data)[:80], "a JSON object")
    known = _fields(kind)  # type: ignore[arg-type]
    for name in sorted(data.keys() ^ known.keys()):
        if name not in known:
            raise InputError(who, f"field {name[:60]!r} is unknown", "no field but " + ", ".join(known))
        if whole or known[name].needed:
            raise InputError(who, f"field {name!r} is missing", "all of " + ", ".join(known))
    values = {name: tuple(v) if isinstance(v, list) and known[name].is_tuple else v for name, v in data.items()}
    for name, value in values.items():
        if not known[name].check(value):
            raise InputError(who, f"{name} = {value!r}"[:100], known[name].expected)
    return kind(**values)


@cache
def _fields(kind: Any) -> dict[str, _Field]:
    hints = get_type_hints(kind)
    return {
        one.name: _Field(
            one.default is MISSING and one.default_factory is MISSING,
            any(get_origin(option) is tuple for option in _options(hints[one.name])),
            _check(hints[one.name]),
            _words(hints[one.name]),
        )
        for one in fields(kind)
    }


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union; a type alone otherwise."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _check(hint: Any) -> _Check:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if hint is float:
        return is_number
    if hint in (str, int, bool, NoneType):
        return lambda value: type(value) is hint
    if origin in (Union, UnionType):
        checks = [_check(option) for option in arguments]
        return lambda value: any(check(value) for check in checks)
    if origin in (tuple, list):
        return _sequence(origin, arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of_key, of_value = map(_check, arguments)
        return lambda value: isinstance(value, Mapping) and all(of_key(k) and of_value(v) for k, v in value.items())
    if is_dataclass(hint):
        return lambda value: isinstance(value, hint)  # type: ignore[arg-type]
    raise TypeError(f"no check for {hint}")  # a field of a new type wants one


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a finite number that a float holds (true and false are none)."""
    if type(value) is int:
        return abs(value) < _LARGEST_INTEGER
    return type(value) is float and isfinite(value)


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
    named = [_word(option) for option in _options(hint) if option is not NoneType]
    return " or ".join(named) + (" or null" if NoneType in _options(hint) else "")


def _word(hint: Any) -> str:
    """One type as a reader of JSON calls it: an integer, a list of texts, an object of finite numbers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (tuple, list):
        count = f"{len(arguments)} " if origin is tuple and Ellipsis not in arguments else ""
        return f"a list of {count}{_PLURALS.get(arguments[0], 'values')}"
    if origin is not None:
        return f"an object of {_PLURALS.get(arguments[-1], 'values')}"
    return str(_WORDS.get(hint) or hint.__name__)
