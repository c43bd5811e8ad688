"""Provides the pytest fixture `device_benchmark`, which reports device times in pytest-benchmark.

    def test_my_kernel(device_benchmark):
        a, b = torch.randn(2, 4096, 4096, device="cuda", dtype=torch.bfloat16)
        device_benchmark(lambda: torch.mm(a, b), flops=2 * 4096**3, dtype="bf16")

quantbench's timer first takes the samples. The fixture then replaces pytest-benchmark's timer with
a clock, and advances the clock by one sample per round. All statistics and options of
pytest-benchmark thus use device time. pytest loads this module wherever quantbench is installed, so
the module must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest

from quantbench.errors import InputError, QuantbenchError, require_int
from quantbench.measurement import Measurement
from quantbench.timing.options import TimingOptions
from quantbench.units import parse_duration_s
from quantbench.workload.dtypes import dtype_name

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.timing.session import Timer
    from quantbench.workload import Workload


@dataclass
class _DeviceClock:
    """Clock that advances only by measured device time.

    now_s: current time, in s.
    """

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


_CLOCK = _DeviceClock()


class DeviceBenchmark:
    """Value of the fixture `device_benchmark`. Calling it times a function.

    benchmark: pytest-benchmark's fixture.
    spec: constants of the device in use.
    timer: quantbench's timer for the device.
    options: timing options of the timer.
    """

    def __init__(
        self, benchmark: Any, spec: DeviceSpec, timer: Timer, options: TimingOptions
    ) -> None:
        self.spec = spec
        self._benchmark = benchmark
        self._timer = timer
        self._options = options

    def __call__(
        self,
        run: Callable[[], object],
        *,
        flops: int | None = None,
        min_bytes: int | None = None,
        dtype: object = None,
    ) -> Measurement:
        """Times `run`, and passes its samples to pytest-benchmark.

        The results of `run` are not checked. With TRITON_INTERPRET=1 the test is skipped after it.

        run: function that enqueues the same work each time.
        flops: number of operations of one run, at least 1; None if it is unknown. A rate above the
            hardware's peak is rejected.
        min_bytes: minimum device-memory traffic of one run in bytes, at least 1; None if it is
            unknown. A rate above the memory bandwidth is rejected.
        dtype: dtype of the operations (`bf16`, `torch.bfloat16`), which determines the peak; None
            for the device's highest peak.

        Raises InputError for wrong arguments, and AssertionError for a rejected measurement.
        """
        for name, value in (("flops", flops), ("min_bytes", min_bytes)):
            if value is not None:
                require_int("device_benchmark", name, value, high=2**62)
        if not callable(run):
            expected = "a function, such as lambda: torch.mm(a, a)"
            raise InputError("device_benchmark", f"a {type(run).__name__}", expected)
        known = None if dtype is None else dtype_name(dtype, "device_benchmark")
        timed = cast("Callable[[], None]", run)  # its return value is ignored
        measurement = self._timer.measure(timed)
        _skip_interpreted()
        return self._report(measurement, flops or 0, min_bytes or 0, known)

    def workload(self, workload: Workload, provider: str) -> Measurement:
        """Times a workload, and checks its output as a sweep does.

        The test is skipped if the provider does not support the workload. In Triton's interpreter,
        the output is checked and the test is skipped afterwards.

        provider: name of the provider that runs the workload.

        Raises InputError for an unknown provider, and AssertionError for a rejected measurement.
        """
        from quantbench.providers import catalog
        from quantbench.sweep.worker import measure
        from quantbench.timing.grade import NO_CHECK

        if not isinstance(provider, str):
            found = f"provider: a {type(provider).__name__}"
            expected = "a provider's id, such as torch.mm or my_module:MyGemm"
            raise InputError("device_benchmark.workload", found, expected)
        maker = catalog.make(provider)
        reason = maker.unsupported(workload, self.spec)
        if reason is not None:
            pytest.skip(reason)
        self._benchmark.extra_info["workload"] = str(workload)
        reply = measure(maker, workload, self.spec, self._timer, self._options)
        assert reply.measurement is not None
        if not provider.startswith("torch."):
            _skip_interpreted()
        unchecked = "" if reply.checked else NO_CHECK
        return self._report(
            reply.measurement, workload.flops, workload.min_bytes, workload.dtype, unchecked
        )

    def _report(
        self,
        measurement: Measurement,
        flops: int,
        min_bytes: int,
        dtype: str | None,
        unchecked: str = "",
    ) -> Measurement:
        """Passes a measurement and its grade to pytest-benchmark, and returns the measurement.

        flops, min_bytes: operations and minimum traffic in bytes of one run; 0 if unknown.
        dtype: dtype that determines the peak; None for the device's highest peak.
        unchecked: reason why the results were not checked, or "".

        Raises AssertionError for a rejected measurement.
        """
        from quantbench.timing.grade import grade

        samples = iter(measurement.samples_us)

        def replay() -> None:
            _CLOCK.now_s += next(samples) * 1e-6

        self._benchmark.pedantic(replay, rounds=len(measurement.samples_us), iterations=1)
        trust = grade(
            measurement,
            flops=flops,
            min_bytes=min_bytes,
            spec=self.spec,
            dtype=dtype,
            options=self._options,
            unchecked=unchecked,
        )
        self._benchmark.extra_info.update(
            device=self.spec.name,
            mode=measurement.mode,
            cache=measurement.cache,
            floor_us=measurement.floor_us,
            clocks_mhz=list(measurement.clocks_mhz),
            state=asdict(measurement.state_after),
            stopped_by=measurement.stopped_by,
            discarded=len(measurement.discarded),
            grade=trust.letter,
            reasons=list(trust.reasons),
        )
        assert trust.letter != "rejected", trust.reasons[0]
        return measurement


def _skip_interpreted() -> None:
    """Skips a test whose times may be those of Triton's interpreter, so that nobody keeps them."""
    from quantbench.timing.grade import INTERPRETED

    if _interpreter_runs():
        pytest.skip(INTERPRETED)


