"""The pages of docs/ and README: every command is understood, every snippet of a user's own kernel
runs.
"""

import json
import os
import re
import shlex
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, python, run

from quantbench.analysis.rules import MARGIN
from quantbench.cli.app import COMMANDS, load
from quantbench.cli.sweep_options import _MAX_TIME_S
from quantbench.device.spec import PEAK_MARGIN
from quantbench.latency.gemm.training import Effort
from quantbench.store.folder import read_run
from quantbench.store.schema import schema
from tools.accuracy.page import conclusion
from tools.guide.api import api_text

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
WORKFLOW = DOCS / "workflow-sample.yml"
ENVIRONMENT = {**os.environ, "QUANTBENCH_DEVICE": "cpu", "PYTHONPATH": f"{ROOT}"}


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks of a language."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.S | re.M)
    return [text for of, text in found if of == language]


def quantbench_lines(text: str) -> list[str]:
    """Every call of quantbench in commands, continued lines joined."""
    joined = text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if not line.lstrip().startswith("#")]
    return [
        found.strip()
        for line in lines
        for found in re.findall(r"(?:^|[\s'\"])(quantbench [a-z][^'#|]*)", line)
    ]


def require_understood(line: str) -> None:
    """The command exists and has every option that the line gives."""
    words = shlex.split(line)[1:]
    assert words[0] in COMMANDS, line
    command: Any = load(words.pop(0))
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, line
        command = command.commands[words.pop(0)]
    known = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert given <= known | {"--help", "-h"}, f"{line}: {sorted(given - known)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_command_of_a_page_is_understood(page: Path) -> None:
    for block in (*blocks(page, ""), *blocks(page, "bash")):
        for line in quantbench_lines(block):
            require_understood(line)


