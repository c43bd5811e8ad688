"""Module docstrings: the names after "Entry points:" exist, and the modules after "used by" import the module."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("quantbench", *parts) if parts[0] == "kernels" else parts).removesuffix(".__init__")


PATHS = [path for folder in ("quantbench", "kernels", "tools") for path in (ROOT / folder).rglob("*.py")]
SOURCES = {dotted(path): path.read_text(encoding="utf-8") for path in PATHS}
MODULES = {module: ast.parse(source) for module, source in SOURCES.items()}


@cache
def words(module: str) -> frozenset[str]:
    """Words of the module's code, without its docstring."""
    return frozenset(re.findall(r"\w+", SOURCES[module].split('"""', 2)[-1]))


@cache
def imported(module: str) -> frozenset[str]:
    """Modules from which the module imports, directly or through the names that a package passes on."""
    imports = [node for node in ast.walk(MODULES[module]) if isinstance(node, ast.ImportFrom)]
    found = {f"{node.module}{name}" for node in imports for name in ("", *(f".{each.name}" for each in node.names))}
    packages = {path for path in found if any(other.startswith(f"{path}.") for other in MODULES)} & MODULES.keys()
    return frozenset(found.union(*(imported(path) for path in packages - {module})))


def mistakes(module: str, docstring: str) -> list[str]:
    """Names in backticks that the module does not have, and those after "used by" that do not import it."""
    docstring = re.sub(r"\.[A-Z]\w*`", "`", docstring)  # `module.Class` names the module
    parents = ["", *(module.rsplit(".", count)[0] + "." for count in range(module.count(".") + 1))]
    homes = [module, *(parent[:-1] for parent in parents if parent[:-1] in MODULES)]
    users = [other for other in MODULES if any(f"{path}.".startswith(f"{module}.") for path in imported(other))]
    found = []
    for text in re.findall(r"^(?:Entry points?:|Used by)\s.*?(?=\n\n|\Z)", docstring, re.S | re.M):
        for own, using in re.findall(r"(.*?)(?:\bused by\s(.*?))?(?:[.;](?=\s|$)|\)|\Z)", text, re.S | re.I):
            for name in re.findall(r"`([A-Za-z_][\w.]*)`", own):
                is_module = any(parent + name in MODULES for parent in parents)
                found += [] if is_module or any(set(name.split(".")) <= words(home) for home in homes) else [name]
            for name in re.findall(r"`([A-Za-z_][\w.]*)`", using):
                path = "|".join(re.escape(parent + name) for parent in (*parents, "quantbench.cli."))
                is_class = name[0].isupper()
                uses = (
                    re.match(rf"({path})(\b|_)", u) or (is_class and set(name.split(".")) <= words(u)) for u in users
                )
                found += [] if any(uses) else [f"used by {name}"]
    return found


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith("quantbench")))
def test_entry_points_exist_and_users_import_the_module(module: str) -> None:
    assert not mistakes(module, ast.get_docstring(MODULES[module]) or "")


@pytest.mark.parametrize("wrong", ["`Gem`", "`nowhere.Gemm`", "`Gemm`, used by `junit`", "`Gemm`. Used by `junit`"])
def test_a_wrong_name_or_user_is_found(wrong: str) -> None:
    right = "Entry point: `Gemm`, used by `store.record` and the command `comm`."
    assert not mistakes("quantbench.workload.ops", right)
    assert mistakes("quantbench.workload.ops", f"Entry point: {wrong}.")