def _interpreter_runs() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("quantbench")
    group.addoption(
        "--device-cache",
        default="cold",
        choices=("cold", "hot"),
        help="last-level cache before each run",
    )
    group.addoption(
        "--device-max-time", default="1s", help="sampling time per benchmark at most (default: 1s)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Checks the values of this plugin's options once, before any test runs."""
    try:
        _timing_options(config)
        if _interpreter_runs() and config.getoption("benchmark_compare_fail", None):
            expected = "times of kernels: unset it"
            raise InputError("--benchmark-compare-fail", "TRITON_INTERPRET=1", expected)
    except InputError as error:
        raise pytest.UsageError(str(error)) from None


def _timing_options(config: pytest.Config) -> TimingOptions:
    """Returns the timing options from the command line."""
    max_time_s = parse_duration_s("--device-max-time", config.getoption("--device-max-time"))
    return TimingOptions(cache=config.getoption("--device-cache"), max_time_s=max_time_s)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes the device clock the timer of pytest-benchmark in each test that uses the fixture.

    Other options of pytest-benchmark stay unchanged.
    """
    for item in items:
        if "device_benchmark" in getattr(item, "fixturenames", ()):
            own = item.get_closest_marker("benchmark")
            options = {**(own.kwargs if own is not None else {}), "timer": _CLOCK}
            item.add_marker(pytest.mark.benchmark(**options), append=False)


@pytest.fixture(scope="session")
def _device_timer(request: pytest.FixtureRequest) -> tuple[DeviceSpec, Timer, TimingOptions]:
    """Returns the device in use, its timer and the timing options, once per session."""
    from quantbench import device
    from quantbench.timing import make_timer

    options = _timing_options(request.config)
    try:
        spec = device.current()
    except QuantbenchError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    return spec, make_timer(spec, options), options


@pytest.fixture
def device_benchmark(
    benchmark: Any, _device_timer: tuple[DeviceSpec, Timer, TimingOptions]
) -> DeviceBenchmark:
    """Returns the `DeviceBenchmark` for the device in use."""
    return DeviceBenchmark(benchmark, *_device_timer)
