"""What a sweep, a benchmark plugin or a script uses to time: `make_timer(device.current(), TimingOptions())`."""

from collections.abc import Callable, Sequence
from typing import Protocol

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.measurement import Measurement
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import Run
from quantbench.timing.session import Audit


class Timer(Protocol):
    """Times runs on one device; made once per process, since making it allocates and compiles.

    warmup_s, measuring_s: wall time spent so far warming up and sampling.
    """

    warmup_s: float
    measuring_s: float

    def measure(
        self, run: Run, *, rotate: Sequence[Run] = (), min_bytes: int | None = None, audit: Audit | None = None
    ) -> Measurement:
        """Time `run`.

        run: does the work once (on CUDA: queues it on the current stream). rotate: the same work on copies of its
        data, and min_bytes: the least that one run touches; both serve cold figures of short kernels on CUDA (see
        `quantbench.timing.rotation`). audit: checks what the runs leave. Raises MeasurementError when no sample is a
        time, and whatever `run` and `audit` raise.
        """


def make_timer(spec: DeviceSpec, options: TimingOptions, *, state: Callable[[], DeviceState] | None = None) -> Timer:
    """The timer for a device. state: tells what it is doing; `device.monitor(spec)` by default.

    >>> from quantbench import device
    >>> timer = make_timer(device.current(), TimingOptions())  # doctest: +SKIP
    >>> timer.measure(task.run).samples_us  # doctest: +SKIP
    """
    if state is None:
        from quantbench import device

        state = device.monitor(spec)
    if spec.kind == "cpu":
        from quantbench.timing.cpu import CpuTimer

        return CpuTimer(options, spec, state)
    from quantbench.timing.cuda import CudaTimer

    return CudaTimer(options, spec, state)
