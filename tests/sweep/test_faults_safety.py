"""What a file says never leads out of a folder, never runs, and is never unpickled."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzz.targets import made_run
from made_runs import SPEC, record, run, stairs, write
from page_checker import checked

from quantbench.errors import InputError, StoreError
from quantbench.report.page import write_report
from quantbench.store.folder import read_run
from quantbench.workload import Gemm

ESCAPES = (
    "../escaped", "/tmp/escaped", "a/../../escaped", "a\x00b", "..", ".", "", "a\\b", "a\nb", "~root", "-rf",
)  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES)
def test_a_run_id_or_device_from_a_file_is_a_name_or_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, run([record(Gemm(64, 64, 64), (10.0,) * 8, {"n": 64})]))
    info = json.loads((folder / "run.json").read_text())
    for changed in ({"run_id": name}, {"device": {**info["device"], "name": name}}):
        (folder / "run.json").write_text(json.dumps({**info, **changed}))
        with pytest.raises(StoreError, match="expected letters, digits"):
            read_run(folder)
    with pytest.raises(InputError, match="expected letters, digits") as caught:
        replace(SPEC, name=name)
    assert "\n" not in str(caught.value)


# --- HTML --------------------------------------------------------------------------------------------------------

# Breaks out of text, of attributes in either quotes, of comments, of style and of script.
HOSTILE = (
    "</td></style></title>--><script>alert({0})</script>"
    "<img src=x onerror=alert({0})>\"'><b onclick=alert({0})>$\\frac1x$\x1b[31m"
)
# Fields that are checked against what they may be, or that name what they are: nothing hostile gets
# into them.
CHOSEN = (
    "format", "kind", "dtype", "layout", "accumulate", "mask", "direction", "role", "origin", "key", "run_id", "name",
    "letter", "how_ended", "started", "ended", "mode", "cache", "stopped_by", "error",
)  # fmt: skip


def hostile(data: Any, count: Iterator[int], field: str = "") -> Any:
    """The same data with every text that is free, keys of free objects included, replaced."""
    if isinstance(data, dict):
        free = field in ("software", "environment", "source", "options")
        return {
            (HOSTILE.format(next(count)) if free else key): hostile(
                value, count, "" if free else key
            )
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [hostile(value, count, field) for value in data]
    return HOSTILE.format(next(count)) if isinstance(data, str) and field not in CHOSEN else data


def test_every_text_of_a_run_is_escaped_in_its_report(tmp_path: Path) -> None:
    made = write(tmp_path / "made", run(stairs(range(64, 640, 64))))
    count = iter(range(10_000))
    folder = tmp_path / "run"
    folder.mkdir()
    info = hostile(json.loads((made / "run.json").read_text()), count)
    records = [json.loads(line) for line in (made / "records.jsonl").read_text().splitlines()]
    records += [
        json.loads(line) for line in made_run()[1].splitlines()
    ]  # skips, failures and references too
    lines = [json.dumps(hostile(one, count, "record")) for one in records]
    (folder / "run.json").write_text(json.dumps({**info, "options": {}}))
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    assert next(count) > 40
    hostile_run = replace(read_run(folder), warnings=(HOSTILE.format(0),))
    page = checked(write_report(hostile_run, tmp_path / "report").page)
    assert "<script>alert(" in page.text  # shown as text
    assert "\x1b" not in page.text
