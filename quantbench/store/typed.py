"""Dataclasses from JSON objects and back: `decode` checks names and types by the dataclass, `encode` writes.

`json_schema` describes what `decode` takes. Runs, profiles, worker messages, options and shape files use them.
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
# Returns a JSON value as the field's type has it; raises _WrongTypeError.
_Convert = Callable[[Any], Any]

_WORDS = {str: "a text", int: "an integer", float: "a finite number", bool: "true or false"}
_PLURALS = {str: "texts", int: "integers", float: "finite numbers", bool: "booleans"}
_SCHEMA_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
# An integer where a number is declared: beyond this, numpy would keep it as an object.
_LARGEST_INTEGER = 2**63


class _WrongTypeError(Exception):
    """A JSON value is not of the declared type."""


@dataclass(frozen=True)
class _Field:
    """exact: values of this class need no conversion. is_tuple: a JSON list of it becomes a tuple. expected: its type,
    in words."""

    exact: type | None
    convert: _Convert
    is_tuple: bool
    expected: str


@dataclass(frozen=True)
class _Fields:
    """The fields of a dataclass by name, and the names of those without a default."""

    by_name: Mapping[str, _Field]
    needed: frozenset[str]


def decode(kind: type[_T], data: object, who: str = "", *, whole: bool = False) -> _T:
    """A dataclass from a JSON object that holds its fields and no others, each of its declared type.

    Lists become tuples, and objects become dataclasses, where these are declared. A field that holds the dataclass
    already is taken as it is. A field with a default may be missing, unless `whole`. Raises InputError that names `who`
    (the dataclass, unless given) and the field.
    """
    if not isinstance(data, dict):
        raise InputError(who or kind.__name__, repr(data)[:80], "a JSON object")
    known = _fields(kind)  # type: ignore[arg-type]
    by_name, names = known.by_name, data.keys()
    if not (names == by_name.keys() if whole else known.needed <= names <= by_name.keys()):
        raise _wrong_names(known, data, who or kind.__name__, whole)
    values = {}
    for name, value in data.items():
        field = by_name[name]
        if type(value) is not field.exact:
            try:
                value = field.convert(value)
            except _WrongTypeError:
                shown = tuple(value) if field.is_tuple and isinstance(value, list) else value
                raise InputError(who or kind.__name__, f"{name} = {shown!r}"[:100], field.expected) from None
        values[name] = value
    return kind(**values)


def encode(value: Any) -> Any:
    """The JSON form of a dataclass (an object of its fields), mapping or sequence; other values as they are."""
    if is_dataclass(value):
        return {one.name: encode(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, list | tuple) else value


def _wrong_names(known: _Fields, data: Json, who: str, whole: bool) -> InputError:
    """The error for the first field that is unknown or missing."""
    allowed, needed = known.by_name.keys(), known.by_name.keys() if whole else known.needed
    name = min((data.keys() - allowed) | (needed - data.keys()))
    if name in data:
        return InputError(who, f"field {name[:60]!r} is unknown", "no field but " + ", ".join(allowed))
    return InputError(who, f"field {name!r} is missing", "all of " + ", ".join(allowed))


@cache
def _fields(kind: Any) -> _Fields:
    hints = get_type_hints(kind)
    by_name = {one.name: _field(hints[one.name]) for one in fields(kind)}
    return _Fields(
        by_name,
        frozenset(one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING),
    )


def _field(hint: Any) -> _Field:
    options = _options(hint)
    exact = next((option for option in options if option in (str, int, bool, NoneType) or is_dataclass(option)), None)
    return _Field(exact, _converter(hint), any(get_origin(option) is tuple for option in options), _words(hint))


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union; a type alone otherwise."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _converter(hint: Any) -> _Convert:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint is float:
        return _number
    if hint in (str, int, bool, NoneType):
        return _instance(hint)
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return _sequence(origin, _converter(arguments[0]))
    if origin is tuple:
        return _fixed_tuple([_converter(argument) for argument in arguments])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*map(_converter, arguments))
    if is_dataclass(hint):
        return lambda value: value if isinstance(value, hint) else decode(hint, value)  # type: ignore[arg-type]
    raise TypeError(f"no JSON form for {hint}")  # a field of a new type needs one


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a finite number that a float holds (true and false are none)."""
    if type(value) is int:
        return abs(value) < _LARGEST_INTEGER
    return type(value) is float and isfinite(value)


