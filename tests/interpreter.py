"""Tests that need triton's interpreter, inside an ordinary pytest run.

TRITON_INTERPRET must be set before triton is first imported and cannot be taken back, while
compiling ahead of time needs it unset: one process cannot do both. A test marked `@in_interpreter`
therefore runs in a second pytest process, one for all such tests of its module, and its outcome is
replayed here under its own name:

    from interpreter import in_interpreter

    @in_interpreter
    @pytest.mark.parametrize("m", [1, 17])
    def test_matmul(m): ...                     # runs on CPU tensors, TRITON_INTERPRET=1

Put `@in_interpreter` on top, above `parametrize` and `@given`. Fixtures are made in the second
process. `TRITON_INTERPRET=1 pytest tests/test_x.py` runs the tests directly, which is what one
wants with a debugger.

In the interpreter a bf16 `tl.dot` is silently wrong: test products there in fp16 and fp32.
"""

import functools
import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, settings

ACTIVE = os.environ.get("TRITON_INTERPRET", "0") == "1"
#: Of a property test: few, because the interpreter is slow. `.ci/nightly` tries 40.
EXAMPLES = settings(
    max_examples=int(os.environ.get("QUANTBENCH_EXAMPLES", "8")), deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
_TIMEOUT_S = 900


def _broken() -> str | None:
    """Why the interpreter cannot be used here, or None."""
    numbers = [
        tuple(int(part) for part in version(name).split(".")[:2]) for name in ("triton", "numpy")
    ]
    if numbers[0] < (3, 7) and numbers[1] >= (2, 4):
        return "triton's interpreter before 3.7 fails with numpy 2.4 and newer (range over a triton scalar)"
    return None


def in_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """Run `test` under TRITON_INTERPRET=1 (see the module's docstring)."""
    if ACTIVE:
        return test

    # No functools.wraps: hypothesis' pytest plugin must not take the replay for a property test.
    def replay(request: pytest.FixtureRequest, **_parameters: Any) -> None:
        reason = _broken()
        if reason is not None:
            pytest.skip(reason)
        items = [item for item in request.session.items if item.path == request.path]
        chosen = tuple(item.nodeid for item in items if getattr(item.obj, "in_interpreter", False))
        outcomes = _run(chosen, str(request.config.rootpath))
        kind, text = outcomes.get(
            request.node.name, ("error", "the second process did not run it\n" + outcomes[""][1])
        )
        if kind == "skipped":
            pytest.skip(text)
        if kind != "passed":
            pytest.fail(f"in the interpreter: {kind}\n{text}", pytrace=False)

    parameters = inspect.signature(test).parameters.values()
    marks = [*getattr(test, "pytestmark", []), pytest.mark.slow.mark]
    by_mark = {
        name for mark in marks if mark.name == "parametrize" for name in _names(mark.args[0])
    }
    names = ["request", *(p.name for p in parameters if p.name in by_mark)]
    replay.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    )
    replay.__name__, replay.__doc__, replay.__module__ = (
        test.__name__,
        test.__doc__,
        test.__module__,
    )
    replay.pytestmark = marks  # type: ignore[attr-defined]
    replay.in_interpreter = True  # type: ignore[attr-defined]
    return replay


def _names(argnames: str | tuple[str, ...] | list[str]) -> list[str]:
    return [n.strip() for n in argnames.split(",")] if isinstance(argnames, str) else list(argnames)


@functools.cache
def _run(nodeids: tuple[str, ...], root: str) -> dict[str, tuple[str, str]]:
    """Run the tests in a second process: test name → (passed, skipped, failure or error; text). ""
    is the whole.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *nodeids,
        ]
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        outcomes = {"": ("error", done.stdout + done.stderr)}
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        for case in cases:
            problem = next(
                (child for child in case if child.tag in ("failure", "error", "skipped")), None
            )
            if problem is None:
                outcomes[str(case.get("name"))] = ("passed", "")
            else:
                text = (
                    problem.get("message", "") if problem.tag == "skipped" else problem.text or ""
                )
                outcomes[str(case.get("name"))] = (problem.tag, text)
    return outcomes
