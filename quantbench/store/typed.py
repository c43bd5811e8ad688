"""Converts dataclasses to JSON objects and back, with field names and types checked against the
dataclass.

Entry points: `decode`, `encode`, `json_schema`, `is_number`, and the type `Json`. Used by the rest
of `store`, by `profile`, by `importers.training_run`, by `sweep` (messages, options, shape files)
and by `cluster`.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from quantbench.errors import InputError

Json = dict[str, Any]
_T = TypeVar("_T")
# Converts a JSON value to the field's type; raises _WrongTypeError.
_Convert = Callable[[Any], Any]

_WORDS = {str: "a text", int: "an integer", float: "a finite number", bool: "true or false"}
_PLURALS = {str: "texts", int: "integers", float: "finite numbers", bool: "booleans"}
_SCHEMA_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
# Limit of integers in number fields: numpy stores larger ones as objects.
_LARGEST_INTEGER = 2**63


class _WrongTypeError(Exception):
    """A JSON value does not have the declared type."""


@dataclass(frozen=True)
class _Field:
    """Decoder of one field. exact: class whose values need no conversion. expected: the type in
    words, for errors.
    """

    exact: type | None
    convert: _Convert
    expected: str


def decode(kind: type[_T], data: object, who: str = "", *, whole: bool = False) -> _T:
    """Decodes a JSON object into dataclass `kind`; unknown fields are errors.

    Lists become tuples and objects become dataclasses if the field declares them; a dataclass
    instance is kept. Fields with a default may be missing unless `whole`, which applies to nested
    objects too. Raises InputError that names `who` (default: the name of `kind`) and the field.
    """
    if not isinstance(data, dict):
        raise InputError(who or kind.__name__, repr(data)[:80], "a JSON object")
    by_name, needed = _fields(kind, whole)  # type: ignore[arg-type]
    if not needed <= data.keys() <= by_name.keys():
        name = min((data.keys() - by_name.keys()) | (needed - data.keys()))
        problem, expected = ("unknown", "no field but") if name in data else ("missing", "all of")
        what = f"field {name[:60]!r} is {problem}"
        raise InputError(who or kind.__name__, what, f"{expected} {', '.join(by_name)}")
    values = {}
    for name, value in data.items():
        field = by_name[name]
        if type(value) is not field.exact:
            try:
                value = field.convert(value)
            except _WrongTypeError:
                raise InputError(
                    who or kind.__name__, f"{name} = {value!r}"[:100], field.expected
                ) from None
        values[name] = value
    return kind(**values)


def encode(value: Any) -> Any:
    """Encodes a dataclass, mapping, list or tuple as JSON, recursively. Returns other values
    unchanged.

    A class with a constant `kind`, such as a workload, is encoded with it.
    """
    if is_dataclass(value):
        kind = {} if _kind_of(type(value)) is None else {"kind": _kind_of(type(value))}
        return kind | {one.name: encode(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, list | tuple) else value


def _kind_of(option: Any) -> str | None:
    """Returns the constant `kind`, which tells the classes of a union apart; None if the class has
    none.
    """
    kind = getattr(option, "kind", None)
    return kind if isinstance(kind, str) and "kind" not in option.__dataclass_fields__ else None


@cache
def _fields(kind: Any, whole: bool = False) -> tuple[Mapping[str, _Field], frozenset[str]]:
    """Returns the decoders of a dataclass's fields by name, and the names of the required
    fields.
    """
    hints = get_type_hints(kind)
    by_name = {}
    for name, hint in ((one.name, hints[one.name]) for one in fields(kind)):
        exact = next(
            (
                one
                for one in _options(hint)
                if one in (str, int, bool, NoneType) or is_dataclass(one)
            ),
            None,
        )
        by_name[name] = _Field(exact, _converter(hint, whole), _words(hint))
    bare = (
        one.name
        for one in fields(kind)
        if one.default is MISSING and one.default_factory is MISSING
    )
    return by_name, frozenset(by_name if whole else bare)


def _options(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _converter(hint: Any, whole: bool) -> _Convert:
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
        of_item, a_list = (
            _converter(arguments[0], whole),
            _checked(lambda value: type(value) in (list, origin)),
        )
        return lambda value: origin(map(of_item, a_list(value)))
    if origin is tuple:
        items = [_converter(argument, whole) for argument in arguments]
        as_many = _checked(lambda value: type(value) in (list, tuple) and len(value) == len(items))
        return lambda value: tuple(
            item(one) for item, one in zip(items, as_many(value), strict=True)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of_key, of_value = (_converter(argument, whole) for argument in arguments)
        a_mapping = _checked(lambda value: isinstance(value, Mapping))
        return lambda value: {of_key(k): of_value(v) for k, v in a_mapping(value).items()}
    if is_dataclass(hint):
        return lambda value: value if isinstance(value, hint) else decode(hint, value, whole=whole)  # type: ignore[arg-type]
    raise TypeError(f"no JSON form for {hint}")  # a field of a new type needs one


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a JSON value is a finite float, or an integer below 2⁶³ in magnitude (not a
    boolean).
    """
    if type(value) is int:
        return abs(value) < _LARGEST_INTEGER
    return type(value) is float and isfinite(value)


