"""JSON objects as dataclasses: what is taken, what is refused, and in which words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest

from quantbench.errors import InputError
from quantbench.store.typed import decode, encode, json_schema
from quantbench.workload import Gemm, Softmax


@dataclass(frozen=True)
class Part:
    name: str
    size: int
    ratio: float = 1.0
    good: bool = True
    texts: tuple[str, ...] = ()
    pair: tuple[int, int] | None = None
    held: Mapping[str, int] = field(default_factory=dict)
    work: Gemm | Softmax | None = None


WHOLE: dict[str, Any] = {
    "name": "a", "size": 2, "ratio": 3, "good": False, "texts": ["x", "y"], "pair": [1, 2], "held": {"m": 4},
    "work": None,
}  # fmt: skip


def test_a_whole_object_is_the_dataclass_with_lists_as_tuples() -> None:
    found = decode(Part, WHOLE)
    assert found == Part("a", 2, 3, False, ("x", "y"), (1, 2), {"m": 4})
    assert decode(Part, WHOLE, whole=True) == found


def test_what_has_a_default_may_be_missing_unless_the_whole_is_wanted() -> None:
    assert decode(Part, {"name": "a", "size": 2}) == Part("a", 2)
    with pytest.raises(
        InputError, match=r"^part: field 'good' is missing; expected all of name, size, ratio, good"
    ):
        decode(Part, {"name": "a", "size": 2}, "part", whole=True)


def test_a_nested_dataclass_is_taken_as_it_is() -> None:
    work = Gemm(1, 2, 3)
    assert decode(Part, {**WHOLE, "work": work}).work is work


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "Part: name = 1; expected a text"),
        ({"size": True}, "Part: size = True; expected an integer"),
        ({"size": 2.0}, "Part: size = 2.0; expected an integer"),
        ({"ratio": float("nan")}, "Part: ratio = nan; expected a finite number"),
        ({"ratio": float("inf")}, "Part: ratio = inf; expected a finite number"),
        ({"ratio": 2**63}, f"Part: ratio = {2**63}; expected a finite number"),
        ({"good": 1}, "Part: good = 1; expected true or false"),
        ({"texts": ["x", None]}, "Part: texts = ['x', None]; expected a list of texts"),
        ({"texts": "xy"}, "Part: texts = 'xy'; expected a list of texts"),
        ({"pair": [1]}, "Part: pair = [1]; expected a list of 2 integers or null"),
        ({"held": {"m": "4"}}, "Part: held = {'m': '4'}; expected an object of integers"),
        (
            {"work": {"kind": "gem"}},
            "Part: work = {'kind': 'gem'}; expected Gemm or Softmax or null",
        ),
        ({"odd": 1}, "Part: field 'odd' is unknown; expected no field but name, size"),
    ],
)
def test_anything_else_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        decode(Part, {**WHOLE, **change})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_no_object_is_refused(data: object) -> None:
    with pytest.raises(InputError, match=r"; expected a JSON object$"):
        decode(Part, data)


@dataclass(frozen=True)
class Whole:
    part: Part
    parts: tuple[Part, ...] = ()
    other: Part | None = None


def test_nested_objects_become_their_dataclasses_and_back() -> None:
    part = {"name": "a", "size": 2}
    found = decode(Whole, {"part": part, "parts": [part, WHOLE], "other": None})
    assert found == Whole(Part("a", 2), (Part("a", 2), decode(Part, WHOLE)))
    assert decode(Whole, encode(found), whole=True) == found
    with pytest.raises(InputError, match=r"^Part: field 'good' is missing"):
        decode(Whole, {"part": part, "parts": [], "other": None}, whole=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part": {"name": "a", "size": "2"}}, "Part: size = '2'; expected an integer"),
        ({"part": None}, "Part: None; expected a JSON object"),
        ({"parts": [{"name": "a", "size": 2, "odd": 1}]}, "Part: field 'odd' is unknown"),
        ({"parts": {}}, "Whole: parts = {}; expected a list of objects"),
        ({"other": 3}, "Whole: other = 3; expected Part or null"),
    ],
)
def test_what_is_wrong_within_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        decode(Whole, {"part": {"name": "a", "size": 2}, **change})
    assert str(caught.value).startswith(message)


def test_the_schema_takes_what_the_decoder_takes() -> None:
    validator = jsonschema.Draft202012Validator(
        json_schema(Whole, {(Part, "size"): {"minimum": 1}})
    )
    validator.check_schema(validator.schema)
    part = {"name": "a", "size": 2, "pair": [1, 2], "held": {"m": 4}}
    assert validator.is_valid({"part": part, "parts": [part], "other": None})
    for wrong in (
        {"size": 0},
        {"size": "2"},
        {"pair": [1]},
        {"held": {"m": "4"}},
        {"texts": "xy"},
        {"odd": 1},
    ):
        assert not validator.is_valid({"part": part | wrong})
    assert not validator.is_valid({"part": {"name": "a"}})


@dataclass(frozen=True)
class Side:
    work: Gemm | Softmax | None = None


def test_classes_with_a_kind_are_told_apart_by_it() -> None:
    side = Side(Softmax(2, 64, 64))
    data = encode(side)
    assert data["work"]["kind"] == "softmax"
    assert decode(Side, data, whole=True) == side
    with pytest.raises(InputError, match="Gemm: field 'k' is missing"):
        decode(Side, {"work": {"kind": "gemm", "m": 1, "n": 2}})
    with pytest.raises(InputError, match=r"Side: work = .*; expected Gemm or Softmax or null"):
        decode(Side, {"work": {"kind": "attention"}})
