"""The fixture inside a pytest run of its own, as a user's project would use it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_truth import plugin_words
from made_runs import SPEC, measurement
from pytest_benchmark.session import PerformanceRegression

from quantbench.errors import InputError
from quantbench.measurement import Measurement
from quantbench.providers import inputs
from quantbench.pytest_plugin import DeviceBenchmark
from quantbench.timing.options import TimingOptions
from quantbench.workload import Gemm

ROOT = Path(__file__).resolve().parents[2]
Suite = Callable[[str], tuple[int, str]]
SUITE = """
import pytest, torch

@pytest.mark.benchmark(group="mine")
@pytest.mark.parametrize("size", [32, 128])
def test_my_kernel(device_benchmark, size):
    a = torch.randn(size, size)
    device_benchmark(lambda: torch.mm(a, a), flops=2 * size**3, dtype="fp32")

def test_impossible(device_benchmark):
    device_benchmark(lambda: None, flops=10**18, dtype="fp32")

def test_plain():
    assert torch.ones(2).sum() == 2
"""


@pytest.fixture
def suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Suite:
    """Runs SUITE in this process with the words given: the exit code, and what is said."""
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_suite.py").write_text(SUITE)

    def call(words: str) -> tuple[int, str]:
        usual = "-q --import-mode=importlib --capture=sys -p no:cacheprovider"
        quick = "--device-max-time=50ms --device-cache=hot"
        code = pytest.main([*plugin_words(), *shlex.split(f"{usual} {quick} {words}")])
        return int(code), "".join(capsys.readouterr())

    return call


@pytest.mark.slow
def test_the_table_and_the_json_hold_device_time(suite: Suite, tmp_path: Path) -> None:
    code, said = suite("--benchmark-only --benchmark-json=out.json -k my_kernel")
    assert code == 0
    assert "benchmark 'mine': 2 tests" in said
    found = {
        b["params"]["size"]: b
        for b in json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    }
    for each in found.values():
        assert each["stats"]["rounds"] >= 10
        assert each["extra_info"]["grade"] in "ABCD"
        assert each["extra_info"]["device"].startswith("cpu-")
        assert each["extra_info"]["cache"] == "hot"
        # The clock was advanced by the samples: each round is one of them, to the nanosecond.
        assert all(0 < seconds < 10 for seconds in each["stats"]["data"])
    # 64 times the work; a clock that ticked with Python would see no difference.
    assert found[128]["stats"]["median"] > 2 * found[32]["stats"]["median"]


@pytest.mark.slow
def test_a_device_that_cannot_be_measured_is_one_line(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTBENCH_DEVICE", "abacus")
    _, said = suite("-k 'my_kernel or plain'")
    error = "\nQUANTBENCH_DEVICE: 'abacus'; expected cpu, cuda or cuda:<number>\n"
    assert said.count(error) == 2  # of two tests, without a traceback
    assert "here.py" not in said
    assert "1 passed" in said  # the test that asks for no device


@pytest.mark.slow
def test_a_comparison_fails_on_a_regression(suite: Suite, tmp_path: Path) -> None:
    only = "--benchmark-only -k my_kernel"
    assert suite(f"{only} --benchmark-save=base")[0] == 0
    (saved,) = tmp_path.glob(".benchmarks/*/*.json")
    data = json.loads(saved.read_text())
    for each in data["benchmarks"]:
        each["stats"]["median"] /= 100  # as if it had been a hundred times faster
    saved.write_text(json.dumps(data))
    with pytest.raises(PerformanceRegression):
        suite(f"{only} --benchmark-compare=0001 --benchmark-compare-fail=median:5%")


@pytest.mark.slow
def test_a_figure_above_the_peak_fails(suite: Suite) -> None:
    code, said = suite("-k impossible")
    assert code == 1
    assert "faster than the hardware's peak" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ("--benchmark-skip", "1 passed, 3 skipped"),
        ("--benchmark-disable -k 'not impossible'", "3 passed"),
    ],
)
def test_the_switches_of_pytest_benchmark_work(suite: Suite, words: str, outcome: str) -> None:
    assert outcome in suite(words)[1]


def test_a_wrong_option_is_said_in_one_line(suite: Suite) -> None:
    code, said = suite("--device-max-time=soon -k my_kernel")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --device-max-time: 'soon'; expected a time such as 90s" in said


def test_interpreted_times_are_no_gate_and_no_figures(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, said = suite("--benchmark-compare-fail=median:5% -k my_kernel")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --benchmark-compare-fail: TRITON_INTERPRET=1" in said
    with pytest.raises(pytest.skip.Exception, match="triton's interpreter"):
        benchmarked(100.0)


def test_histograms_show_device_time(suite: Suite, tmp_path: Path) -> None:
    pytest.importorskip("pygal", reason="needs pygal: pip install 'pytest-benchmark[histogram]'")
    assert suite("--benchmark-only --benchmark-histogram=times -k my_kernel")[0] == 0
    (picture,) = tmp_path.glob("times*.svg")
    assert "test_my_kernel[128]" in picture.read_text()


@pytest.mark.gpu
@pytest.mark.gpu_timing
def test_fixture_and_sweep_agree_within_two_percent_above_20_us(tmp_path: Path) -> None:
    """Two medians of one kernel by one timer; not a bound on how fast anything is."""
    from fixture_truth import measure

    rows = [row for row in measure(tmp_path)["rows"] if min(row["sweep_us"]) > 20]
    assert len(rows) >= 3
    assert all(abs(row["ratio"] - 1) < 0.02 for row in rows), rows


class FakeTimer:
    """Notes what it is asked to time, and says that a run takes `us`."""

    def __init__(self, us: float = 100.0) -> None:
        self.us = us
        self.asked: list[dict[str, Any]] = []

    def measure(self, run: object, **options: Any) -> Measurement:
        self.asked.append({"run": run, **options})
        return measurement([self.us] * 10)


class FakeBenchmark:
    """Stands in for pytest-benchmark's fixture."""

    def __init__(self) -> None:
        self.extra_info: dict[str, object] = {}
        self.rounds = 0

    def pedantic(self, target: object, *, rounds: int, iterations: int) -> None:
        self.rounds = rounds