def _number(value: Any) -> Any:
    if is_number(value):
        return value
    raise _WrongTypeError


def _instance(kind: type) -> _Convert:
    def convert(value: Any) -> Any:
        if type(value) is kind:
            return value
        raise _WrongTypeError

    return convert


def _union(options: tuple[Any, ...]) -> _Convert:
    """Of several dataclasses only instances are taken: an object does not tell which it is."""
    classes = [option for option in options if is_dataclass(option)]
    others = [_converter(option) for option in options if not is_dataclass(option)]

    def convert(value: Any) -> Any:
        for kind in classes:
            if isinstance(value, kind):  # type: ignore[arg-type]
                return value
        for other in others:
            try:
                return other(value)
            except _WrongTypeError:
                continue
        if len(classes) == 1 and isinstance(value, dict):
            return decode(classes[0], value)  # type: ignore[arg-type]
        raise _WrongTypeError

    return convert


def _sequence(kind: type, item: _Convert) -> _Convert:
    allowed = (list,) if kind is list else (list, tuple)

    def convert(value: Any) -> Any:
        if type(value) not in allowed:
            raise _WrongTypeError
        return kind(map(item, value))

    return convert


def _fixed_tuple(items: list[_Convert]) -> _Convert:
    def convert(value: Any) -> Any:
        if type(value) not in (list, tuple) or len(value) != len(items):
            raise _WrongTypeError
        return tuple(item(one) for item, one in zip(items, value, strict=True))

    return convert


def _mapping(of_key: _Convert, of_value: _Convert) -> _Convert:
    def convert(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _WrongTypeError
        return {of_key(k): of_value(v) for k, v in value.items()}

    return convert


def json_schema(hint: Any, limits: Mapping[tuple[type, str], Json] | None = None) -> Json:
    """The JSON Schema of what `decode` takes for a type.

    limits: by class and field, what the class checks beyond the type (`{(Grade, "letter"): {"enum": [...]}}`).
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _SCHEMA_TYPES:
        return {"type": _SCHEMA_TYPES[hint]}
    if origin in (Union, UnionType):
        return {"anyOf": [json_schema(option, limits) for option in arguments]}
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return {"type": "array", "items": json_schema(arguments[0], limits)}
    if origin is tuple:
        items = [json_schema(argument, limits) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": json_schema(arguments[1], limits)}
    hints = get_type_hints(hint)
    return {
        "type": "object",
        "properties": {
            one.name: json_schema(hints[one.name], limits) | (limits or {}).get((hint, one.name), {})
            for one in fields(hint)
        },
        "required": [one.name for one in fields(hint) if one.name in _fields(hint).needed],
        "additionalProperties": False,
    }


def _words(hint: Any) -> str:
    named = [_word(option) for option in _options(hint) if option is not NoneType]
    return " or ".join(named) + (" or null" if NoneType in _options(hint) else "")


def _word(hint: Any) -> str:
    """One type as a reader of JSON calls it: an integer, a list of texts, an object of finite numbers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (tuple, list):
        count = f"{len(arguments)} " if origin is tuple and Ellipsis not in arguments else ""
        return f"a list of {count}{_PLURALS.get(arguments[0], 'objects' if is_dataclass(arguments[0]) else 'values')}"
    if origin is not None:
        return f"an object of {_PLURALS.get(arguments[-1], 'values')}"
    return str(_WORDS.get(hint) or hint.__name__)
