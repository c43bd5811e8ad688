"""Module docstrings: "Entry points" names all that others import and "used by" all who do, and both are true."""

import ast
import re
from collections import defaultdict
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # reads every module
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


def paragraphs(docstring: str) -> list[str]:
    """The paragraphs that list entry points and users, each on one line."""
    return [" ".join(text.split()) for text in docstring.split("\n\n") if re.match("Entry points?:|Used by", text)]


def home(module: str, name: str) -> str:
    """The module that defines a name, which a package may pass on."""
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES and name in {each.name for each in node.names}:
            return home(node.module, name)
    return module


@cache
def importers() -> dict[str, dict[str, set[str]]]:
    """By module and public name, the modules that import the name or read it as `module.name`."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for user, tree in MODULES.items():
        aliases = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for each in node.names:
                    if f"{node.module}.{each.name}" in MODULES:
                        aliases[each.asname or each.name] = f"{node.module}.{each.name}"
                    elif node.module in MODULES:
                        found[home(node.module, each.name)][each.name].add(user)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                found[home(aliases[node.value.id], node.attr)][node.attr].add(user)
    return found


def is_listed(user: str, module: str, text: str) -> bool:
    """Whether the text names a user of the module, its package or its command, or says that all of its kind are."""
    parts = user.removeprefix("quantbench.").split(".")
    parts += [parts[-1].split("_")[0]] if parts[0] == "cli" else []
    names = [f"`{'.'.join(parts[i:j])}`" for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
    names += {"cli": [r"commands(?! `)", "every command"], "tools": [r"\b[Tt]ools\b"]}.get(parts[0], [])
    names += ["this package"] if user.rpartition(".")[0] == module.rpartition(".")[0] else []
    return re.search("|".join((*names, "all packages")), text) is not None


def gaps(module: str, docstring: str) -> list[str]:
    """Public names of the module that others import, and their importers, that the docstring leaves out."""
    text = " ".join(paragraphs(docstring))
    listed = {part for name in re.findall(r"`([\w.*]+)`", text) for part in name.split(".")}
    found = set()
    for name, users in importers()[module].items():
        users = {user for user in users if not name.startswith("_") and not f"{module}.".startswith(f"{user}.")}
        found |= {name} if users and not any(fnmatch(name, each) for each in listed) else set()
        found |= {f"used by {user}" for user in users if not is_listed(user, module, text)}
    return sorted(found)


def mistakes(module: str, docstring: str) -> list[str]:
    """Names in backticks that the module does not have, and those after "used by" that do not import it."""
    docstring = re.sub(r"\.[A-Z]\w*`", "`", docstring)  # `module.Class` names the module
    parents = ["", *(module.rsplit(".", count)[0] + "." for count in range(module.count(".") + 1))]
    homes = [module, *(parent[:-1] for parent in parents if parent[:-1] in MODULES)]
    users = [other for other in MODULES if any(f"{path}.".startswith(f"{module}.") for path in imported(other))]
    found = []
    for text in paragraphs(docstring):
        for own, using in re.findall(r"(.*?)(?:\bused by (.*?))?(?:[.;](?= |$)|\)|$)", text, re.I):
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
    docstring = ast.get_docstring(MODULES[module]) or ""
    assert not mistakes(module, docstring)
    assert not gaps(module, docstring)


@pytest.mark.parametrize("wrong", ["`Gem`", "`nowhere.Gemm`", "`Gemm`, used by `junit`", "`Gemm`. Used by `junit`"])
def test_a_wrong_name_or_user_is_found(wrong: str) -> None:
    right = "Entry point: `Gemm`, used by `store.record` and the command `comm`."
    assert not mistakes("quantbench.workload.ops", right)
    assert mistakes("quantbench.workload.ops", f"Entry point: {wrong}.")


def test_a_name_or_user_left_out_is_found() -> None:
    whole = "Entry point: `FORMATS`, `export_profile`. Used by the command `profile`."
    assert not gaps("quantbench.profile.exporters", whole)
    assert gaps("quantbench.profile.exporters", whole.replace("`FORMATS`, ", "")) == ["FORMATS"]
    assert gaps("quantbench.profile.exporters", whole.replace("`profile`", "`plan`"))
