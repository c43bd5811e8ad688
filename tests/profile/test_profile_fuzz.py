"""Two thousand damaged or forged profiles: a clear error or a valid profile, never a traceback nor
a wrong number.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import made_profiles as made
import numpy as np
import pytest

from quantbench.errors import InputError, QuantbenchError
from quantbench.profile import Profile, ProfileEstimates
from quantbench.profile import file as profile_file
from quantbench.profile.file import digest
from quantbench.workload import TransformerShape

VALUES = (
    None,
    True,
    -1,
    0,
    3.7,
    1e308,
    -1e-9,
    10**30,
    "",
    "x",
    "nan",
    [],
    {},
    [1],
    {"a": 1},
    1e-12,
)
ASKED_M, ASKED_N, ASKED_K = [2048, 2000, 1, 70000], [6144, 6000, 1, 70000], [2048, 2000, 1, 70000]


@cache
def small() -> Profile:
    """A profile with everything in it but a large learner, so that two thousand of them take
    seconds.
    """
    whole = made.profile()
    attention = whole.models.attention
    assert attention is not None
    bare = replace(attention.prefill, learner=None)
    small_attention = replace(attention, prefill=bare, decode=None)
    return replace(whole, models=replace(whole.models, attention=small_attention))


def answers(profile: Profile) -> ProfileEstimates:
    found = profile.gemm(ASKED_M, ASKED_N, ASKED_K)
    assert isinstance(found, ProfileEstimates)
    return found


def outcome(path: Path) -> tuple[str, Profile | None]:
    """What loading came to. Anything but an error of the project's own is a bug and passes
    through.
    """
    try:
        found = Profile.load(path)
    except QuantbenchError as error:
        one_line(error)
        return "refused", None
    return "loaded", found


def one_line(error: QuantbenchError) -> None:
    assert "\n" not in str(error)
    assert error.exit_code == 2


def same_numbers(profile: Profile) -> bool:
    tables = all(
        np.array_equal(profile.tables[kind][name], small().tables[kind][name])
        for kind in profile.tables for name in profile.tables[kind].columns
    )  # fmt: skip
    return tables and np.array_equal(answers(profile).latency_us, answers(small()).latency_us)


def flipped(raw: bytes, rng: np.random.Generator) -> bytes:
    """One to three bytes changed, put in or left out."""
    changed = bytearray(raw)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(changed)))
        match rng.integers(3):
            case 0:
                changed[at] ^= 1 << int(rng.integers(8))
            case 1:
                del changed[at]
            case _:
                changed.insert(at, int(rng.integers(256)))
    return bytes(changed)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    found = [path] if path else []
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, child in children:
        found += places(child, (*path, name))
    return found


def mutate(data: Any, path: tuple[Any, ...], rng: np.random.Generator) -> None:
    """Delete what stands at a place, or put something else there."""
    for name in path[:-1]:
        data = data[name]
    here = data[path[-1]]
    number = isinstance(here, int | float) and not isinstance(here, bool)
    match rng.integers(4 if number else 2):
        case 0:
            del data[path[-1]]
        case 1:
            data[path[-1]] = VALUES[rng.integers(len(VALUES))]
        case 2:
            data[path[-1]] = here * [1000, 0.001, -1, 1.5][rng.integers(4)]
        case _:
            data[path[-1]] = here + 1


def by_depth(data: Any, rng: np.random.Generator) -> Callable[[], tuple[Any, ...]]:
    """Draws places so that each part of the document comes up as often as the others, however long
    it is.
    """
    groups: dict[Any, list[tuple[Any, ...]]] = {}
    for path in places(data):
        groups.setdefault(tuple(name for name in path if isinstance(name, str)), []).append(path)
    names = list(groups)

    def draw() -> tuple[Any, ...]:
        group = groups[names[rng.integers(len(names))]]
        return group[rng.integers(len(group))]

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes(tmp_path: Path, seed: int) -> None:
    """150 files with changed bytes, and 75 cut short, for each seed."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "profile.json"
    small().save(path)
    raw = path.read_bytes()
    seen: Counter[str] = Counter()
    for i in range(225):
        path.write_bytes(raw[: rng.integers(len(raw))] if i % 3 == 2 else flipped(raw, rng))
        what, found = outcome(path)
        seen[what] += 1
        assert found is None or same_numbers(found)
    assert seen["refused"] > 215


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_edited_documents(tmp_path: Path, seed: int) -> None:
    """125 for each seed, of which the digest is not mended."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "profile.json"
    small().save(path)
    text = path.read_text()
    draw = by_depth(json.loads(text), rng)
    for _ in range(125):
        data = json.loads(text)
        mutate(data, draw(), rng)
        path.write_text(json.dumps(data))
        _, found = outcome(path)
        assert found is None or same_numbers(found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_forged_documents(tmp_path: Path, seed: int) -> None:
    """125 for each seed, whose digest was made to fit: what loads answers with finite times or a
    clear error.
    """
    rng = np.random.default_rng(100 + seed)
    path = tmp_path / "profile.json"
    small().save(path)
    text = path.read_text()
    draw = by_depth(json.loads(text), rng)
    seen: Counter[str] = Counter()
    for _ in range(125):
        data = json.loads(text)
        mutate(data, draw(), rng)
        try:
            data["sha256"] = digest(data)
        except (ValueError, TypeError):
            continue
        path.write_text(json.dumps(data))
        what, found = outcome(path)
        seen[what] += 1
        if found is not None:
            seen[asked(found)] += 1
    assert seen["refused"] > 40
    assert seen["answered"] > 5


def asked(profile: Profile) -> str:
    try:
        times = [answers(profile).latency_us, profile.softmax(8, [512, 600], [512, 600]).latency_us]
        times.append(profile.attention(1, 32, [512, 600], [512, 600], 128).latency_us)
        times.append(
            np.array([profile.layer(TransformerShape(hidden=1024, heads=8, seq=512)).latency_us])
        )
        profile.gemm(2000, 2000, 2000)
    except InputError as error:
        one_line(error)
        return "refused to answer"
    assert all((np.isfinite(part) & (np.asarray(part) > 0)).all() for part in times)
    return "answered"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_damaged_parquet(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """120 for each seed."""
    monkeypatch.setattr(profile_file, "MOST_ROWS_INLINE", 5)
    rng = np.random.default_rng(seed)
    path = tmp_path / "profile.json"
    small().save(path)
    beside = tmp_path / "profile.gemm.parquet"
    raw = beside.read_bytes()
    for i in range(120):
        beside.write_bytes(raw[: rng.integers(len(raw))] if i % 4 == 3 else flipped(raw, rng))
        what, found = outcome(path)
        assert what == "refused" or (found is not None and same_numbers(found))


@pytest.mark.slow
def test_forged_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of other types, names and figures, whole files with a digest that fits."""
    import hashlib

    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(profile_file, "MOST_ROWS_INLINE", 5)
    path, beside = tmp_path / "profile.json", tmp_path / "profile.gemm.parquet"
    small().save(path)
    text, table = path.read_text(), pq.read_table(beside)
    rng = np.random.default_rng(7)
    rows = table.num_rows
    for _ in range(140):
        name = table.column_names[rng.integers(table.num_columns)]
        at = table.column_names.index(name)
        column: Any = table.column(name).to_pylist()
        match rng.integers(6):
            case 0:
                changed = table.drop_columns([name])
            case 1:
                changed = table.set_column(at, name, pa.array(rng.normal(size=rows)))
            case 2:
                changed = table.set_column(at, name, pa.array([None] * rows, pa.float64()))
            case 3:
                changed = table.set_column(at, name, pa.array([str(value) for value in column]))
            case 4:
                changed = table.take(pa.array(rng.permutation(rows)))
            case _:
                changed = table.set_column(at, name, pa.array([float("nan")] * rows))
        pq.write_table(changed, beside, store_schema=False)
        data = json.loads(text)
        data["tables"]["gemm"]["sha256"] = hashlib.sha256(beside.read_bytes()).hexdigest()
        data["sha256"] = digest(data)
        path.write_text(json.dumps(data))
        what, found = outcome(path)
        assert what == "refused" or (found is not None and asked(found) == "answered")
