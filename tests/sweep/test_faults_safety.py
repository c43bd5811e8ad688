"""What a file says never leads out of a folder, never runs, and is never unpickled."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fuzz.targets import made_run
from made_runs import SPEC, record, run, samples, write

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, QuantbenchError, StoreError
from quantbench.report.page import template_text, write_report
from quantbench.store.folder import read_run
from quantbench.workload import Gemm

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*sorted((ROOT / "quantbench").rglob("*.py")), *sorted((ROOT / "kernels").rglob("*.py"))]
ESCAPES = (
    "../escaped",
    "/tmp/escaped",
    "a/../../escaped",
    "a\x00b",
    "..",
    ".",
    "",
    "a\\b",
    "a\nb",
    "~root",
    "-rf",
)


@pytest.mark.parametrize("name", ESCAPES)
def test_a_run_id_from_a_file_is_a_name_or_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, run([record(Gemm(64, 64, 64), (10.0,) * 8, {"n": 64})]))
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "run_id": name}))
    with pytest.raises(StoreError, match="expected letters, digits"):
        read_run(folder)


@pytest.mark.parametrize("name", ESCAPES)
def test_a_device_slug_from_a_file_is_a_name_or_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, run([record(Gemm(64, 64, 64), (10.0,) * 8, {"n": 64})]))
    info = json.loads((folder / "run.json").read_text())
    info["device"]["name"] = name
    (folder / "run.json").write_text(json.dumps(info))
    with pytest.raises(StoreError, match="expected letters, digits"):
        read_run(folder)
    with pytest.raises(InputError, match="expected letters, digits"):
        DeviceSpec(name, "cuda", 108, 1410, SPEC.l2_bytes, 0, SPEC.memory_bytes, 2039, {}, (8, 0))


# --- HTML --------------------------------------------------------------------------------------------------------

# Breaks out of text, of attributes in either quotes, of comments, of style and of script.
HOSTILE = "</td></style></title>--><script>alert({0})</script><img src=x onerror=alert({0})>\"'><b onclick=alert({0})>"
# Fields that are checked against what they may be, or that name what they are: nothing hostile gets
# into them.
CHOSEN = (
    "format", "kind", "dtype", "layout", "accumulate", "mask", "direction", "role", "origin", "key", "run_id", "name",
    "letter", "how_ended", "started", "ended", "mode", "cache", "stopped_by",
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


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.handlers: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.handlers += [name for name, _ in attributes if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_every_text_of_a_run_is_escaped_in_its_report(tmp_path: Path) -> None:
    made = write(
        tmp_path / "made",
        run(
            [
                record(Gemm(512, n, 512), samples(n / 10, noise=0.01, count=8, seed=n), {"n": n})
                for n in range(64, 640, 64)
            ]
        ),
    )
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
    page = write_report(read_run(folder), tmp_path / "report").page.read_text(encoding="utf-8")
    own_script = "\n".join(template_text(name) for name in ("uplot.min.js", "charts.js"))
    found = Tags()
    found.feed(page.replace(f"<script>{own_script}</script>", ""))
    assert not found.tags & {"script", "iframe", "object", "embed"}
    assert found.handlers == []
    assert all("alert(" not in tag for tag in found.tags)
    assert "<script>alert(" in "".join(found.text)  # shown as text


# --- no pickle ---------------------------------------------------------------------------------------------------

PICKLES = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
LOADS = {
    ("torch", "load"),
    ("joblib", "load"),
    ("np", "load"),
    ("numpy", "load"),
    ("yaml", "load"),
    ("pd", "read_pickle"),
}


def unsafe(tree: ast.AST) -> list[str]:
    """Whatever could run code that stands in a file."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in PICKLES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PICKLES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                called = (function.value.id, function.attr)
                if called in LOADS and not (called[1] == "load" and _refuses_pickle(node)):
                    found.append(".".join(called))
            if isinstance(function, ast.Name) and function.id in ("eval", "exec"):
                found.append(function.id)
    return found


def _refuses_pickle(call: ast.Call) -> bool:
    """Whether numpy's loader is told that a file may hold arrays only."""
    values = [word.value for word in call.keywords if word.arg == "allow_pickle"]
    return len(values) == 1 and isinstance(values[0], ast.Constant) and values[0].value is False


@pytest.mark.slow
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    found = unsafe(ast.parse(path.read_text(encoding="utf-8")))
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(f)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=trusted)",
        "eval(x)",
        "yaml.load(f)",
    ],
)
def test_it_would_be_found(code: str) -> None:
    assert unsafe(ast.parse(code))


def test_errors_of_hostile_names_are_one_line() -> None:
    with pytest.raises(QuantbenchError) as caught:
        DeviceSpec("a\nb", "cuda", 108, 1410, SPEC.l2_bytes, 0, SPEC.memory_bytes, 2039, {}, (8, 0))
    assert "\n" not in str(caught.value)