def test_a_command_that_does_not_exist_would_be_found() -> None:
    with pytest.raises(AssertionError):
        require_understood("quantbench compare A B --no-such-option")
    with pytest.raises(AssertionError):
        require_understood("quantbench weigh A")
    assert quantbench_lines("srun bash -c 'quantbench sweep \\\n --shard 1/2'\nx/quantbench y") == [
        "quantbench sweep   --shard 1/2"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_of_a_page_leads_somewhere(page: Path) -> None:
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / path).exists(), path
        # What lies outside docs/ is not on the site, and a strict build refuses to link to it.
        assert page.parent != DOCS or (page.parent / path).resolve().is_relative_to(DOCS), path
    for path in re.findall(
        r"`((?:quantbench|tests|docs)/[\w/-]+\.(?:py|md|yml))`", page.read_text(encoding="utf-8")
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "bash")], ids=lambda page: page.name
)
def test_each_script_of_a_page_is_a_script(page: Path) -> None:
    for script in blocks(page, "bash"):
        done = subprocess.run(
            ["bash", "-n"], input=script, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_sample_workflow_is_one_and_its_commands_exist() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install 'quantbench[dev]'")
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    # YAML 1.1 reads the key `on` as true, as GitHub's documentation warns.
    assert set(workflow) == {"name", True, "jobs"}
    commands = []
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            commands += [step["run"]] if "run" in step else []
    for gate in ("quantbench compare", "quantbench advise", "pytest --benchmark-only"):
        assert any(command.startswith(gate) for command in commands)
    for command in commands:
        for line in quantbench_lines(command):
            require_understood(line)


@pytest.mark.slow
def test_the_options_of_pytest_that_are_named_exist() -> None:
    named = set()
    for text in (
        *(page.read_text(encoding="utf-8") for page in PAGES),
        WORKFLOW.read_text(encoding="utf-8"),
    ):
        named |= set(re.findall(r"--(?:benchmark|device)-[a-z-]+", text))
    said = python("-m", "pytest", "--help", cwd=ROOT)
    assert {"--benchmark-only", "--benchmark-compare-fail", "--device-cache"} <= named
    assert named <= set(re.findall(r"--[a-z-]+", said))


@pytest.mark.slow
def test_a_kernel_of_ones_own_is_timed_as_the_page_says(tmp_path: Path) -> None:
    first, second, _ = blocks(DOCS / "own-kernels.md", "python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 5
    (tmp_path / "test_mine.py").write_text(first + "\n" + second)
    words = "--benchmark-only --benchmark-json=out.json --device-max-time=50ms --device-cache=hot"
    pytest_quiet = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    python(*pytest_quiet, *words.split(), cwd=tmp_path, env=ENVIRONMENT)
    found = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert {each["name"] for each in found} == {"test_my_kernel", "test_past_an_edge"}
    assert all(each["extra_info"]["device"].startswith("cpu-") for each in found)


@pytest.mark.slow
def test_a_provider_of_ones_own_is_swept_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(blocks(DOCS / "own-kernels.md", "python")[2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    quick = "--precision 20% --cache hot --dtype fp32"
    run(f"sweep --dim n=64,96 -m 64 -k 64 {quick} --provider mine:MyGemm,torch")
    (folder,) = tmp_path.glob("results/*/*")
    points = [r for r in read_run(folder).records if r.role == "point"]
    assert {(r.provider, r.workload.n) for r in points} == {  # type: ignore[union-attr]
        (provider, n) for provider in ("mine:MyGemm", "torch.mm") for n in (64, 96)
    }
    assert all(type(r.outcome).__name__ == "Measured" for r in points), [r.outcome for r in points]


# --- what pages say of the code -----------------------------------------------------------------------------------


def test_the_layers_of_contributing_are_those_that_are_enforced() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    enforced = [set(re.findall(r"\w+", layer)) for layer in contracts["contracts"][0]["layers"]]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| package | holds |")[2].partition("\n\n")[0]
    rows = [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in table.splitlines()[2:]]
    # Kernels are a package of their own in a checkout.
    assert [row for row in rows if row != {"kernels"}] == enforced[1:]
    assert enforced[0] == {"__main__"}


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("own-kernels.md", f"more than {PEAK_MARGIN - 1:.0%} above the peak"),
        ("questions.md", f"more than {PEAK_MARGIN - 1:.0%} above the hardware's peak"),
        ("commands.md", f"what breaking it costs is above {MARGIN:.0%}"),
        ("commands.md", f"for {_MAX_TIME_S['cuda']:g} s at most, on a CPU {_MAX_TIME_S['cpu']} s"),
        ("profiles.md", f"of fewer than 150 products with {Effort.of(149).members}"),
    ],
)
def test_pages_state_the_constants_of_the_code(page: str, sentence: str) -> None:
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    assert sentence.replace("%", " %") in text


def test_the_accuracy_page_begins_with_the_conclusion_from_its_tables() -> None:
    page = (DOCS / "accuracy.md").read_text(encoding="utf-8")
    head, _, rest = page.partition("<!-- conclusion:begin -->\n")
    assert head.count("\n") <= 3
    assert rest.partition("<!-- conclusion:end -->")[0] == conclusion(page)
    lines = page.partition("<!-- lines:begin -->")[2].partition("<!-- lines:end -->")[0]
    worse = re.sub(r"\| ([\d.]+) / ", r"| 9\1 / ", lines)
    assert conclusion(page.replace(lines, worse)) != conclusion(page)


# --- the site ----------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_sites_navigation() -> None:
    config = (DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8")
    in_navigation = re.findall(r"([\w-]+\.md)", config.partition("\nnav:\n")[2])
    assert sorted(in_navigation) == sorted(page.name for page in DOCS.glob("*.md"))


def test_every_command_has_its_how_to() -> None:
    sections = re.findall(r"^## (.+)$", (DOCS / "commands.md").read_text(encoding="utf-8"), re.M)
    assert sorted(sections) == sorted(COMMANDS)
    shown = quantbench_lines("\n".join(blocks(DOCS / "commands.md", "")))
    assert {line.split()[1] for line in shown} | {"comm"} == set(COMMANDS)


def test_the_formats_page_names_every_field() -> None:
    text = (DOCS / "formats.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", text)) | set(re.findall(r"`(\w+): ", text))
    for name in ("run", "record"):
        properties = schema(name)["properties"]
        assert set(properties) <= named, sorted(set(properties) - named)
    for outcome in schema("record")["properties"]["outcome"]["anyOf"]:
        assert set(outcome["properties"]) <= named
    measured = schema("record")["properties"]["outcome"]["anyOf"][0]
    assert set(measured["properties"]["measurement"]["properties"]) <= named


def test_the_snippets_of_the_reference_pages_run(capsys: pytest.CaptureFixture[str]) -> None:
    (imports,) = blocks(DOCS / "api.md", "python")
    exec(compile(imports, "api.md", "exec"), {})
    space: dict[str, Any] = {}
    (reading,) = blocks(DOCS / "formats.md", "python")
    exec(compile(reading, "formats.md", "exec"), space)
    space["print_times"](next((ROOT / "results").glob("cpu-*/*")))
    assert capsys.readouterr().out.count("Interval(low=") > 10


@pytest.mark.parametrize(
    "name", re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
)
def test_each_name_of_the_reference_exists_and_says_what_it_is(name: str) -> None:
    try:
        found: Any = import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        found = getattr(import_module(module), attribute)
    assert found.__doc__


def test_the_list_of_the_reference_is_that_of_the_code() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert api_text(page) in page


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip(
        "mkdocstrings", reason="needs the site's generator: pip install 'quantbench[docs]'"
    )
    config = DOCS / "site" / "mkdocs.yml"
    words = f"-m mkdocs build --strict --quiet -f {config} -d {tmp_path}"
    python(*words.split(), cwd=ROOT)
    pages = {page.stem for page in tmp_path.glob("*.html")} - {"404"}
    assert pages == {page.stem for page in DOCS.glob("*.md")}
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert "quantbench.quantization.quantize" in api
    assert '<span class="gp">' in api  # examples are shown as code
    for page in tmp_path.glob("*.html"):
        assert not re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"https?://", page.read_text(encoding="utf-8")
        )