def test_a_workload_is_timed_as_a_sweep_times_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its bytes, and a way to copy its data where a cold cache needs that: so that the two
    agree.
    """
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(inputs, "torch_device", lambda device: torch.device("cpu"))
    timer, benchmark, options = FakeTimer(), FakeBenchmark(), TimingOptions()
    work = Gemm(512, 512, 512, dtype="fp32")
    DeviceBenchmark(benchmark, SPEC, timer, options).workload(work, "tests.fake_providers:Good")  # type: ignore[arg-type]
    (asked,) = timer.asked
    other = asked["copy"](0)
    other()
    assert other is not asked["run"]
    assert asked["min_bytes"] == work.min_bytes
    assert asked["audit"] is not None
    assert benchmark.rounds == 10


def benchmarked(samples_us: float, **claimed: object) -> None:
    """What a test with `device_benchmark(run, **claimed)` does on SPEC, when a run takes
    samples_us.
    """

    timer = FakeTimer(samples_us)
    DeviceBenchmark(FakeBenchmark(), SPEC, timer, TimingOptions())(lambda: None, **claimed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "claimed",
    [
        {"flops": 2 * 4096**3},
        {"flops": 2 * 4096**3, "dtype": "float32"},
        {"flops": 2 * 4096**3, "dtype": torch.bfloat16},
        {"flops": 2 * 4096**3, "dtype": "fp8"},
        {"min_bytes": 2**30},
        {"min_bytes": 2**20},
    ],
    ids=str,
)
def test_a_limit_applies_with_and_without_a_dtype(claimed: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match="faster than the hardware's peak"):
        benchmarked(0.004, **claimed)


@pytest.mark.parametrize(
    ("claimed", "said"),
    [
        ({"flops": -1}, r"device_benchmark: flops = -1; expected an integer from 1 to"),
        ({"flops": 0}, r"flops = 0; expected an integer"),
        ({"flops": 1e12}, r"flops = 1000000000000.0; expected an integer"),
        ({"min_bytes": True}, r"min_bytes = True; expected an integer"),
        (
            {"flops": 1, "dtype": "float31"},
            r"dtype = 'float31'; expected one of fp16, bf16, fp32, .*float32",
        ),
        ({"flops": 1, "dtype": ""}, r"dtype = ''; expected one of"),
    ],
)
def test_claims_that_mean_nothing_are_refused(claimed: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        benchmarked(100.0, **claimed)


def test_a_result_and_a_class_are_refused() -> None:
    fixture: Any = DeviceBenchmark(FakeBenchmark(), SPEC, FakeTimer(), TimingOptions())
    with pytest.raises(InputError, match="a Tensor; expected a function"):
        fixture(torch.ones(1))
    with pytest.raises(InputError, match="a float; expected a provider's id"):
        fixture.workload(Gemm(8, 8, 8), 1.0)


def test_torchs_names_of_formats_are_known() -> None:
    for dtype in ("fp32", "float32", "torch.float32", torch.float32, "half", torch.bfloat16):
        benchmarked(100.0, flops=2 * 256**3, dtype=dtype)
