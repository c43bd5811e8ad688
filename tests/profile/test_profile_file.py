"""Profiles on disk: the same runs give the same bytes, and whatever was changed since is refused in
one line.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import made_profiles as made
import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError, StoreError
from quantbench.latency.attention import AttentionModel
from quantbench.profile import Profile
from quantbench.profile.file import digest
from quantbench.profile.models import Models, models_from_json, models_to_json
from quantbench.profile.schema import schema

A_TIME = repr(float(made.profile().tables["gemm"]["latency_us"][3]))


def saved(folder: Path, profile: Profile | None = None) -> Path:
    path = folder / "profile.json"
    (profile or made.profile()).save(path)
    return path


@cache
def large() -> Profile:
    """More rows than stand in the JSON."""
    return Profile.from_runs([made.run(made.rows_beyond(2100))], fit=False)


def change(path: Path, how: Any) -> None:
    """Changes the document and gives it the digest of what it now holds, as a forger would."""
    data = json.loads(path.read_text())
    how(data)
    path.write_text(json.dumps(data | {"sha256": digest(data)}))


def same(a: Profile, b: Profile) -> bool:
    parts = ("device", "provenance", "cliffs", "findings")
    equal = all(getattr(a, name) == getattr(b, name) for name in parts)
    tables = all(
        np.array_equal(a.tables[kind][name], b.tables[kind][name])
        for kind in a.tables for name in a.tables[kind].columns
    )  # fmt: skip
    answer, other = (p.gemm([1000, 2048], [3000, 6144], [500, 2048]) for p in (a, b))
    return equal and tables and np.array_equal(answer.latency_us, other.latency_us)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    assert same(Profile.load(saved(tmp_path)), made.profile())
    assert same(Profile.load(tmp_path), made.profile())  # the folder will do


def test_the_same_runs_give_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    first = made.run(made.gemm_records(), "first")
    second = made.run(made.other_records(), "second")
    texts = set()
    for runs in ([first, second], [second, first]):
        path = tmp_path / "profile.json"
        Profile.from_runs(runs, fit=False).save(path)
        texts.add(path.read_bytes())
    assert len(texts) == 1


@pytest.mark.slow
def test_large_tables_stand_beside_it_and_their_bytes_are_the_same(tmp_path: Path) -> None:
    profile = large()
    path = saved(tmp_path, profile)
    beside = tmp_path / "profile.gemm.parquet"
    content = beside.read_bytes()
    entry = json.loads(path.read_text())["tables"]["gemm"]
    assert (entry["file"], entry["num_rows"]) == (beside.name, 2100)
    assert same(Profile.load(path), profile)
    saved(tmp_path, Profile.load(path))
    assert beside.read_bytes() == content
    jsonschema.validate(json.loads(path.read_text()), schema())


@pytest.mark.slow
def test_it_holds_to_its_published_schema(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    data = json.loads(saved(tmp_path).read_text())
    jsonschema.validate(data, schema())
    for part in ({"provenance": {}}, {"version": 1}, {"another": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(data | part, schema())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda text: text[: len(text) // 2], "expected a whole JSON file"),
        (lambda text: '{"format": "quantbench-run"}', "with format 'quantbench-run'"),
        (lambda text: "[" * 100_000, "expected a whole JSON file"),
        (lambda text: text.replace('"version": 2', '"version": 3'), "version = 3; expected 2"),
        (lambda text: text.replace('"version": 2', '"version": "2"'), "version = '2'; expected 2"),
        (lambda text: text.replace(A_TIME, f"1{A_TIME}"), "its sha256 is not that of its content"),
        (lambda text: text.replace(A_TIME, "NaN"), "."),
        (lambda text: text.replace(A_TIME, "1e999"), "."),
    ],
)
def test_truncated_foreign_and_changed_files(
    tmp_path: Path, how: Callable[[str], str], said: str
) -> None:
    path = saved(tmp_path)
    text = path.read_text()
    # Spaces and the order of names are no change.
    path.write_text(json.dumps(json.loads(text), indent=4, sort_keys=True))
    assert same(Profile.load(path), made.profile())
    path.write_text(how(text))
    assert path.read_text() != text
    with pytest.raises((InputError, StoreError), match=said):
        Profile.load(path)
    with pytest.raises(StoreError, match="No such file"):
        Profile.load(tmp_path / "other.json")


def test_parquet_damaged_missing_or_swapped(tmp_path: Path) -> None:
    path = saved(tmp_path, large())
    beside = tmp_path / "profile.gemm.parquet"
    content = beside.read_bytes()

    def refused(said: str) -> None:
        with pytest.raises((InputError, StoreError), match=said):
            Profile.load(path)

    beside.write_bytes(content[:-1])
    refused(r"sha256 is not what profile\.json says")
    beside.unlink()
    refused(r"expected the Parquet file beside profile\.json")
    beside.write_bytes(content)
    change(path, lambda data: data["tables"]["gemm"].update(num_rows=3))
    refused(r"2100 rows in profile\.gemm\.parquet; expected 3 rows")
    change(path, lambda data: data["tables"]["gemm"].update(file="../profile.gemm.parquet"))
    refused("expected the name of a file beside the profile")


def set_row(kind: str, column: str, value: object) -> Any:
    def how(data: dict[str, Any]) -> None:
        table = data["tables"][kind]
        table["rows"][0][table["columns"].index(column)] = value

    return how


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (set_row("gemm", "latency_us", -3.0), r"row 0: .* around -3 µs; expected finite times above 0"),
        (set_row("gemm", "latency_us", "3"), r"latency_us = '3'; expected float values"),
        (set_row("gemm", "m", True), r"m = True; expected int values"),
        (set_row("gemm", "m", 10**40), r"m of .* type object; expected a list of int values"),
        (set_row("gemm", "m", 0), r"row 0: m = 0; expected an integer from 1 to 2147483647"),
        (set_row("gemm", "m", 4096), r"out of order, or there twice"),
        (set_row("gemm", "dtype", "bf17"), r"row 0: dtype = 'bf17'; expected one of fp16"),
        (set_row("gemm", "grade", "rejected"), r"grade 'rejected'; expected one of A, B, C, D"),
        (set_row("gemm", "provider", ""), r"provider ''; expected a provider"),
        (set_row("attention", "kv_heads", 5), r"kv_heads = 5; expected a divisor of heads = 32"),
        (set_row("collective", "num_nodes", 3), r"num_nodes = 3; expected a divisor of num_gpus"),
        (lambda data: data["device"].update(sm_count=0), r"sm_count = 0; expected a number from 1 to 1024"),
        (lambda data: data["device"].pop("l2_bytes"), r"field 'l2_bytes' is missing"),
        (lambda data: data["device"].update(name="h100-sxm5-80gb"), r"products on h100-sxm5-80gb; expected a model"),
        (lambda data: data["provenance"].update(runs=5), r"Provenance: runs = 5; expected a list of objects"),
        (lambda data: data["software"].update(torch=2.11), r"software = .*2\.11.*; expected an object of texts"),
        (lambda data: data["tables"].pop("softmax"), r"tables of other kinds; expected gemm, softmax"),
        (lambda data: data["findings"][0].update(effect="big"), r"Verdict: effect = 'big'; expected a finite"),
        (lambda data: data["models"]["gemm"][0].update(rows=5), r"profile model of products: a model of bf16"),
        (lambda data: data["models"]["gemm"][0].update(model="AAAA"), r"damaged"),
        (lambda data: data["models"]["attention"][0]["prefill"].update(family="fa9"), r"broken model"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_even_when_signed(tmp_path: Path, how: Any, message: str) -> None:
    path = saved(tmp_path)
    change(path, how)
    with pytest.raises((InputError, StoreError), match=message):
        Profile.load(path)


def test_a_number_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    whole = made.profile()
    model = replace(whole.models.gemm[0], provenance={"held_out": {"median_pct": float("nan")}})
    odd = replace(whole, models=replace(whole.models, gemm=(model,)))
    with pytest.raises(
        InputError, match=r"^write profile: .*profile\.json .*; expected finite numbers$"
    ):
        odd.save(tmp_path / "profile.json")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="expected a folder that can be written"):
        made.profile().save(tmp_path / "file" / "profile.json")


def test_a_gpu_without_bf16_keeps_its_model_of_attention() -> None:
    device = lookup("v100-sxm2-16gb")
    models = Models(attention=AttentionModel.best(device))
    assert (
        models_from_json(json.loads(json.dumps(models_to_json(models))), device).attention
        is not None
    )
