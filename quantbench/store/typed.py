"""Converts dataclasses to JSON objects and back, and builds their JSON Schemas.

`decode` checks field names and types against the dataclass. The run and record files are read and
written with this module.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from math import isfinite
from sys import intern
from types import NoneType, UnionType
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from quantbench.errors import InputError

Json = dict[str, Any]
_T = TypeVar("_T")
# Function that converts a JSON value to a field's type. The function raises _WrongTypeError for a
# value of another type.
_Convert = Callable[[Any], Any]

# Names of the JSON types in error messages.
_WORDS = {
    str: "a text",
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    NoneType: "null",
}
_PLURALS = {str: "texts", int: "integers", float: "finite numbers", bool: "booleans"}
_SCHEMA_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
# Integers in number fields must be below this magnitude, because numpy stores larger integers as
# Python objects.
_LARGEST_INTEGER = 2**63


class _WrongTypeError(Exception):
    """Raised for a JSON value that does not have the declared type."""


@dataclass(frozen=True)
class _Field:
    """Decoder of one field.

    exact: classes whose instances need no conversion.
    convert: function that converts a JSON value to the field's type.
    expected: the field's type in words, for error messages.
    """

    exact: frozenset[type]
    convert: _Convert
    expected: str


def decode(kind: type[_T], data: object, who: str = "", *, whole: bool = False) -> _T:
    """Decodes a JSON object into a dataclass.

    Lists and objects are converted to the declared tuples and dataclasses. A value that is already
    an instance of the declared dataclass is kept. To save memory, equal texts become one object,
    and so do equal instances of a class with the constant `shared`.

    kind: dataclass of the result.
    data: JSON object, as the module json loads it.
    who: name of the object in error messages; by default the name of `kind`.
    whole: whether fields with a default must be present too, also in nested objects.

    Raises InputError, which names `who` and the field, for unknown and missing fields and for
    values of a wrong type.
    """
    who = who or kind.__name__
    if not isinstance(data, dict):
        raise InputError(who, repr(data)[:80], "a JSON object")
    by_name, needed = _fields(kind, whole)  # type: ignore[arg-type]
    names = by_name.keys()
    if data.keys() != names and not needed <= data.keys() <= names:
        name = min((data.keys() - names) | (needed - data.keys()))
        known = ", ".join(names)
        field_name = f"field {name[:60]!r}"
        if name in data:
            raise InputError(who, f"{field_name} is unknown", f"no field but {known}")
        raise InputError(who, f"{field_name} is missing", f"all of {known}")
    values = {}
    for name, value in data.items():
        field = by_name[name]
        if type(value) not in field.exact:
            try:
                value = field.convert(value)
            except _WrongTypeError:
                raise InputError(who, f"{name} = {value!r}"[:100], field.expected) from None
        elif type(value) is str:
            value = intern(value)
        values[name] = value
    return kind(**values)


def _decode_shared(kind: Any, data: object, *, whole: bool) -> Any:
    """Decodes `data`, and returns the same object for equal data.

    The records of a run have few distinct device states and grades, so sharing them saves memory.
    """
    return _decode_text(kind, json.dumps(data), whole)


@lru_cache(maxsize=1024)
def _decode_text(kind: Any, text: str, whole: bool) -> Any:
    """Decodes JSON text. The cache returns the same object for equal texts."""
    return decode(kind, json.loads(text), whole=whole)


def encode(value: Any) -> Any:
    """Encodes a dataclass, mapping, list or tuple as JSON, recursively.

    If a dataclass has a constant `kind`, as workloads do, the kind is encoded too. Values of other
    types are returned unchanged.
    """
    if type(value) in _SCHEMA_TYPES:
        return value
    if isinstance(value, (list, tuple)):
        return list(map(encode, value))
    if hasattr(value, "shared"):
        return _encode_shared(value)
    if is_dataclass(value):
        return _encode_object(value)
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return value


def _encode_object(value: Any) -> Json:
    """Encodes a dataclass as an object of its fields, after `kind` if the class has a kind."""
    kind, names = _names(type(value))  # type: ignore[arg-type]
    tag = {} if kind is None else {"kind": kind}
    return tag | {name: encode(getattr(value, name)) for name in names}


# Equal device states and grades occur in many records and are encoded once.
_encode_shared = lru_cache(maxsize=64)(_encode_object)


@cache
def _names(kind: Any) -> tuple[str | None, tuple[str, ...]]:
    """Returns the constant `kind` of a dataclass (see `_kind_of`) and the names of its fields."""
    return _kind_of(kind), tuple(one.name for one in fields(kind))


def _kind_of(option: Any) -> str | None:
    """Returns the constant `kind` of a class, or None without such a constant.

    The kind distinguishes the classes of a union.
    """
    kind = getattr(option, "kind", None)
    return kind if isinstance(kind, str) and "kind" not in option.__dataclass_fields__ else None


@cache
def _fields(kind: Any, whole: bool = False) -> tuple[Mapping[str, _Field], frozenset[str]]:
    """Returns a dataclass's field decoders by name, and the names of its required fields.

    whole: whether all fields are required.
    """
    hints = get_type_hints(kind)
    by_name = {}
    needed = set()
    for one in fields(kind):
        hint = hints[one.name]
        exact = frozenset(filter(_is_exact, _options(hint)))
        by_name[one.name] = _Field(exact, _converter(hint, whole), _words(hint))
        if whole or (one.default is MISSING and one.default_factory is MISSING):
            needed.add(one.name)
    return by_name, frozenset(needed)


def _is_exact(hint: Any) -> bool:
    """Returns whether instances of a type need no conversion."""
    return hint in (str, int, bool, NoneType) or is_dataclass(hint)


def _options(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _converter(hint: Any, whole: bool) -> _Convert:
    """Returns the function that converts a JSON value to a type.

    whole: whether fields with a default must be present too, as in `decode`.

    Raises TypeError for a type that has no JSON form.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint is float:
        return _checked(is_number)
    if hint in (str, int, bool, NoneType):
        return _checked(lambda value: type(value) is hint)
    if origin in (Union, UnionType):
        return _union(arguments, whole)
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        of_item = _converter(arguments[0], whole)
        a_list = _checked(lambda value: type(value) in (list, origin))
        return lambda value: origin(map(of_item, a_list(value)))
    if origin is tuple:
        items = [_converter(argument, whole) for argument in arguments]
        as_many = _checked(lambda value: type(value) in (list, tuple) and len(value) == len(items))
        return lambda value: tuple(
            item(one) for item, one in zip(items, as_many(value), strict=True)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of_key = _converter(arguments[0], whole)
        of_value = _converter(arguments[1], whole)
        a_mapping = _checked(lambda value: isinstance(value, Mapping))
        return lambda value: {of_key(k): of_value(v) for k, v in a_mapping(value).items()}
    if is_dataclass(hint):
        kind: Any = hint
        made = _decode_shared if hasattr(kind, "shared") else decode
        return lambda value: value if isinstance(value, kind) else made(kind, value, whole=whole)
    raise TypeError(f"no JSON form for {hint}")  # add a branch above for a new type of field


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a JSON value is a finite float, or an integer below 2⁶³ in magnitude.

    A boolean is not a number.
    """
    if type(value) is int:
        return abs(value) < _LARGEST_INTEGER
    return type(value) is float and isfinite(value)


def _checked(valid: Callable[[Any], bool]) -> _Convert:
    """Returns a function that checks a value.

    The function returns a valid value unchanged and raises _WrongTypeError for any other value.
    """

    def convert(value: Any) -> Any:
        if valid(value):
            return value
        raise _WrongTypeError

    return convert


def _union(options: tuple[Any, ...], whole: bool) -> _Convert:
    """Returns the function that converts a JSON value to one of the union's types.

    Instances of the union's dataclasses are kept. A JSON object must have the `kind` of its class
    if the union has several dataclasses.
    """
    classes: Any = tuple(filter(is_dataclass, options))
    by_kind = {_kind_of(option): option for option in classes}
    others = [_converter(option, whole) for option in options if not is_dataclass(option)]

    def convert(value: Any) -> Any:
        if isinstance(value, classes):
            return value
        for other in others:
            try:
                return other(value)
            except _WrongTypeError:
                continue
        if len(classes) == 1 and isinstance(value, dict):
            return decode(classes[0], value, whole=whole)
        rest = dict(value) if isinstance(value, dict) else {}
        kind = rest.pop("kind", None)
        if isinstance(kind, str) and kind in by_kind:
            return decode(by_kind[kind], rest, whole=whole)
        raise _WrongTypeError

    return convert


def json_schema(hint: Any, limits: Mapping[tuple[type, str], Json] | None = None) -> Json:
    """Returns the JSON Schema of the values that `decode` accepts for a type.

    limits: extra schema entries by class and field (`{(Grade, "letter"): {"enum": [...]}}`).
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
        count = len(items)
        return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": json_schema(arguments[1], limits)}
    _, needed = _fields(hint)
    properties = {}
    required = []
    if kind := _kind_of(hint):
        properties["kind"] = {"const": kind}
        required.append("kind")
    for name, of in get_type_hints(hint).items():
        if name in hint.__dataclass_fields__:
            properties[name] = json_schema(of, limits) | (limits or {}).get((hint, name), {})
            if name in needed:
                required.append(name)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _words(hint: Any) -> str:
    """Returns a type's name in JSON, for error messages."""
    return " or ".join(map(_word, _options(hint)))


def _word(hint: Any) -> str:
    """Returns the JSON name of a type that is no union.

    Examples: an integer, a list of texts, an object of finite numbers.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (tuple, list):
        count = f"{len(arguments)} " if origin is tuple and Ellipsis not in arguments else ""
        items = "objects" if is_dataclass(arguments[0]) else "values"
        return f"a list of {count}{_PLURALS.get(arguments[0], items)}"
    if origin is not None:
        return f"an object of {_PLURALS.get(arguments[-1], 'values')}"
    return str(_WORDS.get(hint) or hint.__name__)
