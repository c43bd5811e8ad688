"""Dataclasses from JSON objects, strictly: exactly their fields, each of its own type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from math import isfinite
from typing import Any, TypeVar

from quantbench.errors import InputError
from quantbench.workload import workload_from_json

_T = TypeVar("_T")
Json = dict[str, Any]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else isfinite(value)


def _list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _object_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


# By a field's annotation: does a JSON value fit, and what is it called?
_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "str": (_is_text, "a text"),
    "int": (_is_integer, "an integer"),
    "float": (_is_number, "a finite number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "tuple[str, ...]": (_list_of(_is_text), "a list of texts"),
    "tuple[int, int]": (lambda value: _list_of(_is_integer)(value) and len(value) == 2, "two integers"),  # type: ignore[arg-type]
    "Mapping[str, str]": (_object_of(_is_text), "an object of texts"),
    "Mapping[str, int]": (_object_of(_is_integer), "an object of integers"),
    "Mapping[str, float]": (_object_of(_is_number), "an object of finite numbers"),
    "Workload": (lambda value: isinstance(value, dict), "a workload"),
}


def decode(kind: type[_T], data: object, who: str) -> _T:
    """A dataclass of plain fields from its JSON object. Raises InputError that names `who` and the field."""
    if not isinstance(data, dict):
        raise InputError(who, repr(data)[:80], "a JSON object")
    known = _fields_of(kind)  # type: ignore[arg-type]
    if known.keys() != data.keys():
        odd = sorted(known.keys() ^ data.keys())
        what = "missing" if odd[0] in known else "unknown"
        raise InputError(who, f"field {odd[0][:60]!r} is {what}", "exactly " + ", ".join(known))
    return kind(**{name: _value(data[name], annotation, who, name) for name, annotation in known.items()})


@cache
def _fields_of(kind: Any) -> dict[str, tuple[str, bool]]:
    """By field: its type as written, and whether it may be null."""
    found = {}
    for one in fields(kind):
        wanted, _, optional = _annotation(one.type).partition(" | ")
        found[one.name] = wanted, optional == "None"
    return found


def _annotation(given: object) -> str:
    """A field's type as it is written, whether or not its module postpones annotations."""
    text = given.__name__ if isinstance(given, type) else str(given)
    return text.removeprefix("collections.abc.")


def _value(value: object, annotation: tuple[str, bool], who: str, name: str) -> Any:
    wanted, optional = annotation
    if optional and value is None:
        return None
    check, words = _CHECKS[wanted]
    if not check(value):
        raise InputError(f"{who}, {name}", repr(value)[:80], words + (" or null" if optional else ""))
    if wanted == "Workload":
        return workload_from_json(value)
    return tuple(value) if wanted.startswith("tuple") else value  # type: ignore[arg-type]