def _checked(valid: Callable[[Any], bool]) -> _Convert:
    """Returns a function that returns a valid value unchanged, and raises _WrongTypeError for
    others.
    """

    def convert(value: Any) -> Any:
        if valid(value):
            return value
        raise _WrongTypeError

    return convert


def _union(options: tuple[Any, ...], whole: bool) -> _Convert:
    """Converts a union. Of several dataclasses, instances pass, and JSON objects that name the
    class by its `kind`.
    """
    classes = [option for option in options if is_dataclass(option)]
    by_kind = {_kind_of(option): option for option in classes if _kind_of(option) is not None}
    others = [_converter(option, whole) for option in options if not is_dataclass(option)]

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
            return decode(classes[0], value, whole=whole)  # type: ignore[arg-type]
        if (
            isinstance(value, dict)
            and isinstance(value.get("kind"), str)
            and value["kind"] in by_kind
        ):
            rest = {name: item for name, item in value.items() if name != "kind"}
            return decode(by_kind[value["kind"]], rest, f"workload {value['kind']}")  # type: ignore[arg-type]
        raise _WrongTypeError

    return convert


def json_schema(hint: Any, limits: Mapping[tuple[type, str], Json] | None = None) -> Json:
    """Returns the JSON Schema of the values that `decode` accepts for type `hint`.

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
        return {
            "type": "array",
            "prefixItems": items,
            "minItems": len(items),
            "maxItems": len(items),
        }
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": json_schema(arguments[1], limits)}
    hints, kind = get_type_hints(hint), _kind_of(hint)
    tag = {} if kind is None else {"kind": {"const": kind}}
    return {
        "type": "object",
        "properties": tag
        | {
            one.name: json_schema(hints[one.name], limits)
            | (limits or {}).get((hint, one.name), {})
            for one in fields(hint)
        },
        "required": [*tag, *(one.name for one in fields(hint) if one.name in _fields(hint)[1])],
        "additionalProperties": False,
    }


def _words(hint: Any) -> str:
    named = [_word(option) for option in _options(hint) if option is not NoneType]
    return " or ".join(named) + (" or null" if NoneType in _options(hint) else "")


def _word(hint: Any) -> str:
    """Returns the JSON name of a type: an integer, a list of texts, an object of finite numbers."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (tuple, list):
        count = f"{len(arguments)} " if origin is tuple and Ellipsis not in arguments else ""
        return f"a list of {count}{_PLURALS.get(arguments[0], 'objects' if is_dataclass(arguments[0]) else 'values')}"
    if origin is not None:
        return f"an object of {_PLURALS.get(arguments[-1], 'values')}"
    return str(_WORDS.get(hint) or hint.__name__)
