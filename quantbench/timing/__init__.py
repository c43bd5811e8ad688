"""Times work on a GPU or a CPU. `make_timer` returns the timer for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec, DeviceState
    from quantbench.timing.options import TimingOptions
    from quantbench.timing.session import Timer


def make_timer(
    spec: DeviceSpec, options: TimingOptions, *, state: Callable[[], DeviceState] | None = None
) -> Timer:
    """Returns the timer for a device.

    state: function that reads the device's SM clock, power and throttle reasons; None for
        `device.monitor(spec)`.

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
