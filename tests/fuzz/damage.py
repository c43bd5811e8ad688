"""Ways to damage a file: bytes turned, cut, doubled and put in; JSON values replaced by what nobody
expects.
"""

import json
from typing import Any

from hypothesis import strategies as st

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, -(2**63), 10**400, 0.0, -0.0, 1e-320, 1e308, float("nan"),
    float("inf"), "", " ", "\x00", "../../etc/passwd", "/etc/passwd", "<script>", "a" * 3000, "𝔲", "\ud800", "1",
    "bf16", [], [[]], [None], [1, "a", {}], {}, {"a": 1}, {"": None},
)  # fmt: skip
ODD_BYTES = (
    b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b",", b'"', b"'", b"nan", b"inf", b"-1", b"1e999",
    b"9" * 400, b"9" * 5000, b"[" * 3000, b"{", b"}", b"\\ud800", "µ²٣".encode(), b"../", b"=", b"|", b"\t",
    b";", b"\x1f\x8b",
)  # fmt: skip


@st.composite
def bytes_damaged(draw: st.DrawFn, seed: bytes) -> bytes:
    """One to four cuts, turns, insertions or doublings."""
    data = seed
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        end = at + draw(st.integers(0, min(40, len(data) - at)))
        odd = draw(st.sampled_from(ODD_BYTES) | st.binary(max_size=8))
        turned = draw(st.binary(min_size=end - at, max_size=end - at))
        here = data[at:end]
        ways = (b"", None, odd + here, turned, here * draw(st.integers(2, 5)))
        way = draw(st.sampled_from(ways))
        data = data[:at] if way is None else data[:at] + way + data[end:]
    return data


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value."""
    found = [path]
    if isinstance(data, dict):
        for key, value in data.items():
            found += _places(value, (*path, key))
    elif isinstance(data, list):
        for number, value in enumerate(data[:20]):
            found += _places(value, (*path, number))
    return found


def _changed(data: Any, path: tuple[Any, ...], value: Any, how: str) -> Any:
    if not path:
        return value
    key, *rest = path
    copy = dict(data) if isinstance(data, dict) else list(data)
    if rest:
        copy[key] = _changed(copy[key], tuple(rest), value, how)
    elif how == "remove":
        del copy[key]
    elif how == "rename" and isinstance(copy, dict):
        copy[f"{key}_"] = copy.pop(key)
    else:
        copy[key] = value
    return copy


@st.composite
def json_damaged(draw: st.DrawFn, data: Any) -> Any:
    """One to three values replaced, removed or renamed. The containers on the way are copies."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(_places(data)))
        value = draw(
            st.sampled_from(ODD_VALUES) | st.integers() | st.floats() | st.text(max_size=6)
        )
        data = _changed(
            data, path, value, draw(st.sampled_from(("replace", "replace", "remove", "rename")))
        )
    return data


def json_text(data: Any) -> bytes:
    """As JSON, with NaN and lone surrogates as Python writes them."""
    return json.dumps(data).encode()
