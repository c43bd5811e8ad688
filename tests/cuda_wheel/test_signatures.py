"""Every name of torch, triton and pynvml in the project's source exists in what is installed, and
every call of one has arguments that it takes, as far as it tells its signature."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.version.cuda is None:
    pytest.skip("this torch is no CUDA build; see make test-cuda-wheel", allow_module_level=True)

from quantbench.kernels.launching import TRITON
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for folder in ("quantbench", "kernels", "tools") for path in (ROOT / folder).rglob("*.py")
)
PACKAGES = ("torch", "triton", "pynvml")
#: what triton 3.2 lacks, by file: names and calls that are reached with newer versions only
NEWER = {
    "kernels/gemm/host.py": ("triton.tools.tensor_descriptor.TensorDescriptor",),
    "kernels/attention/operands.py": ("triton.tools.tensor_descriptor.TensorDescriptor",),
    "kernels/gemm/kernels.py": (
        "triton.language.range: got an unexpected keyword argument 'flatten'",
    ),
}


def faults(source: str) -> Iterator[str]:
    """Yields a line for each name that is missing and each call whose arguments are not taken."""
    tree = ast.parse(source)
    aliases = imported(tree)
    for node in ast.walk(tree):
        name = dotted(node, aliases)
        if name is not None and missing(name):
            yield f"line {node.lineno}: {name} is missing"
        if (
            isinstance(node, ast.Call)
            and (name := dotted(node.func, aliases))
            and not missing(name)
        ):
            refused = refusal(found(name), node)
            if refused:
                yield f"line {node.lineno}: {name}: {refused}"
        if (
            isinstance(node, ast.Constant)
            and str(node.value).startswith("nvml")
            and missing(f"pynvml.{node.value}")
        ):
            yield f"line {node.lineno}: {node.value} is missing"


def imported(tree: ast.AST) -> dict[str, str]:
    """Returns the full name of each name that the source imports from the packages."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                package = each.name.partition(".")[0]
                aliases[each.asname or package] = each.name if each.asname else package
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            for each in node.names:
                aliases[each.asname or each.name] = f"{node.module}.{each.name}"
    return {alias: name for alias, name in aliases.items() if name.partition(".")[0] in PACKAGES}


def dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Returns the full name of `alias.a.b`, None for other expressions."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, aliases)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def found(name: str) -> Any:
    """Returns the object with this full name. Raises AttributeError or ImportError."""
    package, *parts = name.split(".")
    here: Any = import_module(package)
    for part in parts:
        if inspect.ismodule(here) and not hasattr(here, part):
            import_module(f"{here.__name__}.{part}")
        here = getattr(here, part)
    return here


def missing(name: str) -> bool:
    try:
        found(name)
    except (AttributeError, ImportError):
        return True
    return False


def refusal(function: Any, call: ast.Call) -> str:
    """Returns why a function does not take a call's arguments; "" if it does, or does not tell what
    it takes.
    """
    if any(isinstance(argument, ast.Starred) for argument in call.args) or None in [
        k.arg for k in call.keywords
    ]:
        return ""
    try:
        signature = inspect.signature(
            function.fn if isinstance(function, JITFunction) else function
        )
    except ValueError:  # a builtin
        return ""
    try:
        signature.bind(
            *call.args, **{keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        )
    except TypeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("path", [str(path.relative_to(ROOT)) for path in FILES])
def test_every_name_and_call_is_one_of_the_installed_packages(path: str) -> None:
    expected = NEWER.get(path, ()) if TRITON == (3, 2) else ()
    left = [
        line
        for line in faults((ROOT / path).read_text())
        if not any(name in line for name in expected)
    ]
    assert left == []


@pytest.mark.parametrize(
    ("source", "faulty"),
    [
        ("import torch\ntorch.cuda.synchronise()", True),
        ("import torch\ntorch.cuda.Event(timing=True)", True),
        ("import torch.distributed as dist\ndist.all_sum()", True),
        ("from triton.testing import do_bench\ndo_bench(f, warm=1)", True),
        ("import triton.language as tl\ntl.sum(a, axes=1)", True),
        ("import pynvml\npynvml.nvmlDeviceGetPowerUsage()", True),
        ("ask('nvmlDeviceGetSpeed')", True),
        ("import torch\ntorch.cuda.Event(enable_timing=True)\ntorch.mm(a, b, out=c)", False),
    ],
)
def test_a_fault_is_found(source: str, faulty: bool) -> None:
    assert len(list(faults(source))) == faulty
