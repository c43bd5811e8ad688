"""What to say when a GPU's points came back without the names of their kernels."""

from __future__ import annotations

from collections.abc import Sequence

from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec

_VARIABLE = "QUANTBENCH_KERNEL_NAMES"


def unnamed_line(points: Sequence[Point], spec: DeviceSpec, environment: dict[str, str]) -> str | None:
    """A sentence where points measured on a GPU have no kernel's name that was wanted, with what may help; else None.

    environment: the variables of the run.
    """
    way = environment.get(_VARIABLE, "apart").strip().lower()
    missing = sum(point.launch is None for point in points)
    if spec.kind != "cuda" or way == "off" or not missing:
        return None
    line = f"{missing} of {len(points)} points have no kernel's name, so that causes which rest on it are not told"
    if way == "here":
        return line
    return f"{line}; where one process alone may use the GPU, set {_VARIABLE}=here"
