"""Damaged and forged profiles: a clear error or a valid profile, never a traceback nor
a wrong number.
"""

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import made_profiles as made
import numpy as np
import pytest
from fuzz.damage import bytes_damaged, json_damaged, json_text
from hypothesis import HealthCheck, given, settings

from quantbench.errors import InputError, QuantbenchError
from quantbench.profile import Profile, ProfileEstimates
from quantbench.profile import file as profile_file
from quantbench.profile.file import digest
from quantbench.workload import TransformerShape

ASKED_M, ASKED_N, ASKED_K = [2048, 2000, 1, 70000], [6144, 6000, 1, 70000], [2048, 2000, 1, 70000]


@cache
def small() -> Profile:
    """A profile with everything in it but a large learner, so that a hundred of them take
    seconds.
    """
    whole = made.profile()
    attention = whole.models.attention
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


EXAMPLES = settings(
    max_examples=int(os.environ.get("QUANTBENCH_FUZZ_EXAMPLES", "100")), deadline=None, database=None,
    derandomize="QUANTBENCH_FUZZ_EXAMPLES" not in os.environ, suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile on disk."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    small().save(path)
    return path


@pytest.mark.slow
def test_damaged_profiles(path: Path) -> None:
    """Bytes, and values of the document without a new digest: no number may change unseen."""
    raw = path.read_bytes()
    seen: Counter[str] = Counter()

    @EXAMPLES
    @given(bytes_damaged(raw) | json_damaged(json.loads(raw)).map(json_text))
    def load(content: bytes) -> None:
        path.with_name("damaged.json").write_bytes(content)
        what, found = outcome(path.with_name("damaged.json"))
        seen[what] += 1
        assert found is None or same_numbers(found)

    load()
    assert seen["refused"] > 0.8 * seen.total()


@pytest.mark.slow
def test_forged_profiles(path: Path) -> None:
    """With a digest that fits: what loads answers with finite times or a clear error."""
    seen: Counter[str] = Counter()

    @EXAMPLES
    @given(json_damaged(json.loads(path.read_bytes())))
    def load(data: Any) -> None:
        if isinstance(data, dict):
            with suppress(ValueError, TypeError):
                data = data | {"sha256": digest(data)}
        path.with_name("forged.json").write_bytes(json_text(data))
        what, found = outcome(path.with_name("forged.json"))
        seen[what] += 1
        if found is not None:
            seen[asked(found)] += 1

    load()
    assert min(seen["refused"], seen["answered"]) > 2


@pytest.mark.slow
def test_damaged_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_file, "MOST_ROWS_INLINE", 5)
    path, beside = tmp_path / "profile.json", tmp_path / "profile.gemm.parquet"
    small().save(path)

    @EXAMPLES
    @given(bytes_damaged(beside.read_bytes()))
    def load(content: bytes) -> None:
        beside.write_bytes(content)
        what, found = outcome(path)
        assert what == "refused" or (found is not None and same_numbers(found))

    load()


@pytest.mark.slow
def test_forged_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of other types, names and figures, whole files with a digest that fits."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(profile_file, "MOST_ROWS_INLINE", 5)
    path, beside = tmp_path / "profile.json", tmp_path / "profile.gemm.parquet"
    small().save(path)
    text, table = path.read_text(), pq.read_table(beside)
    rng, rows = np.random.default_rng(7), table.num_rows
    for at, name in enumerate(table.column_names):
        columns = [
            pa.array(rng.normal(size=rows)), pa.array([None] * rows, pa.float64()),
            pa.array(list(map(str, table.column(name).to_pylist()))), pa.array([float("nan")] * rows),
        ]  # fmt: skip
        forged = [table.set_column(at, name, column) for column in columns]
        for changed in (*forged, table.drop_columns([name]), table.take(rng.permutation(rows))):
            pq.write_table(changed, beside, store_schema=False)
            data = json.loads(text)
            data["tables"]["gemm"]["sha256"] = sha256(beside.read_bytes()).hexdigest()
            path.write_text(json.dumps(data | {"sha256": digest(data)}))
            what, found = outcome(path)
            assert what == "refused" or (found is not None and asked(found) == "answered")
