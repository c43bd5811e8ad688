"""Hostile files: every loader ends in a valid object or in one of our errors. `make fuzz` tries
10,000 files each.
"""

import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fuzz.damage import bytes_damaged, json_damaged, json_text
from fuzz.targets import TARGETS, Target
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from quantbench.errors import QuantbenchError

EXAMPLES = int(os.environ.get("QUANTBENCH_FUZZ_EXAMPLES", "25"))
NEEDS = {"aiconfigurator.parquet": "pyarrow"}


@cache
def _lines(seed: bytes) -> tuple[Any, ...]:
    return tuple(json.loads(line) for line in seed.splitlines())


@st.composite
def damaged(draw: st.DrawFn, target: Target) -> bytes:
    seed = draw(st.sampled_from(target.seeds()))
    if target.kind == "json" and draw(st.integers(0, 3)):
        return json_text(target.sealed(draw(json_damaged(json.loads(seed)))))
    if target.kind == "jsonl" and draw(st.integers(0, 3)):
        lines = list(_lines(seed))
        number = draw(st.integers(0, len(lines) - 1))
        lines[number] = draw(json_damaged(lines[number]))
        return b"".join(json_text(line) + b"\n" for line in lines)
    return draw(bytes_damaged(seed))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_hostile_file_ends_in_an_object_or_in_our_error(target: Target, tmp_path: Path) -> None:
    if target.name in NEEDS:
        pytest.importorskip(NEEDS[target.name], reason="needs the extra `tables`")

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize="QUANTBENCH_FUZZ_EXAMPLES" not in os.environ,
        suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(damaged(target))
    def load(content: bytes) -> None:
        with suppress(QuantbenchError):
            target.load(content, tmp_path)

    load()


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_whole_file_is_loaded(target: Target, tmp_path: Path) -> None:
    """What the fuzzer starts from is a file that the loader takes; otherwise it would only try to
    begin.
    """
    if target.name in NEEDS:
        pytest.importorskip(NEEDS[target.name], reason="needs the extra `tables`")
    for seed in target.seeds():
        assert target.load(seed, tmp_path) is not None


@pytest.mark.parametrize(
    "target", [t for t in TARGETS if t.kind in ("json", "jsonl")], ids=lambda target: target.name
)
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff\xfe{}", b"", b"null\n"]
)
def test_json_that_python_itself_gives_up_on_is_refused(
    target: Target, content: bytes, tmp_path: Path
) -> None:
    with suppress(QuantbenchError):
        target.load(content, tmp_path)
