"""Triton kernels of a plan are compiled ahead of time, in parallel, into the cache where a launch finds them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest
from made_devices import A100, CPU

from quantbench.sweep import compiling
from quantbench.sweep.axes import Held, parse_axis, with_defaults
from quantbench.sweep.child import WorkerLostError
from quantbench.sweep.compiling import compile_kernels
from quantbench.sweep.plan import PlanPoint, build_plan
from quantbench.timing.options import TimingOptions

ROOT = Path(__file__).resolve().parents[2]

# Makes the same plans of tensors with and without memory, and compares triton's cache keys of their kernels.
_SAME_KEYS = """
from made_devices import CPU

from quantbench.device import lookup
from quantbench.providers import inputs
from quantbench.sweep.compiling import list_kernels
from quantbench.sweep.messages import Request
from quantbench.workload import Attention, Gemm, GroupedGemm, Softmax

SIZES = [(256, 256, 256), (96, 264, 200), (65, 129, 33), (1, 128, 64), (512, 256, 256)]
DIRECTIONS = ("forward", "backward")
gemms = [
    Gemm(m, n, k, batch, "fp16", layout) for m, n, k in SIZES for batch in (1, 2) for layout in ("nt", "nn", "tn")
]
others = [Softmax(4, 64, 64, dtype="fp16", direction=way) for way in DIRECTIONS]
others += [Attention(1, 2, s, s, 64, dtype="fp16", direction=way) for s in (128, 200) for way in DIRECTIONS]
requests = [Request(w, f"triton.{p}") for w in gemms for p in ("data_parallel", "split_k", "stream_k", "persistent")]
grouped = [GroupedGemm(rows, 64, 72, "fp16", of) for rows in [(70, 0, 3), (16,)] for of in ("nt", "nn", "tn")]
requests += [Request(w, f"triton.{p}") for w in grouped for p in ("grouped", "grouped_persistent")]
requests += [Request(w, "triton.fused" if isinstance(w, Softmax) else "triton.flash") for w in others]
meta = inputs.MetaInputs
for name in ("a100-sxm4-80gb", "h200-sxm-141gb"):
    inputs.MetaInputs = meta
    on_meta = list_kernels(requests, lookup(name)).keys()
    inputs.MetaInputs = lambda: inputs.Inputs(CPU, "zeros")
    in_memory = list_kernels(requests, lookup(name)).keys()
    assert on_meta == in_memory, (name, on_meta ^ in_memory)
    print(len(on_meta))
"""


def softmax_points(*providers: str) -> tuple[PlanPoint, ...]:
    held = with_defaults(Held(attention="unfused", ops=("softmax",), heads=4, dtype="fp16"), A100)
    axis = parse_axis("seq=64,128,256,512,1024")
    return build_plan((axis,), held, providers, TimingOptions(), A100).points


@pytest.mark.slow
def test_kernels_have_the_same_key_without_memory_as_with_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", _SAME_KEYS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(int(count) >= 10 for count in done.stdout.split())


@pytest.mark.slow
def test_all_kernels_are_compiled_once_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shown: list[tuple[int, int, str]] = []
    said = compile_kernels(softmax_points("triton.fused", "torch.eager"), A100, lambda *now: shown.append(now))
    binaries = sorted(tmp_path.rglob("*.cubin"))
    assert len(binaries) >= 3
    assert said.startswith(f"compiled {len(binaries)} of {len(binaries)} kernels in ")
    assert [done for done, _, _ in shown[1:]] == list(range(len(binaries)))
    again = compile_kernels(softmax_points("triton.fused"), A100, lambda *now: None)
    assert again.startswith(f"compiled {len(binaries)} of {len(binaries)} kernels in ")
    assert sorted(tmp_path.rglob("*.cubin")) == binaries


def test_a_compiler_that_is_lost_leaves_the_rest_to_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = WorkerLostError("crash", "killed by SIGKILL")  # over its second kernel
    compiler = MagicMock(receive=Mock(side_effect=[{"kernels": 5, "processes": 2}, {"compiled": 1}, lost]))
    compiler.__enter__.return_value = compiler
    compiler.__exit__.return_value = None
    monkeypatch.setattr(compiling, "ChildProcess", lambda module: compiler)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    said = compile_kernels(softmax_points("triton.fused"), A100, lambda *now: None)
    assert said.startswith("compiled 1 of 5 kernels in 2 processes in ")
    assert said.endswith("; the rest is compiled while measuring")


def test_nothing_is_started_for_few_points_other_libraries_or_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "ChildProcess", lambda module: pytest.fail("started"))
    points = softmax_points("triton.fused")
    for chosen, spec in ((points[:2], A100), (softmax_points("torch.eager"), A100), (points, CPU)):
        assert compile_kernels(chosen, spec, lambda *now: None) == ""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert compile_kernels(points, A100, lambda *now: None) == ""
